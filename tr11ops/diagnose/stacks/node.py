"""On the node: finds the workers of a job here and reads the stack of each, with py-spy and the
kernel's files.

Nothing is written, signalled or stopped: py-spy reads the memory of a process that goes on.

    python -m tr11ops.diagnose.stacks.node HEARTBEATS JOB SECONDS      prints this node's answer (see `worker`)
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec.structs import replace

from tr11ops.base.observed import observed
from tr11ops.diagnose.stacks.worker import GONE, NodeStacks, WorkerStack, main_thread
from trainer.contract.attempt import Heartbeat
from trainer.contract.files import host_name
from trainer.contract.record import Record

JOB_VARIABLE = "TR11_JOB_ID"  # what the node agent gives to all that it starts
ATTEMPT_VARIABLE = (
    "TR11_ATTEMPT"  # and the attempt's folder: jobs of two schedulers may have one number
)
WORKER_VARIABLE = "RANK"  # what torchrun gives to each worker, and its children inherit
ENDED = "ended"  # the last phase of a rank that has left by itself
SPY_SECONDS = 10.0  # for one worker
SPY_TRIES = 4  # a stack that changes while it is read is read again
NO_RIGHT = (
    "no right to read process {pid} of {user}: ask {user} or root to type it, or allow it"
    " (CAP_SYS_PTRACE, kernel.yama.ptrace_scope)"
)
# The system calls that are told apart, by processor (Linux: asm/unistd.h).
_CALLS = {
    "x86_64": {
        0: "read",
        1: "write",
        2: "open",
        3: "close",
        5: "fstat",
        7: "poll",
        17: "pread64",
        18: "pwrite64",
        19: "readv",
        20: "writev",
        23: "select",
        45: "recvfrom",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        77: "ftruncate",
        82: "rename",
        83: "mkdir",
        87: "unlink",
        202: "futex",
        217: "getdents64",
        230: "clock_nanosleep",
        232: "epoll_wait",
        257: "openat",
        262: "newfstatat",
        263: "unlinkat",
        285: "fallocate",
        306: "syncfs",
        332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait",
        32: "flock",
        35: "unlinkat",
        38: "renameat",
        46: "ftruncate",
        47: "fallocate",
        56: "openat",
        57: "close",
        61: "getdents64",
        63: "read",
        64: "write",
        65: "readv",
        66: "writev",
        67: "pread64",
        68: "pwrite64",
        79: "newfstatat",
        82: "fsync",
        83: "fdatasync",
        98: "futex",
        115: "clock_nanosleep",
        207: "recvfrom",
        267: "syncfs",
        291: "statx",
    },
}
_WITH_DESCRIPTOR = frozenset(
    {
        "read",
        "write",
        "close",
        "pread64",
        "pwrite64",
        "readv",
        "writev",
        "flock",
        "fsync",
        "fdatasync",
        "ftruncate",
        "fallocate",
        "getdents64",
        "syncfs",
    }
)


class FoundWorker(Record):
    """A rank's process on a node; `has_ended`: its heartbeat names a process that is not there any
    more.
    """

    rank: int
    node: str
    pid: int
    has_ended: bool = False


def workers_here(heartbeats: Path, job_id: str, node: str | None) -> list[FoundWorker]:
    """The job's workers on this node, by rank; `node` None: on every node that this machine plays.

    A worker is the process that its heartbeat names, else the outermost Python that its launcher
    gave the rank to: a data loader's processes inherit the rank, and a wrapper (numactl, a shell)
    passes it on.
    """
    beats = {
        beat.rank: beat
        for beat in _beats(heartbeats)
        if beat.is_own and beat.job_id == job_id and node in (None, beat.host)
    }
    ranks = {beat.pid: beat.rank for beat in beats.values()}
    candidates: dict[int, dict[int, tuple[int, str]]] = {}  # rank -> process -> (parent, node)
    for process in psutil.process_iter():
        try:
            own, parent = process.environ(), process.ppid()
        except (psutil.Error, OSError):
            continue
        if own.get(JOB_VARIABLE) != job_id or not _is_of_run(own, heartbeats):
            continue
        named = own.get("TR11_NODE_NAME") or own.get("SLURMD_NODENAME") or node or host_name()
        told = str(ranks.get(process.pid, own.get(WORKER_VARIABLE, "")))
        if node in (None, named) and told.isdecimal():
            candidates.setdefault(int(told), {})[process.pid] = (parent, named)
    found = []
    for rank, processes in candidates.items():
        beat = beats.get(rank)
        if beat is not None and beat.pid in processes:
            pid = beat.pid
        else:
            pid = _outermost(processes)
        found.append(FoundWorker(rank, processes[pid][1], pid))
    found += [
        _by_heartbeat(beat)
        for rank, beat in beats.items()
        if rank not in candidates and beat.phase != ENDED
    ]
    return sorted(found, key=lambda one: one.rank)


def _is_of_run(environment: Mapping[str, str], heartbeats: Path) -> bool:
    """Whether a process is of the run whose heartbeats these are; one that does not tell may be."""
    attempt = environment.get(ATTEMPT_VARIABLE)
    if not attempt:
        return True
    return Path(attempt).parent.parent.resolve() == heartbeats.parent.resolve()


def _outermost(processes: Mapping[int, tuple[int, str]]) -> int:
    """Of a rank's processes, with their parents, the one that is the worker."""
    pythons = {pid: parent for pid, (parent, _) in processes.items() if _is_python(pid)}
    chosen = pythons or {pid: parent for pid, (parent, _) in processes.items()}
    return min([pid for pid, parent in chosen.items() if parent not in chosen] or chosen)


def _is_python(pid: int) -> bool:
    try:
        return "python" in Path(psutil.Process(pid).exe()).name
    except (psutil.Error, OSError):
        return False


def _beats(folder: Path) -> Iterator[Heartbeat]:
    for path in folder.glob("*.json"):
        beat = observed(Heartbeat.read, path)
        if isinstance(beat, Heartbeat):
            yield beat


def _by_heartbeat(beat: Heartbeat) -> FoundWorker:
    """A worker whose environment cannot be read: another user's, one that is dead, or none at all
    any more.
    """
    gone = True
    with suppress(psutil.Error, OSError):  # another process may have got the number since
        gone = psutil.Process(beat.pid).create_time() > beat.time + 1.0
    return FoundWorker(beat.rank, beat.host, beat.pid, gone)


# ----------------------------------------------------------------------------- one worker
def read_worker(worker: FoundWorker) -> WorkerStack:
    """What a worker does now. Never raises: what could not be read is said in it."""
    blank = WorkerStack(worker.rank, worker.node, worker.pid, GONE)
    if worker.has_ended:
        return blank
    state = _state(worker.pid)
    blank = replace(blank, state=state)
    if blank.is_dead:
        return blank
    call, path = _call(worker.pid)
    try:
        frames = main_thread(_spy(worker.pid), worker.pid)
    except ValueError as error:
        if _state(worker.pid) == GONE:  # it ended meanwhile
            return replace(blank, state=GONE)
        threads = tuple(_threads(worker.pid))
        return replace(
            blank, call=call, path=path, trouble=" ".join(str(error).split()), threads=threads
        )
    return replace(blank, call=call, path=path, frames=frames)


def _spy(pid: int) -> str:
    """What py-spy says of a process. Raises ValueError with the reason when it says nothing."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which(
        "py-spy"
    )
    if program is None:
        raise ValueError(f"py-spy is not installed beside {sys.executable}")
    until = time.monotonic() + SPY_SECONDS
    why = ""
    for _ in range(SPY_TRIES):
        process = subprocess.Popen(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            output, said = process.communicate(timeout=max(0.5, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            # one that reads a process the kernel holds is held as well
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1.0)
            raise ValueError(f"py-spy did not end within {SPY_SECONDS:g} s") from None
        if process.returncode == 0:
            return output
        why = " ".join(said.split())
        if "ermission" in why or "EPERM" in why:
            raise ValueError(NO_RIGHT.format(pid=pid, user=_owner(pid)))
    reason = why.partition("Stack backtrace")[0][-200:]
    raise ValueError(f"py-spy: {reason or 'it failed'}")


def _owner(pid: int) -> str:
    try:
        return psutil.Process(pid).username()
    except (psutil.Error, OSError, KeyError):
        return "its owner"


def _state(pid: int) -> str:
    """The kernel's letter for the process's main thread; "gone" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return GONE
    return (text.rpartition(")")[2].split() or [""])[0]


def _call(pid: int) -> tuple[str, str]:
    """The system call that the main thread is in, and the file of its descriptor; "" for what is
    not told.
    """
    try:
        words = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii", errors="replace").split()
        number, first = int(words[0]), int(words[1], 16)
    except (OSError, ValueError, IndexError):
        return "", ""
    call = _CALLS.get(platform.machine(), {}).get(number, "")
    if call not in _WITH_DESCRIPTOR:
        return call, ""
    try:
        path = str(Path(f"/proc/{pid}/fd/{first}").readlink())
    except OSError:
        return call, ""
    return call, path if path.startswith("/") and not path.startswith(("/dev/", "/proc/")) else ""


def _threads(pid: int) -> Iterator[str]:
    """Each thread in the kernel's words: all there is where the stack cannot be read."""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return
    for task in tasks:
        facts = []
        for name in ("comm", "wchan", "syscall", "stack"):
            try:
                text = " ".join((task / name).read_text(encoding="utf-8", errors="replace").split())
            except OSError:
                continue  # the kernel does not tell this user
            if text and text != "0":
                facts.append(f"{name} {text}")
        try:
            state = (
                (task / "stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()[0]
            )
        except (OSError, IndexError):
            continue  # it has just ended
        yield f"thread {task.name}: state {state}, {', '.join(facts)}"


# ----------------------------------------------------------------------------- all of a node
def answers_here(
    heartbeats: Path, job_id: str, node: str | None, seconds: float
) -> tuple[NodeStacks, ...]:
    """The answers of this node, or with None of every node that this machine plays, after `seconds`
    at most.

    A worker that was not read by then says so. Raises OSError where not even the list of processes
    can be read.
    """
    until = time.monotonic() + seconds
    found = workers_here(heartbeats, job_id, node)
    stacks = {
        one.rank: WorkerStack(
            one.rank, one.node, one.pid, trouble=f"was not read within {seconds:g} s"
        )
        for one in found
    }

    def read(worker: FoundWorker) -> None:
        stacks[worker.rank] = read_worker(worker)

    threads = [threading.Thread(target=read, args=(worker,), daemon=True) for worker in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    done = dict(stacks)  # a thread that is late changes the original
    nodes = sorted({one.node for one in found}) or ([node] if node is not None else [])
    return tuple(NodeStacks(name, _of(name, done.values())) for name in nodes)


def _of(node: str, stacks: Iterable[WorkerStack]) -> tuple[WorkerStack, ...]:
    return tuple(sorted((one for one in stacks if one.node == node), key=lambda one: one.rank))


def main(arguments: list[str]) -> None:
    """Print this node's answer, and leave without waiting for a thread that is stuck."""
    heartbeats, job_id, seconds = arguments
    here = os.environ.get("SLURMD_NODENAME") or host_name()
    for answer in answers_here(Path(heartbeats), job_id, here, float(seconds)):
        sys.stdout.write("".join(f"{line}\n" for line in answer.lines()))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
