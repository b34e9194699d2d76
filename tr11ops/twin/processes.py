"""The processes of a twin and of each of its nodes: each is known by pid and start time, so that no
other process is ever touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tr11ops.base.job_environment import step_of
from tr11ops.cluster.local_records import boot_mark, start_mark
from tr11ops.twin.plan import TwinFolders
from trainer.contract.documents import document, record_of_text
from trainer.contract.record import Record

MARK = "TR11_TWIN_MARK"  # in the environment of every daemon; its value is unique for each twin
DEFAULT_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
)


class ProcessRecord(Record):
    """One process: what it is, and the two numbers which identify it until the machine restarts."""

    role: str  # "munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "hub", "store", "job"
    name: str  # the node of a slurmd, otherwise the role
    pid: int
    start_ticks: int  # clock ticks since boot, as the kernel counts them
    boot_id: str

    @property
    def is_alive(self) -> bool:
        """True while exactly this process runs; a zombie or another process with the same pid is
        not it.
        """
        return self.boot_id == boot_mark() and start_ticks(self.pid) == self.start_ticks


def record_of_process(role: str, name: str, pid: int) -> ProcessRecord | None:
    """A process that runs now; None where there is none, or a zombie."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    return ProcessRecord(role, name, pid=pid, start_ticks=ticks, boot_id=boot_mark())


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if there is none or it is a
    zombie.
    """
    mark = start_mark(pid)
    if mark is None:
        return None
    return int(mark)


def spawn(
    folders: TwinFolders,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    role: str = "",
    ledger: Path | None = None,
) -> ProcessRecord:
    """Start a daemon in its own session, output appended to its log, and note it in the ledger at
    once.

    `role`: the name where it is not given; `ledger`: the twin's own.
    """
    log = folders.logs / f"{name}.out"
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(
        arguments[0],
        list(arguments),
        dict(environment),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=DEFAULT_SIGNALS,  # Python ignores SIGPIPE, and jobs would inherit that
    )
    record = ProcessRecord(
        role or name, name, pid=pid, start_ticks=start_ticks(pid) or 0, boot_id=boot_mark()
    )
    with (ledger or folders.processes).open("a") as stream:
        stream.write(json.dumps(document(record)) + "\n")
    return record


def read_ledger(ledger: Path) -> tuple[ProcessRecord, ...]:
    """All records of a twin; a last line cut short by a crash is left out, since the mark finds its
    process.
    """
    records = []
    try:
        lines = ledger.read_text().splitlines()
    except FileNotFoundError:
        return ()
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(record_of_text(ProcessRecord, line))
    return tuple(records)


def marked(mark: str, folders: TwinFolders) -> tuple[ProcessRecord, ...]:
    """Running processes that belong to a twin: daemons by `mark`, step daemons by their sockets, jobs
    by their environment.

    A job's process has the twin's slurm.conf and the name of a node there, which a person's shell
    inside the twin has not; what a job started is found through its parents too.
    """
    mark_entry = f"{MARK}={mark}".encode()
    conf_entry = f"SLURM_CONF={folders.slurm_conf}".encode()
    sockets = _step_sockets(folders)
    found: dict[int, ProcessRecord] = {}
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process.pid)
        entries = environment_of(process.pid)
        is_task = conf_entry in entries and value_of(entries, b"SLURMD_NODENAME") is not None
        if mark_entry in entries:
            role = "daemon"
        elif is_task or _step_daemon_of(process.pid, sockets) is not None:
            role = "job"
        else:
            continue
        record = record_of_process(role, role, process.pid)
        if record is not None:
            found[process.pid] = record
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), []):
            record = record_of_process("job", "job", child)
            if child not in found and record is not None:
                found[child] = record
                waiting.append(child)
    found.pop(os.getpid(), None)
    return tuple(found.values())


def environment_of(pid: int) -> list[bytes]:
    """The entries of a process's first environment; empty when it is gone or another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def command_name(pid: int) -> str:
    """The kernel's short name of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def end(records: Iterable[ProcessRecord], grace_seconds: float) -> tuple[ProcessRecord, ...]:
    """End exactly these processes: SIGTERM, then SIGKILL after `grace_seconds` (0: at once).
    Returns what survived.
    """
    alive = [record for record in records if record.is_alive]
    if grace_seconds > 0:
        send(alive, signal.SIGTERM)
        send(alive, signal.SIGCONT)  # a stopped daemon must wake to see it
        alive = _wait(alive, grace_seconds)
    send(alive, signal.SIGKILL)
    return tuple(_wait(alive, 10.0))


def send(records: Iterable[ProcessRecord], number: signal.Signals) -> int:
    """Send a signal to exactly these processes; returns how many were there to get it."""
    reached = 0
    for record in records:
        with contextlib.suppress(ProcessLookupError):
            if record.is_alive:
                os.kill(record.pid, number)
                reached += 1
    return reached


def _wait(records: Sequence[ProcessRecord], seconds: float) -> list[ProcessRecord]:
    deadline = time.monotonic() + seconds
    while True:
        alive = [record for record in records if record.is_alive]
        for record in records:
            if record not in alive and record.boot_id == boot_mark():
                with contextlib.suppress(ChildProcessError):
                    # ours, when this process started it: leave no zombie
                    os.waitpid(record.pid, os.WNOHANG)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)


# Which processes belong to which node of a twin. All nodes share one machine, so the kernel's word
# is not enough.
#
# A step daemon (slurmstepd) is known by the socket that it listens on, SPOOL/NODE/NODE_JOB.STEP; a
# task by the node's name in its environment, and what a task started through its parents.

YOUNG_SECONDS = 2.0  # how long a new process may take until it has become what it was started for
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_TITLE = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")
_RANK_NAME = re.compile(r"rank-(\d+)")
_STEP_DAEMON = "slurmstepd"


class NodeProcess(Record):
    """One process of a node. `step` is None for one of a batch script, `rank` None for all but
    workers.

    `parent` is the parent's process id; `title` of a step daemon is such as ("12", "batch") or
    ("12", "0").
    """

    record: ProcessRecord
    parent: int
    step: str | None
    rank: int | None
    title: tuple[str, str] | None = None


class NodeContents(Record):
    """What runs on one node, without its slurmd."""

    daemons: tuple[NodeProcess, ...] = ()
    tasks: tuple[NodeProcess, ...] = ()

    @property
    def all(self) -> tuple[NodeProcess, ...]:
        return self.daemons + self.tasks

    @property
    def is_batch_host(self) -> bool:
        """True when a job's batch script runs here."""
        return any(
            daemon.title is not None and daemon.title[1] == "batch" for daemon in self.daemons
        )

    @property
    def workers(self) -> tuple[NodeProcess, ...]:
        """The training's workers, by rank. A helper that a worker started has its environment, and
        is none.
        """
        ranked = {task.record.pid: task for task in self.tasks if task.rank is not None}
        found = [task for task in ranked.values() if _is_first(task, ranked)]
        return tuple(sorted(found, key=lambda task: (task.rank or 0, task.record.pid)))


def _is_first(task: NodeProcess, ranked: Mapping[int, NodeProcess]) -> bool:
    parent = ranked.get(task.parent)
    return parent is None or parent.rank != task.rank


def scan(folders: TwinFolders, nodes: Iterable[str]) -> dict[str, NodeContents]:
    """What runs on each of `nodes` at this moment. A process that comes or goes meanwhile may be
    missed.
    """
    wanted = set(nodes)
    sockets = _step_sockets(folders)
    conf = f"SLURM_CONF={folders.slurm_conf}".encode()
    daemons: dict[str, list[NodeProcess]] = {name: [] for name in wanted}
    tasks: dict[str, list[NodeProcess]] = {name: [] for name in wanted}
    children: dict[int, list[int]] = {}
    owner: dict[int, str] = {}
    me = os.getpid()
    for pid in process_ids():
        children.setdefault(parent_of(pid), []).append(pid)
        if pid == me:
            continue
        if command_name(pid) == _STEP_DAEMON:
            node = _step_daemon_of(pid, sockets)
            record = record_of_process(_STEP_DAEMON, node or "", pid)
            if node in wanted and record is not None:
                daemons[node].append(
                    NodeProcess(record, parent_of(pid), step=None, rank=None, title=_title(pid))
                )
            continue
        entries = environment_of(pid)
        name = value_of(entries, b"SLURMD_NODENAME")
        if conf in entries and name in wanted:
            owner[pid] = name
    waiting = list(owner)
    while waiting:
        pid = waiting.pop()
        for child in children.get(pid, []):
            if child not in owner and child != me:
                owner[child] = owner[pid]
                waiting.append(child)
    for pid, node in owner.items():
        record = record_of_process("job", node, pid)
        if record is not None:
            entries = environment_of(pid)
            tasks[node].append(
                NodeProcess(record, parent_of(pid), _step(entries), _rank(pid, entries))
            )
    return {name: NodeContents(tuple(daemons[name]), tuple(tasks[name])) for name in wanted}


class StepWatch:
    """Finds a node's step tasks while they come and go; a look costs little, since only new
    processes are read.

    Batch scripts are none of them. For a loop that looks many times a second.
    """

    def __init__(self, folders: TwinFolders, node: str) -> None:
        self._conf = f"SLURM_CONF={folders.slurm_conf}".encode()
        self._node = node
        self._settled: set[int] = set()
        self._young: dict[int, float] = {}
        self._found: dict[int, ProcessRecord] = {}

    def look(self) -> tuple[ProcessRecord, ...]:
        """All tasks of the node's steps that live now."""
        living = set(process_ids())
        now = time.monotonic()
        self._settled &= living
        for pid in living - self._settled - self._young.keys() - self._found.keys():
            self._young[pid] = now
        for pid, since in list(self._young.items()):
            if self._is_task(pid):
                record = record_of_process("job", self._node, pid)
                if record is not None:
                    self._found[pid] = record
                del self._young[pid]
            elif pid not in living:
                del self._young[pid]
            elif now - since > YOUNG_SECONDS and command_name(pid) != _STEP_DAEMON:
                del self._young[pid]
                self._settled.add(pid)
        self._found = {pid: record for pid, record in self._found.items() if record.is_alive}
        return tuple(self._found.values())

    def _is_task(self, pid: int) -> bool:
        entries = environment_of(pid)
        return (
            self._conf in entries
            and value_of(entries, b"SLURMD_NODENAME") == self._node
            and _step(entries) is not None
            and command_name(pid) != _STEP_DAEMON
        )


# ----------------------------------------------------------------------------- reading /proc
def process_ids() -> list[int]:
    """All processes of this machine."""
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal()]


def value_of(entries: Iterable[bytes], name: bytes) -> str | None:
    """The value of one variable among `entries`."""
    head = name + b"="
    for entry in entries:
        if entry.startswith(head):
            return entry[len(head) :].decode(errors="replace")
    return None


def parent_of(pid: int) -> int:
    """The parent's process id; 0 when the process is gone."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rindex(")") + 2 :].split()[1])
    return 0


def _rank(pid: int, entries: Iterable[bytes]) -> int | None:
    """A worker's global rank: a launcher gives it as RANK, a forked stand-in has it as its name."""
    named = _RANK_NAME.fullmatch(command_name(pid))
    if named:
        return int(named.group(1))
    value = value_of(entries, b"RANK")
    if value is not None and value.isdecimal():
        return int(value)
    return None


def _step(entries: Iterable[bytes]) -> str | None:
    """The step of srun that a process belongs to; None of a batch script's."""
    return step_of({"SLURM_STEP_ID": value_of(entries, b"SLURM_STEP_ID") or ""})


def _step_sockets(folders: TwinFolders) -> dict[str, str]:
    """Inode of every step daemon's socket, and its node."""
    head = f"{folders.spool}/"
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines():
        words = line.split(maxsplit=7)
        if len(words) == 8 and words[7].startswith(head):
            found[words[6]] = words[7].removeprefix(head).split("/", 1)[0]
    return found


def _step_daemon_of(pid: int, sockets: Mapping[str, str]) -> str | None:
    """The node whose step daemon a process is; None where it is none. Its environment says nothing:
    Slurm clears it, since 24.11 of SLURM_CONF too.
    """
    if command_name(pid) != _STEP_DAEMON:
        return None
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                match = _SOCKET.fullmatch(str(Path(entry.path).readlink()))
                if match and match.group(1) in sockets:
                    return sockets[match.group(1)]
    return None


def _title(pid: int) -> tuple[str, str] | None:
    with suppress(OSError):
        text = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
        match = _TITLE.search(text)
        if match:
            return (match.group(1), match.group(2))
        return None
    return None
