"""Break a tiny training in every way that one machine allows: `trainings.py OUT [--spawned]
[CASE...]`.

What it said is kept in OUT.

Needs root and `unshare`: every node of a case is a torchrun in name spaces of its own, with its own
host name, address and mounts. `clean` takes this machine's names out of a log. A case that runs
nothing distributed is a plain command.
"""

import ctypes
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import field

from trainer.contract.record import Record

HERE = Path(__file__).resolve().parent
SCRATCH = Path("/tmp/diagnose-corpus")
BIN = Path(sys.executable).parent
NAMES = [
    (rf"{HERE}/worker.py", "/home/user/code/train/pretrain_gpt.py"),
    (str(BIN.parent), "/home/user/conda/envs/train"),
    (str(HERE.parent.parent), "/home/user/code/tr11"),
    (rf"{SCRATCH}/[0-9]+-[\w-]+", "/scratch/tr11"),
    (str(SCRATCH), "/scratch/tr11"),
    (r"\b127\.0\.1\.(\d+)\b", r"10.148.8.\1"),
    (r"http://127\.0\.0\.1:\d+/upload", "https://storage.googleapis.com/upload"),
    (r"http://127\.0\.0\.1:\d+", "https://huggingface.co"),
    (r"\b127\.0\.0\.1\b", "10.148.8.9"),
    (r"/root/\.pyenv/versions/[0-9.]+", "/usr/local"),
    (r"\broot\b(?=[@:])", "user"),
]


class Case(Record):
    """A fault of `worker.py` on one rank at one iteration. `setup`: shell lines on each node before
    torchrun.
    """

    fault: str = "none"
    rank: int = 0
    at: int = 5
    nodes: int = 2
    workers: int = 2
    setup: str = ""
    options: str = "--tee 3"
    per_node: bool = False
    port: str = ""
    started: int = 0
    env: dict[str, str] = field(default_factory=dict)
    command: str = ""
    seconds: int = 240


def tmpfs(folder: str, size: str) -> str:
    return f"mkdir -p $CORPUS_SCRATCH/{folder}; mount -t tmpfs -o size={size} tmpfs $CORPUS_SCRATCH/{folder}"


READ_ONLY = tmpfs("read-only", "1m") + "; mount -o remount,ro $CORPUS_SCRATCH/read-only"
SMALL_SHM = "mount -t tmpfs -o size=24m tmpfs /dev/shm"
SECRET = (
    "install -m 600 /dev/null $CORPUS_SCRATCH/secret_text_document.bin; chmod 755 $CORPUS_SCRATCH"
)
CGROUP = (
    "g=/sys/fs/cgroup/memory/corpus-$(hostname); mkdir -p $g; echo 700M > $g/memory.limit_in_bytes; echo $$ > "
    "$g/cgroup.procs"
)
HUB = f"{sys.executable} {HERE}/hub.py"

CASES = {
    **{
        name: Case(name, rank, at, nodes=1 + (rank > 1))
        for name, rank, at in [
            ("value-error", 3, 5), ("key-error", 1, 6), ("attribute-error", -1, 1), ("type-error", -1, 1),
            ("name-error", 2, 4), ("zero-division", -1, 0), ("assertion", -1, 0), ("recursion", 0, 3),
            ("dtype", -1, 1), ("shape", -1, 1), ("vocabulary", 2, 9), ("backward", -1, 1), ("json", 0, 0),
            ("unicode", 1, 2), ("no-data", -1, 0), ("bad-index", -1, 0), ("denied", -1, 1), ("memory-error", 1, 8),
            ("numpy-memory", 0, 0), ("torch-memory", 1, 6), ("sigkill", 2, 7), ("sigterm", 1, 7), ("sigsegv", 3, 8),
            ("sigabrt", 1, 6), ("sigfpe", 0, 4), ("sigill", 1, 5), ("sigbus", 3, 10), ("silent-exit", 1, 5),
            ("sys-exit", -1, 0), ("nan", 2, 9), ("anomaly", 1, 7), ("import-error", -1, 0),
            ("loader-raises", 1, 5), ("loader-killed", 1, 6), ("loader-segfault", 0, 4), ("loader-hangs", 1, 7),
            ("loader-ragged", 1, 3), ("load-truncated", 0, 1), ("load-empty", -1, 0), ("load-zeros", 1, 0),
            ("load-text", -1, 0), ("load-flipped", 0, 0), ("load-object", -1, 0), ("load-missing", -1, 0),
            ("load-keys", -1, 0), ("load-optimizer", -1, 0),
        ]
    },
    "sigsegv-early": Case("sigsegv", 1, 0, nodes=1, workers=4, options=""),
    "sigkill-plain": Case("sigkill", 0, 9, nodes=1, workers=4, options="--redirects 0"),
    "value-error-files": Case("value-error", 3, 8, per_node=True),
    "sigsegv-traceback": Case("sigsegv", 1, 8, env={"PYTHONFAULTHANDLER": "1"}),
    "sigabrt-traceback": Case("sigabrt", 2, 8, env={"PYTHONFAULTHANDLER": "1"}),
    "sigkill-files": Case("sigkill", 2, 7, per_node=True),
    "key-error-restarts": Case("key-error", 2, 6, options="--tee 3 --max-restarts 2"),
    "sigkill-restarts": Case("sigkill", 1, 6, options="--tee 3 --max-restarts 1"),
    "hang-timeout": Case("hang", 2, 6, env={"CORPUS_TIMEOUT": "10"}),
    "hang-timeout-single": Case("hang", 0, 5, nodes=1, workers=3, env={"CORPUS_TIMEOUT": "8"}, options="--tee 3"),
    "barrier-timeout": Case("unequal", -1, 6),
    "mismatch": Case("mismatch", -1, 4, env={"CORPUS_TIMEOUT": "10", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "disk-full": Case("disk-full", 1, 9, setup=tmpfs("full", "12m")),
    "disk-full-all": Case("disk-full", -1, 8, setup=tmpfs("full", "40m"), per_node=True),
    "read-only": Case("read-only", 0, 8, setup=READ_ONLY),
    "loader-shm": Case("loader-shm", 2, 5, setup=SMALL_SHM),
    "loader-descriptors": Case("loader-descriptors", 1, 5, setup="ulimit -n 60"),
    "address-space": Case("grow", 3, 7, setup="ulimit -v 9000000"),
    "cgroup-oom": Case("grow", 1, 7, nodes=1, workers=2, setup=CGROUP, command="AFTER: dmesg | tail -9"),
    "finished": Case(env={"CORPUS_ITERATIONS": "40"}),
    "kill-switch": Case(env={"CORPUS_STOP": "[Detected kill switch at /scratch/kill-switch-tr11-176B-exp1. Exiting]"
                             " datetime: {now} "}),
    "exit-duration": Case(env={"CORPUS_STOP": "[exiting program after 1190.0312 minutes] datetime: {now} "}),
    "exit-interval": Case(env={"CORPUS_STOP": "[exiting program at iteration 12] datetime: {now} "}, per_node=True),
    "port-in-use": Case(nodes=1, workers=2, port="static", command="BUSY"),
    "port-clash-rdzv": Case(nodes=1, workers=2, options="--tee 3 --master-port $PORT", port="static", command="BUSY"),
    "rendezvous-timeout": Case(started=1, options="--tee 3 --rdzv-conf timeout=12,join_timeout=12,read_timeout=12"),
    "rendezvous-refused": Case(started=2, options="--tee 3 --rdzv-conf timeout=8,join_timeout=8,read_timeout=8"),
    "unknown-master": Case(nodes=1, options="--tee 3", port="unknown-host", seconds=60),
    "worker-count": Case(nodes=1, options="--tee 3", workers=2, fault="hang", at=0, rank=1, command="TERM"),
    "interrupted": Case("hang", 0, 9, nodes=1, command="INT"),
    "no-script": Case(nodes=1, command=f"{BIN}/torchrun --nproc-per-node 2 --tee 3 {HERE}/pretrain_bloom.py"),
    "bad-option": Case(nodes=1, command=f"{BIN}/torchrun --nproc_per_node 2 --tea 3 {HERE}/worker.py"),
    "gpu-wanted": Case(nodes=1, command=f"{BIN}/torchrun --nproc-per-node 2 --tee 3 --no-python {BIN}/python -c "
                       "'import torch; torch.zeros(2).cuda()'"),
    "nccl-missing": Case(nodes=1, command=f"{BIN}/torchrun --nproc-per-node 2 --tee 3 --no-python {BIN}/python -c "
                         "'import torch.distributed as d; d.init_process_group(\"nccl\")'"),
    **{f"hub-{how}": Case(nodes=1, command=f"{HUB} {how}") for how in
       ("401", "403", "404", "429", "500", "refused", "dns", "gcs-401", "gcs-403", "gcs-404", "gcs-503", "gcs-quota")},
}  # fmt: skip


def on_node(case: Case, name: str, node: int, port: int, place: Path) -> str:
    if case.command.startswith("/"):
        run = case.command
    else:
        first = "unreachable-iam01" if case.port == "unknown-host" else "jean-zay-iam01"
        if case.port == "static":
            meet = f"--node-rank {node} --master-addr {first} --master-port {port}"
        else:
            meet = f"--rdzv-id 4711 --rdzv-backend c10d --rdzv-endpoint {first}:{port}"
        options = case.options.replace("$PORT", str(port))
        run = (
            f"{BIN}/torchrun --nnodes {case.nodes} --nproc-per-node {case.workers} {meet} {options} "
            f"{HERE}/worker.py {case.fault} {case.rank} {case.at}"
        )
    if case.command == "BUSY":
        other = f"{BIN}/python -m http.server -b jean-zay-iam01 {port} >/dev/null 2>&1"
        run = f"{other} & busy=$!; sleep 1; {run}; kill $busy"
    elif case.command in {"TERM", "INT"}:
        run = f"{run} & sleep 14; kill -{case.command} $!; wait $!"
    elif case.command.startswith("AFTER: "):
        run = f"{run}; {case.command[7:]}"
    host = f"jean-zay-iam{node + 1:02d}"
    inner = f"hostname {host}; mount --bind {place}/hosts /etc/hosts; {case.setup or ':'}; {run}"
    return f"unshare -m -u bash -c {shlex.quote(inner)}"


def run(name: str, out: Path, port: int) -> None:
    case, place = CASES[name], SCRATCH / f"{port}-{name}"
    place.mkdir(parents=True, exist_ok=True)
    hosts = [f"127.0.1.{n} jean-zay-iam{n:02d}" for n in range(1, 9)] + ["127.0.0.1 localhost"]
    (place / "hosts").write_text("\n".join(hosts) + "\n")
    (place / "secret_text_document.bin").write_bytes(b"")
    place.chmod(0o755)
    (place / "secret_text_document.bin").chmod(0o600)
    env = {
        **os.environ,
        **case.env,
        "CORPUS_SCRATCH": str(place),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    files, running = [], []
    nodes = range(1, 2) if case.started == 2 else range(case.started or case.nodes)
    for node in nodes:
        file = out / (f"{name}-jean-zay-iam{node + 1:02d}.log" if case.per_node else f"{name}.log")
        file.unlink(missing_ok=True) if file not in files else None
        files.append(file)
        with file.open("ab") as sink:
            shell = on_node(case, name, node, port, place)
            running.append(
                subprocess.Popen(
                    ["bash", "-c", shell], stdout=sink, stderr=sink, env=env, cwd=place
                )
            )
    for one in running:
        try:
            one.wait(case.seconds)
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-KILL", "-P", str(one.pid)], check=False)
            one.kill()
    for file in set(files):
        file.write_text(clean(file.read_bytes().decode(errors="replace")))
    print(
        f"{name}: {[one.poll() for one in running]}, {sum(f.read_text().count(chr(10)) for f in set(files))} lines"
    )


def one_rank(rank: int, case: Case) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), CORPUS_SCRATCH=str(Path.cwd()))
    sys.argv = [str(HERE / "worker.py"), case.fault, str(case.rank), str(case.at)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def spawned(name: str, out: Path, port: int) -> None:
    """The same fault under `torch.multiprocessing`, forked from here: one import of torch for all
    cases.
    """
    import torch.multiprocessing as processes

    case, place, file = CASES[name], SCRATCH / f"{port}-{name}", out / f"{name}-spawned.log"
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).unshare(0x04020000)  # mounts and host name
        socket.sethostname("node01")
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.environ.update(
            case.env,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            WORLD_SIZE="3",
            CORPUS_SCRATCH=".",
        )
        setup = f"mount --make-rprivate /; CORPUS_SCRATCH={place}; {case.setup or ':'}"
        subprocess.run(["bash", "-c", setup], check=True)
        try:
            processes.start_processes(one_rank, (case,), nprocs=3, start_method="fork")
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    file.write_text(clean(file.read_bytes().decode(errors="replace")))
    print(f"{name}-spawned: {file.read_text().count(chr(10))} lines", flush=True)


def clean(text: str) -> str:
    """The log without this machine's names, in English as everywhere, each carriage return kept."""
    for pattern, instead in NAMES:
        text = re.sub(pattern, instead, text)
    return text


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2:] or list(CASES)
    if wanted[0] == "--spawned":
        for number, name in enumerate(wanted[1:]):
            spawned(name, out, 29_900 + number)
        return
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: run(pair[1], out, 29_600 + pair[0]), enumerate(wanted)))


if __name__ == "__main__":
    main()
