"""The embedded scheduler's decisions: array and dependency syntax, admission, who may start where;
and how its records read as the protocol's `Job`s. Pure functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tr11ops.base.errors import ArraySyntaxError, SchedulerError
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import (
    NO_TASK,
    ArraySpec,
    compress,
    format_ranges,
    named_tasks,
    parse_array,
)
from tr11ops.cluster.base import BatchRequest, Job, JobState, Node
from tr11ops.cluster.local_machine import LocalNode, local_nodes, look_at_gpus
from tr11ops.cluster.local_records import (
    PARTITION,
    Dropped,
    LocalSettings,
    LocalSubmission,
    TaskRecord,
    WaitingTask,
    waiting_groups,
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
        or placement_fault(request.least, request.exclude, [node.name for node in nodes])
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
        node.name: _Room(node.cpus, tuple(gpu.uuid for gpu in node.gpus if gpu.uuid not in taken))
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
    if len(chosen) < request.least:
        could = sum(1 for node in allowed if free[node.name].holds(request, node)) >= request.least
        return Placement(reason="Priority" if could else "Resources")
    gpus = tuple(gpu for node in chosen for gpu in left[node.name].gpus[: request.gpus_per_node])
    return Placement(tuple(node.name for node in chosen), gpus)


# ----------------------------------------------------------------------------- the protocol's jobs
# How the embedded scheduler's records read as the protocol's `Job`s. Pure functions.
HELD = "JobHeldUser"


def output_path(submission: LocalSubmission, task: TaskRecord | None = None) -> str:
    """The output file with Slurm's patterns (%x %j %A %a %N %u %%, with a width as in %5a)
    replaced.

    Without a task, the patterns that only a started task can fill stay as they are.
    """
    values: dict[str, str | int] = {
        "x": submission.request.name,
        "A": submission.job_id,
        "u": submission.user,
        "%": "%",
    }
    if not submission.is_array:
        values |= {"j": submission.job_id, "a": NO_TASK}
    if task is not None:
        values |= {
            "j": task.raw_id,
            "a": NO_TASK if task.task_id is None else task.task_id,
            "N": task.nodes[0],
        }

    def replaced(match: re.Match[str]) -> str:
        width = match[1]
        value = values.get(match[2], match[0])
        if width and isinstance(value, int):
            return str(value).zfill(min(int(width), 10))
        return str(value)

    file = re.sub(r"%([0-9]*)([xjAaNu%])", replaced, submission.request.output)
    return os.path.join(submission.request.working_directory, file)  # noqa: PTH118  a Path costs ten times as much


def _common(submission: LocalSubmission) -> dict[str, Any]:
    request = submission.request
    return {
        "array_id": str(submission.job_id) if submission.is_array else None,
        "name": request.name,
        "user": submission.user,
        "partition": PARTITION,
        "node_count": request.least,
        "submit_time": submission.submit_time,
        "time_limit_seconds": request.time_limit_seconds,
        "comment": request.comment,
        "working_directory": str(request.working_directory),
    }


def _display_id(submission: LocalSubmission, task_ids: tuple[int | None, ...]) -> str:
    numbers = [number for number in task_ids if number is not None]
    if not submission.is_array:
        return str(submission.job_id)
    if len(numbers) == 1:
        return f"{submission.job_id}_{numbers[0]}"
    throttle = ""
    if submission.throttle:
        throttle = f"%{submission.throttle}"
    return f"{submission.job_id}_[{format_ranges(numbers)}{throttle}]"


def waiting_job(submission: LocalSubmission, group: tuple[WaitingTask, ...]) -> Job:
    """The Job for waiting tasks that share their hold and exclusions. `group` must not be empty."""
    first = group[0]
    numbers = tuple(task.task_id for task in group if task.task_id is not None)
    return Job(
        job_id=_display_id(submission, tuple(task.task_id for task in group)),
        raw_id=str(submission.job_id),
        task_id=numbers[0] if len(numbers) == 1 else None,
        state=JobState.PENDING,
        # the supervisor's word may be old
        reason=HELD if first.held else submission.reason.replace(HELD, ""),
        dependency=submission.request.dependency or "",
        excluded=first.excluded,
        pending_tasks=numbers,
        output=output_path(submission),
        **_common(submission),
    )


def task_job(submission: LocalSubmission, task: TaskRecord) -> Job:
    """The Job for one started task."""
    return Job(
        job_id=_display_id(submission, (task.task_id,)),
        raw_id=str(task.raw_id),
        task_id=task.task_id,
        state=task.state,
        reason=task.reason,
        nodes=task.nodes,
        start_time=task.start_time,
        end_time=task.end_time,
        exit_code=task.exit_code,
        exit_signal=task.exit_signal,
        output=output_path(submission, task),
        **_common(submission),
    )


def dropped_job(submission: LocalSubmission, dropped: Dropped) -> Job:
    """The Job for tasks that were cancelled before they started."""
    numbers = tuple(number for number in dropped.task_ids if number is not None)
    return Job(
        job_id=_display_id(submission, dropped.task_ids),
        raw_id=str(submission.job_id),
        task_id=numbers[0] if len(numbers) == 1 else None,
        state=JobState.CANCELLED,
        end_time=dropped.time,
        output=output_path(submission),
        **_common(submission),
    )


def submission_jobs(submission: LocalSubmission) -> tuple[Job, ...]:
    """Every Job of a submission: waiting tasks in groups, started tasks one by one, dropped tasks
    in groups.
    """
    return (
        *(
            waiting_job(submission, tuple(group))
            for group in waiting_groups(submission.waiting).values()
        ),
        *(task_job(submission, task) for task in submission.tasks),
        *(dropped_job(submission, dropped) for dropped in submission.dropped),
    )


def find_job(submission: LocalSubmission, task_id: int | None) -> Job | None:
    """One task of an array; without `task_id` the job itself, or of an array what matters most now:
    its waiting tasks, else its newest started task, else the tasks dropped last."""
    for waiting in submission.waiting:
        if task_id is not None and waiting.task_id == task_id:
            return waiting_job(submission, (waiting,))
    for task in reversed(submission.tasks):
        if task_id is not None and task.task_id == task_id:
            return task_job(submission, task)
    for dropped in submission.dropped:
        if task_id is not None and task_id in dropped.task_ids:
            return dropped_job(submission, Dropped((task_id,), dropped.time))
    if task_id is None:
        jobs = submission_jobs(submission)
    else:
        jobs = ()
    if jobs and jobs[0].state is JobState.PENDING:
        return jobs[0]
    if submission.tasks and task_id is None:
        return task_job(submission, submission.tasks[-1])
    if jobs:
        return jobs[0]
    return None


def node_view(node: LocalNode, active: Sequence[LocalSubmission]) -> Node:
    """One node, as the jobs of these submissions leave it."""
    jobs = [one.request for one in active for task in one.running if node.name in task.nodes]
    state = "idle"
    if jobs:
        is_full = node.is_simulated or sum(request.cpus_per_task for request in jobs) >= node.cpus
        state = "allocated" if is_full else "mixed"
    kinds = {gpu.name for gpu in node.gpus}
    return Node(
        name=node.name,
        states=frozenset({state}),
        cpus=node.cpus,
        gpus=node.gpu_count,
        memory_megabytes=node.memory_megabytes,
        partitions=(PARTITION,),
        gpu_kind=kinds.pop() if len(kinds) == 1 else "",
        gpu_memory_megabytes=min((gpu.memory_megabytes for gpu in node.gpus), default=0),
        gpu_fault=node.gpu_fault,
    )


def this_machine() -> Node:
    """This machine as a node, with the GPUs that it has now, whatever runs on it."""
    return node_view(local_nodes(LocalSettings(), look_at_gpus())[0], ())
