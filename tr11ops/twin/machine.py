"""This machine, as a twin needs it: programs, folders, memory, free ports, one command at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from tr11ops.base.errors import TwinError
from tr11ops.base.units import counted
from tr11ops.twin.plan import TwinPlan

# Free TCP ports for a twin, safe against other twins that start at the same moment.

BLOCK = 64  # ports are claimed in blocks of this size
FIRST_BLOCK = 20_032 // BLOCK
# below the range from which Linux takes ports for outgoing connections
LAST_BLOCK = 32_704 // BLOCK


def is_free(port: int) -> bool:
    """True when no one listens on `port`, on any interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # connections in TIME_WAIT do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def _claim(block: int) -> socket.socket | None:
    """The block's lock, or None when another start holds it: an abstract socket, which ends with
    its process.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0tr11-twin-ports-{block}")
    except OSError:
        lock.close()
        return None
    return lock


@contextlib.contextmanager
def claimed_ports(count: int, beside_twins: bool = False) -> Iterator[int]:
    """The first of `count` consecutive free ports; while the context is open no other twin takes
    them.

    Leave the context when the daemons listen. `beside_twins`: for something else than a twin, from
    the other end: a twin's controller that is being restarted does not listen for a moment, and
    finds its port again. Raises TwinError when there is no such range.
    """
    blocks = -(-count // BLOCK)
    starts = range(FIRST_BLOCK, LAST_BLOCK - blocks + 2)
    for start in reversed(starts) if beside_twins else starts:
        with contextlib.ExitStack() as held:
            locks = [_claim(block) for block in range(start, start + blocks)]
            for lock in locks:
                if lock is not None:
                    held.enter_context(lock)
            first = start * BLOCK
            if None not in locks and all(is_free(port) for port in range(first, first + count)):
                yield first
                return
    raise TwinError(
        f"no {count} free TCP ports in a row between {FIRST_BLOCK * BLOCK} and {(LAST_BLOCK + 1) * BLOCK - 1}: "
        "end other twins (tr11 twin down) or what listens there (ss -ltn)"
    )


INSTALL_FIX = "apt-get install slurm-wlm munge"
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sinfo", "sbatch", "squeue", "scontrol", "scancel", "srun")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def default_directory(environ: Mapping[str, str], user_id: int) -> Path:
    """Where this user's twins live: $XDG_STATE_HOME/tr11/twin, else ~/.local/state/tr11/twin; root:
    /var/lib/tr11/twin.

    Root's home is closed to others, and jobs of other users must be able to read the twin's
    configuration.
    """
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "tr11" / "twin"
    if user_id == 0:
        return Path("/var/lib/tr11/twin")
    return (
        Path(environ.get("HOME") or pwd.getpwuid(user_id).pw_dir)
        / ".local"
        / "state"
        / "tr11"
        / "twin"
    )


def search_path(environ: Mapping[str, str]) -> str:
    """PATH with the folders of system daemons, which a plain user's PATH often lacks."""
    return environ.get("PATH", "") + ":" + SYSTEM_PATH


def find_programs(
    path: str, names: Iterable[str] = DAEMONS + CLIENTS, fix: str = INSTALL_FIX
) -> dict[str, str]:
    """Full paths of programs, such as Slurm's and munge's. Raises TwinError that names the missing
    ones and the fix.
    """
    found = {name: shutil.which(name, path=path) for name in names}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        raise TwinError(f"{', '.join(missing)} not found on this machine: {fix}")
    return {name: where for name, where in found.items() if where is not None}


def slurm_version(slurmctld: str) -> tuple[int, int]:
    """Major and minor version, such as (22, 5)."""
    text = subprocess.run(
        [slurmctld, "-V"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise TwinError(f"{slurmctld} -V said {text.strip()!r}, no version: {INSTALL_FIX}")
    return int(match[1]), int(match[2])


def check_memory(plan: TwinPlan) -> None:
    """Raises TwinError when the daemons would not fit into free memory."""
    available = psutil.virtual_memory().available // 2**20
    if available < plan.memory_needed_megabytes:
        raise TwinError(
            f"{counted(len(plan.node_names), 'node needs', 'nodes need')} {plan.memory_needed_megabytes} MB of memory,"
            f" this machine has {available} MB free: ask for fewer --nodes or end other programs"
        )


def make_folder(folder: Path) -> None:
    """Make a folder that others may read, whatever the umask: jobs of other users need the
    configuration.
    """
    missing = [folder, *folder.parents]
    missing = [entry for entry in missing if not entry.exists()]
    try:
        for entry in reversed(missing):
            entry.mkdir(exist_ok=True)
            entry.chmod(0o755)
    except OSError as error:
        raise TwinError(
            f"the folder {folder} cannot be made ({error.strerror}): name another with --dir"
        ) from error


def write_file(path: Path, text: str, mode: int) -> None:
    """Write a file with exactly this mode."""
    path.write_text(text)
    path.chmod(mode)


@contextlib.contextmanager
def locked(home: Path, name: str) -> Iterator[None]:
    """Keep a second `up` or `down` of the same twin away until this one is done.

    The lock is an abstract socket: it ends with its process and leaves no file.
    """
    digest = hashlib.sha256(bytes(home / name)).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            lock.bind(f"\0tr11-twin-{digest}")
        except OSError:
            raise TwinError(
                f"another command is starting or ending twin {name!r} in {home}: wait for it"
            ) from None
        yield


def listens(path: Path) -> bool:
    """True when a server answers on this Unix socket."""
    return _answers(socket.AF_UNIX, str(path))


def accepts(port: int) -> bool:
    """True when a server answers on this TCP port of the loopback interface; does not take the
    port, unlike a bind.
    """
    return _answers(socket.AF_INET, ("127.0.0.1", port))


def _answers(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
