"""What every health check shares: its result, what the run wants of a node, and what it reads of the
system.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import psutil

from tr11ops.base.processes import LocalCommands
from tr11ops.base.units import counted
from trainer.contract.files import host_name
from trainer.contract.paths import attempt_label
from trainer.contract.record import Record

EXIT_BAD_NODE = 75  # how the node agent ends when its node must not be used; no worker was started


class CheckOutcome(StrEnum):
    """What a check says. UNKNOWN is no verdict on the node: it is used, and the reason is kept."""

    FINE = "fine"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "unknown"


class CheckResult(Record):
    """One check's answer; `why` is one line."""

    name: str
    result: CheckOutcome
    why: str


Answer = tuple[CheckOutcome, str]  # what a check's function returns: the name is the registry's


class NodeRequirements(Record):
    """What a run asks of a node. Counts are per node, times seconds.

    `folder` is a folder of the run directory to write in (None: no such check), `controller_time`
    the moment at which the batch controller asked (seconds since the epoch; None: not told).
    `launch` is the number of the workers' launch. `ends_leftovers` allows to end processes of our
    own that an earlier job or launch left on this node, where a node belongs to one job at a time.
    `sweeps` allows to remove files that killed workers of ours left in /dev/shm.
    `interfaces`: of the network, over which the ranks shall talk.
    """

    node: str
    job_id: str = ""
    launch: int = 0
    gpus: int = 0
    workers: int = 1
    folder: Path | None = None
    temporary: Path = Path("/tmp")
    controller_time: float | None = None
    ends_leftovers: bool = False
    sweeps: bool = True
    seconds: float = 30.0
    interfaces: tuple[str, ...] = ()


class Space(Record):
    """Bytes of a file system; `free` is what this user may still write."""

    total: int
    free: int


class TrainerProcess(Record):
    """A process of this user that belongs to a training: of which job, launch and node, and whether
    anyone keeps it.

    `is_kept` is False when no step daemon or batch controller is among its ancestors. `state` is
    the kernel's letter (D: it waits in the kernel and cannot be ended). `label` is what people call
    its attempt.
    """

    pid: int
    name: str
    job_id: str
    launch: str
    node: str
    state: str
    is_kept: bool
    label: str = ""


class SharedMemoryFile(Record):
    """A file in /dev/shm that belongs to this user. `age` in seconds since its last change."""

    name: str
    bytes: int
    age: float


def worst(results: Iterable[CheckResult]) -> CheckOutcome:
    """One word for a node: bad or warning when a check says so; unknown only when no check could
    tell anything.
    """
    found = {entry.result for entry in results}
    for outcome in (CheckOutcome.BAD, CheckOutcome.WARNING, CheckOutcome.FINE):
        if outcome in found:
            return outcome
    return CheckOutcome.UNKNOWN


def summary(results: Sequence[CheckResult]) -> str:
    """One line: what made the node bad or doubtful; else how many checks were fine."""
    outcome = worst(results)
    if outcome in {CheckOutcome.BAD, CheckOutcome.WARNING}:
        return "; ".join(
            f"{entry.name}: {entry.why}" for entry in results if entry.result is outcome
        )
    unknown = [entry for entry in results if entry.result is CheckOutcome.UNKNOWN]
    if outcome is CheckOutcome.UNKNOWN:
        return "; ".join(f"{entry.name}: {entry.why}" for entry in unknown) or "no check was run"
    told = f"{counted(len(results) - len(unknown), 'check')} fine"
    if unknown:
        return f"{told}, {len(unknown)} unknown ({', '.join(entry.name for entry in unknown)})"
    return told


# Does a check fail for the nodes' sake, or does it fail everywhere? One that one node fails and the
# others pass tells something of that node. One that fails on node after node, and that hardly any
# node passes, tells something of itself (a script that is broken, a service that it asks) or of
# what all nodes share.

ENOUGH_NODES = 2  # nodes that fail a check, where none passes it
ENOUGH_BESIDE_OTHERS = 3  # nodes that fail it, where fewer pass it


def fails_everywhere(failed: Collection[str], passed: Collection[str]) -> bool:
    """Whether a check that these nodes failed and those passed tells nothing of the nodes that
    failed it.
    """
    needed = ENOUGH_BESIDE_OTHERS if passed else ENOUGH_NODES
    return len(failed) >= needed and len(failed) > len(passed)


# ---------------------------------------------------------------------------
# This node, as the health checks see it: commands, small files, processes, shared memory.

SHARED_MEMORY = Path("/dev/shm")
_PROBE = b"tr11 health probe\n" * 256
_MAKER = re.compile(r"(?:torch_|__KMP_REGISTERED_LIB_|pymp-)(\d+)(?!\d)")
_MAPPED = re.compile(r" /dev/shm/(.+?)(?: \(deleted\))?$", re.MULTILINE)
_KEEPERS = ("slurmstepd", "tr11ops.agent.node", "tr11ops.agent.batch", "tr11ops.cluster.local_")


class System(LocalCommands):
    """The node as the checks see it, by Linux' own files and commands. File system calls raise
    OSError, as the file system does.
    """

    def read(self, path: str) -> str:
        """The text of a small file."""
        return Path(path).read_text(encoding="utf-8", errors="replace")

    def names(self, folder: str) -> tuple[str, ...]:
        """Names in a folder, sorted; none when there is no such folder."""
        try:
            return tuple(sorted(entry.name for entry in os.scandir(folder)))
        except FileNotFoundError:
            return ()

    def space(self, folder: str) -> Space:
        """The space of the file system that holds a folder."""
        usage = shutil.disk_usage(folder)
        return Space(usage.total, usage.free)

    def write_probe(self, folder: str) -> float:
        """Write, flush to disk, read and remove a small file; the seconds that took."""
        began = time.monotonic()
        descriptor, name = tempfile.mkstemp(prefix=".tr11-probe-", dir=folder)
        try:
            with os.fdopen(descriptor, "w+b") as stream:
                stream.write(_PROBE)
                stream.flush()
                os.fsync(stream.fileno())
                stream.seek(0)
                if stream.read() != _PROBE:
                    raise OSError(5, "what was read is not what was written", name)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()
        return time.monotonic() - began

    def now(self) -> float:
        """Seconds since the epoch, by this node's clock."""
        return time.time()

    def trainer_processes(self) -> tuple[TrainerProcess, ...]:
        """This user's processes that belong to trainings, this agent's own left out."""
        return tuple(_trainer_processes())

    def end(self, pids: Iterable[int]) -> tuple[int, ...]:
        """End processes by their ids; returns those that are still there.

        TERM, then KILL after two seconds; three more to go.
        """
        processes = []
        for pid in pids:
            with suppress(psutil.Error):
                processes.append(psutil.Process(pid))
        for ask, patience in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 3.0)):
            for process in processes:
                with suppress(psutil.Error):
                    ask(process)
            _, processes = psutil.wait_procs(processes, timeout=patience)
        return tuple(process.pid for process in processes)

    def segments(self, names: re.Pattern[str]) -> tuple[SharedMemoryFile, ...]:
        """This user's files in /dev/shm of such names that no living process uses."""
        now = time.time()
        own = os.geteuid()
        found = []
        for entry in os.scandir(SHARED_MEMORY):
            if not names.fullmatch(entry.name) or _maker_lives(entry.name):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == own and entry.is_file(follow_symlinks=False):
                    found.append(
                        SharedMemoryFile(entry.name, status.st_size, now - status.st_mtime)
                    )
        if found:
            used = mapped(own_pids())
        else:
            used = frozenset()
        return tuple(segment for segment in found if segment.name not in used)

    def remove_segment(self, name: str) -> None:
        """Remove one file of /dev/shm."""
        (SHARED_MEMORY / name).unlink()


def mapped(pids: Iterable[int]) -> frozenset[str]:
    """Names of the files in /dev/shm that these processes have mapped or open."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            names.update(
                _MAPPED.findall(
                    Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                )
            )
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = str(Path(entry.path).readlink())
                    if target.startswith("/dev/shm/"):
                        names.add(target.removeprefix("/dev/shm/"))
    return frozenset(names)


def _maker_lives(name: str) -> bool:
    match = _MAKER.match(name)
    return match is not None and psutil.pid_exists(int(match[1]))


def own_pids() -> Iterator[int]:
    """Process ids of this user."""
    own = os.geteuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == own:
                    yield int(entry.name)


def _trainer_processes() -> Iterator[TrainerProcess]:
    me = os.getpid()
    for pid in own_pids():
        with suppress(OSError, psutil.Error, IndexError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-m" not in words or pid == me:
                continue
            environment = _environment(pid)
            if "TR11_LAUNCH" not in environment or not _is_same_cluster(environment):
                continue
            ancestors = psutil.Process(pid).parents()
            if any(process.pid == me for process in ancestors):
                continue
            yield TrainerProcess(
                pid=pid,
                name=words[words.index(b"-m") + 1].decode("utf-8", "replace"),
                job_id=environment.get("TR11_JOB_ID", ""),
                launch=environment["TR11_LAUNCH"],
                node=environment.get("TR11_NODE_NAME")
                or environment.get("SLURMD_NODENAME")
                or host_name(),
                state=Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8")
                .rpartition(")")[2]
                .split()[0],
                is_kept=any(_keeps(process) for process in ancestors),
                label=_label(environment),
            )


def _label(environment: Mapping[str, str]) -> str:
    """What people call the attempt of the process that has this environment."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return attempt_label({"array_id": array, "task_id": task}, environment.get("TR11_JOB_ID", ""))


def _environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)


def _is_same_cluster(environment: Mapping[str, str]) -> bool:
    """Two clusters that play their nodes on one machine may use the same names."""
    return all(
        environment.get(name) == os.environ.get(name)
        for name in ("SLURM_CLUSTER_NAME", "SLURM_CONF")
    )


def _keeps(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.name().startswith(_KEEPERS[0]) or any(word in command for word in _KEEPERS)
    except psutil.Error:
        return False
