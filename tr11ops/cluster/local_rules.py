"""The embedded scheduler's decisions: array and dependency syntax, admission, who may start where.
Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum

from tr11ops.base.errors import ArraySyntaxError, SchedulerError
from tr11ops.base.nvidia import uuids
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import ArraySpec, named_tasks, parse_array
from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.hostlist import compress
from tr11ops.cluster.local_machine import LocalNode
from tr11ops.cluster.local_records import (
    PARTITION,
    LocalSettings,
    LocalSubmission,
    TaskRecord,
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
class DependencyVerdict(Enum):
    """Whether a dependency lets a job start."""

    MET = "met"
    WAIT = "wait"
    NEVER = "never"


class DependencyTerm(Record):
    """One condition: a kind, and the job or array task that it looks at (none for `singleton`)."""

    kind: str
    job_id: int | None = None
    task_id: int | None = None
    delay_seconds: int = 0


class Dependency(Record):
    """Conditions of which all must hold, or, after Slurm's `?` separator, any one."""

    terms: tuple[DependencyTerm, ...]
    any_one: bool = False


DEPENDENCY_KINDS = ("after", "afterany", "afternotok", "afterok", "singleton")


def parse_dependency(text: str) -> Dependency:
    """Read `afterok:12:13_4,singleton` or `afterany:1?afterany:2`. Raises SchedulerError with the
    fault.
    """

    def fault(rule: str) -> SchedulerError:
        return SchedulerError(
            f"invalid dependency {text!r}: {rule}; write it like afterany:12 or afterok:12:13"
        )

    if "," in text and "?" in text:
        raise fault("use either , (all) or ? (any), not both")
    terms: list[DependencyTerm] = []
    for part in re.split(r"[,?]", text):
        kind, *targets = part.split(":")
        if kind not in DEPENDENCY_KINDS:
            raise fault(f"{kind!r} is not one of {', '.join(DEPENDENCY_KINDS)}")
        if kind == "singleton":
            if targets:
                raise fault("singleton takes no job id")
            terms.append(DependencyTerm(kind))
            continue
        if not targets:
            raise fault(f"{kind} needs a job id")
        for target in targets:
            identifier, plus, minutes = target.partition("+")
            if plus and (kind != "after" or not minutes.isdecimal()):
                raise fault(f"{target!r}: a delay in whole minutes is for `after` alone")
            match = re.fullmatch(r"([0-9]{1,18})(?:_([0-9]{1,6}))?", identifier)
            if match is None:
                raise fault(f"{identifier!r} is not a job id")
            task_id = None
            if match[2]:
                task_id = int(match[2])
            terms.append(
                DependencyTerm(kind, int(match[1]), task_id, 60 * int(minutes) if plus else 0)
            )
    return Dependency(tuple(terms), "?" in text)


def dependency_verdict(
    dependency: Dependency,
    submission: LocalSubmission,
    find: Callable[[int], LocalSubmission | None],
    others: Iterable[LocalSubmission],
    now: float,
) -> DependencyVerdict:
    """May `submission` start? `find` gives a submission by id (None: aged out), `others` all that
    are not over.
    """
    verdicts = []
    for term in dependency.terms:
        if term.job_id is None:
            earlier = any(
                other.job_id < submission.job_id
                and (other.request.name, other.user) == (submission.request.name, submission.user)
                and not other.is_over
                for other in others
            )
            verdicts.append(DependencyVerdict.WAIT if earlier else DependencyVerdict.MET)
        else:
            verdicts.append(_term_verdict(term, find(term.job_id), now))
    if dependency.any_one:
        order = (DependencyVerdict.MET, DependencyVerdict.WAIT, DependencyVerdict.NEVER)
    else:
        order = (DependencyVerdict.NEVER, DependencyVerdict.WAIT, DependencyVerdict.MET)
    return next(verdict for verdict in order if verdict in verdicts)


def _term_verdict(
    term: DependencyTerm, target: LocalSubmission | None, now: float
) -> DependencyVerdict:
    if target is None:  # only a job that ended long ago is gone; how it ended is not known any more
        if term.kind in {"after", "afterany"}:
            return DependencyVerdict.MET
        return DependencyVerdict.NEVER
    tasks: Sequence[TaskRecord] = target.tasks
    waiting: Collection[WaitingTask] = target.waiting
    dropped = bool(target.dropped)
    if term.task_id is not None:
        tasks = [task for task in tasks if task.task_id == term.task_id]
        waiting = [task for task in waiting if task.task_id == term.task_id]
        dropped = any(term.task_id in drop.task_ids for drop in target.dropped)
    if term.kind == "after":
        starts = [task.start_time for task in tasks] or [target.end_time]
        if not waiting and now >= max(starts) + term.delay_seconds:
            return DependencyVerdict.MET
        return DependencyVerdict.WAIT
    failed = dropped or any(
        task.state.is_final and task.state is not JobState.COMPLETED for task in tasks
    )
    ended = not waiting and all(task.state.is_final for task in tasks)
    if term.kind == "afterany":
        if ended:
            return DependencyVerdict.MET
        return DependencyVerdict.WAIT
    if not ended:
        return DependencyVerdict.WAIT
    if failed == (term.kind == "afternotok"):
        return DependencyVerdict.MET
    return DependencyVerdict.NEVER


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
