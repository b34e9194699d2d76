"""The embedded scheduler's decisions: array and dependency syntax, admission, who may start where.
Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from tr11ops.base.errors import ArraySyntaxError, SchedulerError
from tr11ops.base.nvidia import uuids
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import ArraySpec, named_tasks, parse_array
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.hostlist import compress
from tr11ops.cluster.local_machine import LocalNode
from tr11ops.cluster.local_records import (
    PARTITION,
    LocalSettings,
    LocalSubmission,
    WaitingTask,
)
from trainer.contract.record import Record


# ----------------------------------------------------------------------------- arrays
def array_of(text: str) -> ArraySpec:
    """What `--array` takes. Raises SchedulerError with the fault."""
    try:
        return parse_array(text)
    except ArraySyntaxError as error:
        raise SchedulerError(f"invalid job array {text!r}: {error}") from None


class JobReference(Record):
    """What a job id names: a job or a whole array (`tasks` is None), or some tasks of an array."""

    number: int
    tasks: frozenset[int] | None = None

    def names(self, task_id: int | None) -> bool:
        return self.tasks is None or task_id in self.tasks


def parse_job_id(text: str) -> JobReference:
    """Read `12`, `12_3` or, as waiting tasks are shown, `12_[4-10%1]`. Raises SchedulerError for
    anything else.
    """
    match = re.fullmatch(r"([0-9]{1,18})(?:_([0-9]{1,7}|\[[0-9,:%-]+\]))?", text)
    tasks = None
    if match is not None and match[2]:
        tasks = named_tasks(match[2])
    if match is None or (match[2] and tasks is None):
        raise SchedulerError(f"invalid job id {text!r}: write 12, 12_3 or 12_[4-10]")
    return JobReference(int(match[1]), None if tasks is None else frozenset(tasks))


# ----------------------------------------------------------------------------- dependencies
def parse_dependency(text: str | None) -> tuple[JobReference, ...]:
    """The jobs and tasks for whose end `afterany:12:13_4` waits, the one kind that tr11 submits.
    Raises SchedulerError with the fault.
    """
    if text is None:
        return ()
    kind, *targets = text.split(":")
    if kind != "afterany" or not targets:
        raise SchedulerError(f"invalid dependency {text!r}: write it like afterany:12:13_4")
    return tuple(map(parse_job_id, targets))


def has_ended(awaited: JobReference, submission: LocalSubmission | None) -> bool:
    """Whether all that a dependency names is over; None: a job that is forgotten ended long ago."""
    if submission is None:
        return True
    unfinished = [task.task_id for task in submission.waiting]
    unfinished += [task.task_id for task in submission.running]
    return not any(map(awaited.names, unfinished))


# ----------------------------------------------------------------------------- admission and
# placement
def request_fault(
    request: BatchRequest, settings: LocalSettings, nodes: Sequence[LocalNode]
) -> str | None:
    """Why this request can never run on these nodes, in one line; None when it can."""
    return (
        _script_fault(request)
        or ("the embedded scheduler has no begin times" if request.begin is not None else None)
        or _time_fault(request, settings)
        or _resource_fault(request, nodes)
        or placement_fault(request.nodes, request.exclude, [node.name for node in nodes])
    )


def _script_fault(request: BatchRequest) -> str | None:
    if not request.script.startswith("#!"):
        return "the batch script must begin with #! and its interpreter, such as #!/bin/bash"
    if "\0" in request.script + request.name + request.comment + request.output:
        return "script, name, comment and output must not contain a NUL character"
    if not request.working_directory.is_dir():
        return f"working directory {str(request.working_directory)!r} does not exist"
    return None


def _time_fault(request: BatchRequest, settings: LocalSettings) -> str | None:
    if request.time_limit_seconds < 1:
        return f"time limit of {request.time_limit_seconds} s: it must be 1 or more"
    if (
        settings.max_time_seconds is not None
        and request.time_limit_seconds > settings.max_time_seconds
    ):
        return (
            f"time limit of {request.time_limit_seconds} s is above the {settings.max_time_seconds} s "
            f"of partition {PARTITION!r}"
        )
    early = request.signal_seconds_before_limit
    if early is not None and not 0 < early < request.time_limit_seconds:
        limit = f"{request.time_limit_seconds} s"
        return f"signal {early} s before the limit: it must be more than 0 and less than the limit of {limit}"
    return None


def _resource_fault(request: BatchRequest, nodes: Sequence[LocalNode]) -> str | None:
    if request.partition not in {None, PARTITION}:
        return f"invalid partition {request.partition!r}: the embedded scheduler has {PARTITION!r} alone"
    if request.constraint or request.reservation:
        what = "constraint" if request.constraint else "reservation"
        return f"invalid {what} {request.constraint or request.reservation!r}: the embedded scheduler has none"
    most = max(node.gpu_count for node in nodes)
    if request.gpus_per_node > most:
        fault = nodes[0].gpu_fault
        asked = f"{counted(request.gpus_per_node, 'GPU')} per node asked for"
        if fault:
            return f"{asked}, how many are there is not known: {fault}"
        return f"{asked}, {most} there"
    return None


def placement_fault(node_count: int, excluded: Collection[str], names: Sequence[str]) -> str | None:
    """Why `node_count` nodes outside `excluded` can never be had of those of these names; None when
    they can.
    """
    unknown = sorted(set(excluded) - set(names))
    if unknown:
        there = compress(names)
        return f"invalid node name {unknown[0]!r} among the excluded: the nodes are {there}"
    if node_count < 1:
        return f"{counted(node_count, 'node')} asked for: it must be 1 or more"
    usable = len(names) - len(set(excluded))
    if node_count > usable:
        there = counted(len(names), "node")
        return f"{counted(node_count, 'node')} asked for, {usable} can be had ({there}, {len(set(excluded))} excluded)"
    return None


class Placement(Record):
    """Where a task starts: its nodes, and their GPUs by UUID, equally many of each; or no node, and
    why it waits.
    """

    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    reason: str = ""  # Resources, Priority


class _Room(Record):
    """What of a node is free."""

    cpus: int
    gpus: tuple[str, ...]
    is_whole: bool = True

    def holds(self, request: BatchRequest, node: LocalNode) -> bool:
        if node.is_simulated:
            if node.pretended_gpus is not None:
                gpus = node.gpu_count
            else:
                gpus = len(self.gpus)
            return self.is_whole and gpus >= request.gpus_per_node
        return self.cpus >= _cpus(request, node) and len(self.gpus) >= request.gpus_per_node

    def without(self, request: BatchRequest, node: LocalNode, taken: Collection[str]) -> _Room:
        """What is left beside a job with these GPUs. A simulated node belongs to one job."""
        gpus = tuple(gpu for gpu in self.gpus if gpu not in taken)
        return _Room(self.cpus - _cpus(request, node), gpus, is_whole=False)


def _cpus(request: BatchRequest, node: LocalNode) -> int:
    """The cores that a job takes: what it asks for, and where that is more than there are, all."""
    return min(request.cpus_per_task, node.cpus)


def choose_nodes(
    submission: LocalSubmission,
    task: WaitingTask,
    others: Iterable[LocalSubmission],
    nodes: Sequence[LocalNode],
    taken: Collection[str] = (),
) -> Placement:
    """The nodes and GPUs for a task that is otherwise ready, or the reason to wait (Resources,
    Priority).

    First come, first served: what an earlier submission is waiting for is not taken. `taken`: GPUs,
    by UUID, that others than these submissions hold.
    """
    request = submission.request
    rest = [other for other in others if other.job_id != submission.job_id]
    free = {
        node.name: _Room(node.cpus, tuple(gpu for gpu in uuids(node.gpus) if gpu not in taken))
        for node in nodes
    }
    for one in (submission, *rest):
        for running in one.running:
            for node in nodes:
                if node.name in running.nodes:
                    free[node.name] = free[node.name].without(one.request, node, running.gpus)
    left = dict(free)
    for other in rest:
        first = next((waiting for waiting in other.waiting if not waiting.held), None)
        if (
            first is None
            or other.job_id > submission.job_id
            or other.reason not in {"Resources", "Priority"}
        ):
            continue
        for node in nodes:
            if node.name not in first.excluded:
                kept = left[node.name].gpus[: other.request.gpus_per_node]
                left[node.name] = left[node.name].without(other.request, node, kept)
    allowed = [node for node in nodes if node.name not in task.excluded]
    chosen = [node for node in allowed if left[node.name].holds(request, node)][: request.nodes]
    if len(chosen) < request.nodes:
        could = sum(1 for node in allowed if free[node.name].holds(request, node)) >= request.nodes
        return Placement(reason="Priority" if could else "Resources")
    gpus = tuple(gpu for node in chosen for gpu in left[node.name].gpus[: request.gpus_per_node])
    return Placement(tuple(node.name for node in chosen), gpus)
