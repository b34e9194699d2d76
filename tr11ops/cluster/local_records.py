"""The embedded scheduler's frozen records: settings, and one submission with its tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from tr11ops.cluster.base import BatchRequest, JobState
from trainer.contract.documents import document, record_of
from trainer.contract.record import Amount, Count, JsonObject, Record

PARTITION = "local"
SUPERVISOR_MODULE = "tr11ops.cluster.local_supervisor"
NODE_PREFIX = "local-node"


def simulated_nodes(count: int) -> tuple[str, ...]:
    """The names of `count` simulated nodes: local-node1, local-node2, ..."""
    return tuple(f"{NODE_PREFIX}{number}" for number in range(1, count + 1))


class LocalSettings(Record):
    """What the embedded scheduler pretends to be. Times in seconds; None means: no limit.

    `nodes`: the simulated ones; None: the one node is this machine. `gpus_per_node`: of each node;
    None: those that there are.
    """

    nodes: tuple[str, ...] | None = None
    kill_wait_seconds: Amount = 30.0  # between TERM and KILL, as Slurm's KillWait
    keep_seconds: Amount = 7 * 86400.0  # how long ended jobs stay visible
    max_time_seconds: Count | None = None
    gpus_per_node: Count | None = None

    @staticmethod
    def from_json(value: JsonObject) -> LocalSettings:
        """Read settings that people may have written; `nodes` may be a number, or null for the
        machine itself.

        Raises ValueError with the fault.
        """
        unknown = set(value) - set(LocalSettings.__struct_fields__)
        if unknown:
            known = ", ".join(sorted(LocalSettings.__struct_fields__))
            raise ValueError(f"unknown key {min(unknown)!r}: the keys are {known}")
        nodes = value.get("nodes")
        names = simulated_nodes(nodes) if isinstance(nodes, int) else nodes
        settings = record_of(LocalSettings, {**value, "nodes": names})
        if settings.nodes is None:
            return settings
        if not settings.nodes:
            raise ValueError(
                f"nodes is {nodes!r}: it must be a number, 1 or more, a list of names, or null"
            )
        return replace(settings, nodes=tuple(dict.fromkeys(settings.nodes)))


class ProcessMark(Record):
    """One process for ever: the id alone may be reused, so the boot and the start time go with it."""

    pid: int
    start: str  # clock ticks since boot on Linux, seconds since the epoch elsewhere
    boot: str


class TaskRecord(Record):
    """One started task: its allocation, its processes and how it ended."""

    raw_id: int
    task_id: int | None
    nodes: tuple[str, ...]
    start_time: float
    state: JobState = JobState.RUNNING
    reason: str = ""
    end_time: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    cancel: bool = False
    gpus: tuple[str, ...] = ()  # by UUID, equally many of each node, in the nodes' order
    step: ProcessMark | None = None  # the keeper of the task's processes
    batch: ProcessMark | None = None  # the batch script


class WaitingTask(Record):
    """One task that has not started. `task_id` is None for a job without an array."""

    task_id: int | None
    held: bool = False
    excluded: tuple[str, ...] = ()


class Dropped(Record):
    """Tasks that were cancelled before they started, in one record."""

    task_ids: tuple[int | None, ...]
    time: float


class LocalSubmission(Record):
    """One submission: a job, or an array of them."""

    job_id: int
    request: BatchRequest
    user: str
    submit_time: float
    is_array: bool
    throttle: int | None
    waiting: tuple[WaitingTask, ...]
    tasks: tuple[TaskRecord, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    reason: str = ""
    array_bounds: tuple[int, int, int, int] = (0, 0, 0, 0)  # smallest index, largest, step, count

    @property
    def running(self) -> tuple[TaskRecord, ...]:
        return tuple(task for task in self.tasks if not task.state.is_final)

    @property
    def is_over(self) -> bool:
        return not self.waiting and not self.running

    @property
    def end_time(self) -> float:
        """When the last task ended or was dropped; the submit time if nothing has ended."""
        ends = [task.end_time for task in self.tasks if task.end_time is not None]
        return max([self.submit_time, *ends, *(dropped.time for dropped in self.dropped)])

    def with_task(self, task: TaskRecord) -> LocalSubmission:
        """The same submission with this task's record replaced (found by its raw id), or added."""
        others = tuple(task if known.raw_id == task.raw_id else known for known in self.tasks)
        return replace(self, tasks=others if task in others else (*others, task))

    def to_json(self) -> JsonObject:
        """As JSON. The script and the environment are not in it: they lie in files of their own."""
        bare = replace(self, request=replace(self.request, script="", environment={}), waiting=())
        value = document(bare)
        for task in value["tasks"]:
            if not task["gpus"]:
                del task["gpus"]  # an older tr11 reads it
        value["waiting"] = [
            {"task_ids": [task.task_id for task in group], "held": held, "excluded": excluded}
            for (held, excluded), group in waiting_groups(self.waiting).items()
        ]
        return value

    @staticmethod
    def from_json(value: JsonObject) -> LocalSubmission:
        waiting = [
            {"task_id": task_id, "held": group["held"], "excluded": group["excluded"]}
            for group in value["waiting"]
            for task_id in group["task_ids"]
        ]
        waiting.sort(key=lambda task: -1 if task["task_id"] is None else task["task_id"])
        return record_of(LocalSubmission, {**value, "waiting": waiting})


def waiting_groups(
    waiting: Iterable[WaitingTask],
) -> dict[tuple[bool, tuple[str, ...]], list[WaitingTask]]:
    """The waiting tasks by whether they are held, and the nodes that they exclude."""
    groups: dict[tuple[bool, tuple[str, ...]], list[WaitingTask]] = {}
    for task in waiting:
        groups.setdefault((task.held, task.excluded), []).append(task)
    return groups


# Who is who among processes, for ever: marks that outlive a reuse of the number, and whether such a
# one still runs. psutil is imported where /proc does not tell: that import is 2 % of the start of
# `tr11 status`.


@cache
def boot_mark() -> str:
    """What tells this boot of this machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return f"{os.uname().nodename}@{psutil.boot_time():.0f}"


def start_mark(pid: int) -> str | None:
    """When a process started, in a form that clock changes leave alone; None if there is no such
    process.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] == b"Z":
            return None
        return fields[19].decode()
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def mark(pid: int) -> ProcessMark:
    """Name a living process for ever. A process that is gone gets a mark that matches nothing."""
    return ProcessMark(pid, start_mark(pid) or "gone", boot_mark())


def is_alive(process: ProcessMark | None) -> bool:
    """Does exactly this process still run, on this machine, since this boot?"""
    return (
        process is not None
        and process.boot == boot_mark()
        and start_mark(process.pid) == process.start
    )
