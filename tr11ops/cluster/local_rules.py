"""The embedded scheduler's decisions: array and dependency syntax, admission, who may start where. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum

from tr11ops.cluster.arrays import ArraySpec, ArraySyntaxError, named_tasks, parse_array
from tr11ops.cluster.base import BatchRequest, JobState, SchedulerError
from tr11ops.cluster.hostlist import compress
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
    """Read `12`, `12_3` or, as waiting tasks are shown, `12_[4-10%1]`. Raises SchedulerError for anything else."""
    match = re.fullmatch(r"([0-9]{1,18})(?:_([0-9]{1,7}|\[[0-9,:%-]+\]))?", text)
    tasks = named_tasks(match[2]) if match is not None and match[2] else None
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
    """Read `afterok:12:13_4,singleton` or `afterany:1?afterany:2`. Raises SchedulerError with the fault."""

    def fault(rule: str) -> SchedulerError:
        return SchedulerError(f"invalid dependency {text!r}: {rule}; write it like afterany:12 or afterok:12:13")

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
            task_id = int(match[2]) if match[2] else None
            terms.append(DependencyTerm(kind, int(match[1]), task_id, 60 * int(minutes) if plus else 0))
    return Dependency(tuple(terms), "?" in text)


def dependency_verdict(
    dependency: Dependency,
    submission: LocalSubmission,
    find: Callable[[int], LocalSubmission | None],
    others: Iterable[LocalSubmission],
    now: float,
) -> DependencyVerdict:
    """May `submission` start? `find` gives a submission by id (None: aged out), `others` all that are not over."""
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


def _term_verdict(term: DependencyTerm, target: LocalSubmission | None, now: float) -> DependencyVerdict:
    if target is None:  # only a job that ended long ago is gone; how it ended is not known any more
        return DependencyVerdict.MET if term.kind in {"after", "afterany"} else DependencyVerdict.NEVER
    tasks: Sequence[TaskRecord] = target.tasks
    waiting: Collection[WaitingTask] = target.waiting
    dropped = bool(target.dropped)
    if term.task_id is not None:
        tasks = [task for task in tasks if task.task_id == term.task_id]
        waiting = [task for task in waiting if task.task_id == term.task_id]
        dropped = any(term.task_id in drop.task_ids for drop in target.dropped)
    if term.kind == "after":
        starts = [task.start_time for task in tasks] or [target.end_time]
        return (
            DependencyVerdict.MET if not waiting and now >= max(starts) + term.delay_seconds else DependencyVerdict.WAIT
        )
    failed = dropped or any(task.state.is_final and task.state is not JobState.COMPLETED for task in tasks)
    ended = not waiting and all(task.state.is_final for task in tasks)
    if term.kind == "afterany":
        return DependencyVerdict.MET if ended else DependencyVerdict.WAIT
    if not ended:
        return DependencyVerdict.WAIT
    return DependencyVerdict.MET if failed == (term.kind == "afternotok") else DependencyVerdict.NEVER


# ----------------------------------------------------------------------------- admission and placement
def request_fault(request: BatchRequest, settings: LocalSettings) -> str | None:
    """Why this request can never run here, in one line; None when it can."""
    return (
        _script_fault(request)
        or ("the embedded scheduler has no begin times" if request.begin is not None else None)
        or _time_fault(request, settings)
        or _resource_fault(request, settings)
        or placement_fault(request.nodes, request.exclude, settings)
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
    if settings.max_time_seconds is not None and request.time_limit_seconds > settings.max_time_seconds:
        return (
            f"time limit of {request.time_limit_seconds} s is above the {settings.max_time_seconds} s "
            f"of partition {PARTITION!r}"
        )
    early = request.signal_seconds_before_limit
    if early is not None and not 0 < early < request.time_limit_seconds:
        limit = f"{request.time_limit_seconds} s"
        return f"signal {early} s before the limit: it must be more than 0 and less than the limit of {limit}"
    return None


def _resource_fault(request: BatchRequest, settings: LocalSettings) -> str | None:
    if request.partition not in {None, PARTITION}:
        return f"invalid partition {request.partition!r}: the embedded scheduler has {PARTITION!r} alone"
    if request.constraint or request.reservation:
        what = "constraint" if request.constraint else "reservation"
        return f"invalid {what} {request.constraint or request.reservation!r}: the embedded scheduler has none"
    if settings.gpus_per_node is not None and request.gpus_per_node > settings.gpus_per_node:
        return f"{request.gpus_per_node} GPUs per node asked for, {settings.gpus_per_node} there"
    return None


def placement_fault(node_count: int, excluded: Collection[str], settings: LocalSettings) -> str | None:
    """Why `node_count` nodes outside `excluded` can never be had; None when they can."""
    unknown = sorted(set(excluded) - set(settings.nodes))
    if unknown:
        there = compress(settings.nodes)
        return f"invalid node name {unknown[0]!r} among the excluded: the nodes are {there}"
    if node_count < 1:
        return f"{node_count} nodes asked for: it must be 1 or more"
    usable = len(settings.nodes) - len(set(excluded))
    if node_count > usable:
        return (
            f"{node_count} nodes asked for, {usable} can be had "
            f"({len(settings.nodes)} nodes, {len(set(excluded))} excluded)"
        )
    return None


def choose_nodes(
    submission: LocalSubmission, task: WaitingTask, others: Iterable[LocalSubmission], settings: LocalSettings
) -> tuple[tuple[str, ...], str]:
    """The nodes for a task that is otherwise ready, or none and the reason (Resources, Priority).

    Nodes are exclusive. First come, first served: what an earlier submission is waiting for is not taken.
    """
    busy = {node for running in submission.running for node in running.nodes}
    reserved: set[str] = set()
    for other in others:
        if other.job_id == submission.job_id:
            continue
        busy.update(node for running in other.running for node in running.nodes)
        if other.job_id < submission.job_id and other.waiting and other.reason in {"Resources", "Priority"}:
            first = next((waiting for waiting in other.waiting if not waiting.held), None)
            reserved.update(set(settings.nodes) - set(first.excluded) if first else ())
    free = [node for node in settings.nodes if node not in busy and node not in task.excluded]
    open_to_us = [node for node in free if node not in reserved]
    if len(open_to_us) >= submission.request.nodes:
        return tuple(open_to_us[: submission.request.nodes]), ""
    return (), "Priority" if len(free) >= submission.request.nodes else "Resources"
