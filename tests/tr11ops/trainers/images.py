"""An image that has a trainer and no tr11, and stand-ins for what runs one: `apptainer`, and `srun` with
Pyxis. Both change the root (unshare, chroot): what is not mounted is not seen inside. The steps of
`srun` are started by a server, as Slurm's are: no process of them is a child of who asked for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# of the host: what a program needs to run at all
_BORROWED = ("usr", "bin", "sbin", "lib", "lib64", "proc", "dev")

LOOP = r"""
import importlib.util, os, signal, sys, time, zipfile
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def save(step):
    place = folder / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place / f"rank_{rank}.pt.new", "w") as made:
        made.writestr("data", str(step))
    os.replace(place / f"rank_{rank}.pt.new", place / f"rank_{rank}.pt")
found = [int(one.name[5:]) for one in folder.glob("step-*")]
start = max(found, default=0)
if rank == 0:
    print("inside", Path("/only-in-the-image").exists(), importlib.util.find_spec("tr11ops"), os.getcwd(), flush=True)
    print(f"begin after step {start}", flush=True)
last = steps
for step in range(start + 1, steps + 1):
    time.sleep(0.1)
    if rank == 0:
        print(f"at {step}/{steps} loss={1 / step}", flush=True)
        if asked and not (folder / "last").exists():
            (folder / "last").write_text(str(step + 4))
    with open(folder / "last") if (folder / "last").exists() else open(os.devnull) as stream:
        last = int(stream.read() or last)
    if step % every == 0 or step >= last:
        save(step)
    if step >= last:
        break
"""
# in torchrun's place: the same words, the same variables
LAUNCHER = r"""
import os, subprocess, sys
def value(name):
    return next(word.split("=")[1] for word in sys.argv if word.startswith(f"--{name}="))
words = sys.argv[max(i for i, word in enumerate(sys.argv) if word.startswith("--log-dir=")) + 1:]
count, first = int(value("nproc-per-node")), int(value("node-rank")) * int(value("nproc-per-node"))
os.makedirs(value("log-dir"), exist_ok=True)
world = str(count * int(value("nnodes")))
started = [
    subprocess.Popen([sys.executable, "-u", *words], env={**os.environ, "RANK": str(first + i), "LOCAL_RANK": str(i), "WORLD_SIZE": world})
    for i in range(count)
]
sys.exit(max(one.wait() for one in started))
"""
APPTAINER = """#!{python}
import json, os, sys
words = sys.argv[2:]
binds, place = [], "/"
while words[0].startswith("-"):
    name = words.pop(0)
    if name == "--bind":
        binds.append(words.pop(0))
    elif name == "--pwd":
        place = words.pop(0)
sys.path.insert(0, {here!r})
from tests.tr11ops.trainers.images import root_command
command = root_command(words[0], binds, place, words[1:])
os.execvp(command[0], command)
"""
SRUN = """#!{python}
import json, os, signal, socket, sys
words, asked = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    asked[name] = value
sys.path.insert(0, {here!r})
from tests.tr11ops.trainers.images import root_command
command = root_command(asked["--container-image"], asked["--container-mounts"].split(","), asked["--container-workdir"], words)
with socket.socket(socket.AF_UNIX) as step:
    step.connect({server!r})
    order = json.dumps({{"command": command, "environment": dict(os.environ)}}).encode()
    socket.send_fds(step, [len(order).to_bytes(8, "big")], [1])
    step.sendall(order)
    signal.signal(signal.SIGTERM, lambda *_: step.sendall(b"end"))
    status = step.recv(16)
sys.exit(int(status))
"""


def root_command(image: str, binds: list[str], directory: str, words: list[str]) -> list[str]:
    """A command in another root, the process itself and no child of it."""
    lines = ["set -e"]
    for name in _BORROWED:
        if Path("/", name).is_symlink():
            lines.append(f"ln -sfn {Path('/', name).readlink()} {image}/{name}")
        elif Path("/", name).exists():
            lines += [f"mkdir -p {image}/{name}", f"mount --rbind /{name} {image}/{name}"]
    for bind in binds:
        host, _, inside = bind.partition(":")
        lines += [
            f"mkdir -p {image}{inside or host}",
            f"mount --rbind {host} {image}{inside or host}",
        ]
    lines.append(f'exec chroot {image} /bin/sh -c \'cd {directory} && exec "$@"\' sh "$@"')
    return ["unshare", "-rm", "bash", "-c", "\n".join(lines), "image", *words]


class Images:
    """A folder with an image and programs that run it. `path`: for PATH."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "image", folder / "bin"
        self._server = folder / "stepd"
        app = self.image / "opt" / "app"
        for name, text in {"loop.py": LOOP, "torch/distributed/run.py": LAUNCHER}.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        (self.image / "only-in-the-image").touch()
        self.path.mkdir()
        given = {
            "python": sys.executable,
            "here": str(Path(__file__).parents[3]),
            "server": str(self._server),
        }
        for name, text in {"apptainer": APPTAINER, "srun": SRUN}.items():
            (self.path / name).write_text(text.format(**given))
            (self.path / name).chmod(0o755)

    def require(self) -> None:
        """Skip where no root can be changed."""
        command = root_command(
            str(self.image), [], "/opt/app", ["test", "-e", "/only-in-the-image"]
        )
        if shutil.which("unshare") is None or subprocess.run(command, check=False).returncode:
            pytest.skip("this machine lets no one change the root")

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Slurm's side: starts what `srun` asks for, and ends it where srun is ended in order."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self._server))
            server.listen()
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            yield
            server.shutdown(socket.SHUT_RDWR)

    def _serve(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                asker, _ = server.accept()
                threading.Thread(target=self._step, args=(asker,), daemon=True).start()

    @staticmethod
    def _step(asker: socket.socket) -> None:
        head, (output,), _, _ = socket.recv_fds(asker, 8, 1)
        size = int.from_bytes(head, "big")
        order = json.loads(asker.recv(size, socket.MSG_WAITALL))
        with os.fdopen(output, "wb") as stream:
            process = subprocess.Popen(
                order["command"], env=order["environment"], stdout=stream, stderr=stream,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=_end_when_asked, args=(asker, process), daemon=True).start()
        with suppress(OSError):
            asker.sendall(str(max(0, process.wait())).encode())


def _end_when_asked(asker: socket.socket, process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if asker.recv(16) == b"end":  # nothing comes where srun was killed: the step goes on
            os.killpg(process.pid, signal.SIGKILL)
