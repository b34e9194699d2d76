"""The run's jobs: which are its own, and whether this directory is the one that they were queued from:
one rule for every command that looks at, launches, changes or stops jobs. And what a queued one waits
for: can it be placed at all where it is queued, by the nodes and partitions as they are now; is it
held, and by whom; what can a person do.

The scheduler's reason does not tell the place of a job that also waits for another: Slurm lets a queued
task be moved to any partition, and goes on to say that it waits for its turn. Who holds a job is one
answer of two: `cluster/pending_reasons.py` reads the scheduler's reasons, `rundir/hold_store.py` the
records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cached_property

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import array_number, covers, is_cell, split
from tr11ops.cluster.base import Job, Node, Overview
from tr11ops.cluster.pending_reasons import (
    PARTITION_CLOSED,
    Cause,
    HeldBy,
    NodeNeed,
    Wait,
    lacking,
    reason_of,
    reason_of_job,
    why_no_room,
)
from tr11ops.observe.files import read_submissions
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.rundir.paths import DAMAGED, RunDirectory, Submission, parse_comment
from trainer.contract.record import Record

# A file system that is not mounted leaves an empty mount point, or nothing: there a run was never
# launched, has no checkpoint, and would begin again from random weights. What the scheduler shows of
# the run says otherwise.

ENDED_SECONDS = 600.0  # a job that ended within this time still tells where it was queued from


def why_unmounted(directory: RunDirectory, jobs: Observed[Iterable[Job]], now: float) -> str:
    """Why the directory is not the one that `jobs` were queued from; "" where it is, or where no
    job tells.

    A launch makes the submission's folder before the scheduler hears of its job. So a job that
    carries the directory's mark does not go together with a directory of which nothing says that it
    was ever launched.
    """
    if _may_be_there(directory):
        return ""
    witnesses = [job for job in known(jobs, ()) if _was_queued_from(directory, job, now)]
    if not witnesses:
        return ""
    job = min(witnesses, key=lambda one: one.state.is_final)
    lack = "holds no record of any launch" if directory.exists else "is not there"
    return f"{directory.root} {lack}, but job {job.job_id} was queued from it: its file system is not mounted here"


def look_for_directory(directory: RunDirectory, scheduler: Overview | Unknown, now: float) -> str:
    """The same, for who has not asked the scheduler: it is asked only where no launch is on record."""
    if isinstance(scheduler, Unknown) or _may_be_there(directory):
        return ""
    try:
        return why_unmounted(directory, scheduler.jobs(), now)
    except SchedulerError:
        return ""  # nothing is known of jobs, which is said where they are looked at


def why_not_there(directory: RunDirectory, scheduler: Overview | Unknown, now: float) -> str:
    """Why nothing may be made in the directory's place: it is not mounted, or not there at all; ""
    where it may.
    """
    why = look_for_directory(directory, scheduler, now)
    if not why and not known(observed(lambda: directory.exists), True):
        why = (
            f"{directory.root} is not there: its file system is not mounted here, or it was removed"
        )
    return why


def was_never_launched(directory: RunDirectory, scheduler: Overview | Unknown) -> bool:
    """Whether nothing at all tells of the run: no directory, and a scheduler that answers and shows
    no job of it.
    """
    if isinstance(scheduler, Unknown) or known(observed(lambda: directory.exists), True):
        return False
    try:
        marks = [parse_comment(job.comment) for job in scheduler.jobs()]
    except SchedulerError:
        return False
    return not any(mark is not None and mark[1] == directory.mark for mark in marks)


def ways_to_see(directory: RunDirectory) -> str:
    """What a person types to see what is mounted."""
    return f"`findmnt --target {directory.root}` and `ls {directory.root}` show what is there"


def _may_be_there(directory: RunDirectory) -> bool:
    """Whether a submission or the beginning of an attempt is on record, or cannot be looked for.

    What goes on writing where the directory has vanished (heartbeats, verdicts) makes neither.
    """
    found = observed(
        lambda: bool(directory.tags()) or any(directory.paths.attempts.glob("*/attempt.json"))
    )
    return known(found, True)


def _was_queued_from(directory: RunDirectory, job: Job, now: float) -> bool:
    mark = parse_comment(job.comment)
    if mark is None or mark[1] != directory.mark:
        return False
    return not job.state.is_final or (
        job.end_time is not None and now - job.end_time < ENDED_SECONDS
    )


OWN_COMMENT = "tr11-"  # of tr11's other jobs: copies, periodic jobs
CLOCK_SECONDS = 60.0  # by which the clocks of a record's writer and of the scheduler may differ


class Ownership:
    """The rule, for thousands of jobs: what it needs of the submissions is looked up, not searched.

    A job is of this run by the mark in its comment, which names the run directory. One without a
    mark is, if it has the run's name and either a submission's record has its number, or it works
    in the run directory (submitted by hand); a record may say another name. A number counts only
    for a job submitted no earlier than its record was begun: schedulers reuse numbers after a
    reset. Whose the job is does not count: the answer is the same for anyone who asks.

    `variant`: count this variant of the run alone, as the accounts of its past do; None: any, as
    they share one lease and one kill switch. `array_id` is known to be the run's, whatever its
    comment says. `scheduler`: where the jobs are; others' numbers do not count.
    """

    def __init__(
        self,
        directory: RunDirectory,
        submissions: Iterable[Submission] = (),
        variant: str | None = None,
        array_id: str | None = None,
        scheduler: str = "",
    ) -> None:
        self._directory = directory
        self._variant = variant
        self._array_id = array_id
        self._variants: dict[str, str] = {}
        self._by_job: dict[str, Submission] = {}
        for entry in submissions:
            self._variants[entry.tag] = entry.variant
            is_there = scheduler in ("", entry.scheduler) and variant in (None, entry.variant)
            if entry.job_id is not None and is_there:
                self._by_job.setdefault(entry.job_id, entry)
        self._marked: dict[str, bool | None] = {}

    def has(self, job: Job) -> bool:
        """Whether the job is of this run."""
        if self._array_id is not None and job.array_id == self._array_id:
            return True
        if job.comment not in self._marked:  # the same for all tasks of an array
            marked = parse_comment(job.comment)
            if marked is None:
                self._marked[job.comment] = None
            else:
                self._marked[job.comment] = self._is_ours(*marked)
        is_ours = self._marked[job.comment]
        if is_ours is not None:
            return is_ours
        if job.comment.startswith(OWN_COMMENT):
            return False
        if self._is_recorded(job):
            return True
        return job.name == self._directory.paths.name and self._works_here(job)

    def split(self, jobs: Iterable[Job]) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        """Jobs of this run, and others of its name; the cells of a sweep have one name, and are
        known to be others.
        """
        ours: list[Job] = []
        namesakes: list[Job] = []
        for job in jobs:
            if self.has(job):
                ours.append(job)
            elif job.name == self._directory.paths.name and not is_cell(job.comment):
                namesakes.append(job)
        return tuple(ours), tuple(namesakes)

    def _is_ours(self, tag: str, mark: str) -> bool:
        return mark == self._directory.mark and self._variant in (
            None,
            self._variants.get(tag, self._variant),
        )

    def _is_recorded(self, job: Job) -> bool:
        entry = self._by_job.get(job.raw_id) or self._by_job.get(array_number(job))
        if entry is None or job.name not in (self._directory.paths.name, entry.run):
            return False
        return job.submit_time is None or job.submit_time >= entry.time - CLOCK_SECONDS

    def _works_here(self, job: Job) -> bool:
        place = job.working_directory
        return bool(place) and os.path.normpath(place) in {
            os.path.normpath(self._directory.root),
            self._real_root,
        }

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self._directory.root)


def own_jobs(
    directory: RunDirectory,
    jobs: Iterable[Job],
    submissions: Iterable[Submission],
    scheduler: str = "",
) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """Jobs of this run that are not over, of any variant, and living jobs of the same name that are
    not of this run.
    """
    ownership = Ownership(directory, submissions, scheduler=scheduler)
    return ownership.split(job for job in jobs if not job.state.is_final)


class OwnJobs(Record):
    """The jobs of a run that are not over, and others of its name that are not of it.

    `why_unclear` says which jobs may be of the run or not, and why that is not known: they are in
    neither. "" for none. `unmounted`: why the run directory is not the one that the jobs were
    queued from; "" where it is.
    """

    jobs: tuple[Job, ...] = ()
    namesakes: tuple[Job, ...] = ()
    why_unclear: str = ""
    unmounted: str = ""


def read_own_jobs(
    directory: RunDirectory, scheduler: Overview, array_id: str | None = None
) -> OwnJobs:
    """Ask for the run's jobs, and read whose they are. Raises SchedulerError.

    Where submissions cannot be read, or are on a file system that is not mounted here, a job of the
    run's name without a mark may be one of them: that is unknown.
    """
    jobs = scheduler.jobs()  # before the records: a job that comes meanwhile is known by its mark
    submissions, faults = read_submissions(directory)
    unmounted = why_unmounted(directory, jobs, time.time())
    if unmounted:
        submissions = Unknown(unmounted)
    ownership = Ownership(
        directory, known(submissions, ()), array_id=array_id, scheduler=scheduler.name
    )
    ours, namesakes = ownership.split(job for job in jobs if not job.state.is_final)
    others, why_unclear = without_unclear(namesakes, submissions, faults)
    return OwnJobs(ours, others, why_unclear, unmounted)


def own_jobs_now(directory: RunDirectory, scheduler: Overview) -> tuple[Job, ...]:
    """The run's jobs as the scheduler knows them now, where nothing else is asked. Raises SchedulerError."""
    return read_own_jobs(directory, scheduler).jobs


def without_unclear(
    namesakes: tuple[Job, ...],
    submissions: Observed[tuple[Submission, ...]],
    faults: Iterable[str] = (),
) -> tuple[tuple[Job, ...], str]:
    """Namesakes less the unmarked ones, where a submission that could not be read may name them;
    and that doubt.
    """
    damaged = [
        f"submission {one.tag}: {one.note}"
        for one in known(submissions, ())
        if one.note.startswith(DAMAGED)
    ]
    if isinstance(submissions, Unknown):
        why = submissions.why
    else:
        why = "; ".join((*faults, *damaged))
    unclear = [
        job
        for job in namesakes
        if why and parse_comment(job.comment) is None and not job.comment.startswith(OWN_COMMENT)
    ]
    if not unclear:
        return namesakes, ""
    names = ", ".join(job.job_id for job in unclear)
    others = tuple(job for job in namesakes if job not in unclear)
    return others, f"whether job {names} is of this run cannot be told: {why}"


# ----------------------------------------------------------------------------- can it be placed?
def with_reasons_of_now(jobs: tuple[Job, ...], nodes: tuple[Node, ...]) -> tuple[Job, ...]:
    """The jobs, those without a reason of which one says that its partition is closed though it is
    open by now.

    Slurm gives the reason of its last attempt to start a job, which may be minutes old.
    """
    are_open = {
        name for node in nodes for name in node.partitions if name not in node.shut_partitions
    }
    return tuple(
        replace(job, reason="")
        if reason_of(job.reason) is PARTITION_CLOSED and are_open.intersection(_partitions(job))
        else job
        for job in jobs
    )


def is_shut(snapshot: Snapshot, job: Job) -> bool:
    """Whether every partition that the job is queued in starts nothing now; not where one of them
    is not known.
    """
    names = _partitions(job)
    return bool(names) and all(
        (nodes := _nodes_of(snapshot, name)) and all(name in node.shut_partitions for node in nodes)
        for name in names
    )


def misplaced(snapshot: Snapshot, job: Job) -> str:
    """Why no partition that the job is queued in could ever start it, in words; "" where one could,
    or is not known.
    """
    return why_no_room(job, known(snapshot.nodes, ()))


def too_few_usable(snapshot: Snapshot, job: Job) -> str:
    """Why no partition that the job is queued in could start it as its nodes are now, in words; ""
    where one could.

    Nodes at work count, as they will be free; so does what is not known: a node that the scheduler
    itself cannot judge, a partition without nodes. What is down, drained, silent or excluded does
    not.
    """
    excluded = {entry.node for entry in known(snapshot.exclusions, ())} | set(job.excluded)
    found = []
    for name in _partitions(job):
        nodes = _nodes_of(snapshot, name)
        lacks = lacking(NodeNeed(gpus=job.gpus_per_node), nodes)
        fits = [node for node in nodes if node.name not in lacks]
        usable = [
            node
            for node in fits
            if (node.is_usable or node.is_unknown) and node.name not in excluded
        ]
        if not nodes or job.node_count <= len(usable):
            return ""
        total = counted(len(fits), "node")
        found.append(
            f"{len(usable)} of {total} of {name} can be used, it asks for {job.node_count}"
        )
    return "; ".join(found)


def _partitions(job: Job) -> tuple[str, ...]:
    return tuple(filter(None, job.partition.split(",")))


def _nodes_of(snapshot: Snapshot, partition: str) -> tuple[Node, ...]:
    return tuple(node for node in known(snapshot.nodes, ()) if partition in node.partitions)


# ----------------------------------------------------------------------------- is it held, and by whom?
class HeldJobs(Record):
    """The held jobs of a queue, or parts of them: `ours` tr11 holds and may release; `others`
    someone else holds.

    `taken_over` are those of `others` that tr11 has on record as held, while by now another one
    holds them.
    """

    ours: tuple[Job, ...] = ()
    others: tuple[Job, ...] = ()
    taken_over: tuple[Job, ...] = ()


def held_jobs(queued: Iterable[Job], held: Iterable[str], is_automatic: bool = False) -> HeldJobs:
    """Who holds what of the queued jobs. `held`: the names of what tr11 holds, by its records.

    The record decides, for the scheduler's reason cannot: behind a dependency only a priority of 0
    shows the hold, and Slurm calls every hold by root or an operator an administrator's, also one
    through tr11. What the scheduler itself holds is never tr11's. For what no person looks at
    (`is_automatic`), an administrator's hold is not either.
    """
    names = tuple(held)
    foreign = {HeldBy.SCHEDULER, *([HeldBy.ADMINISTRATOR] if is_automatic else [])}
    ours: list[Job] = []
    others: list[Job] = []
    taken_over: list[Job] = []
    for job in queued:
        by = reason_of_job(job).held_by
        if by is None:
            continue
        recorded, rest = split(job, names)
        if recorded is not None and by not in foreign:
            ours.append(recorded)
        elif recorded is not None:
            taken_over.append(recorded)
            others.append(recorded)
        others += [rest] if rest is not None else []
    return HeldJobs(tuple(ours), tuple(others), tuple(taken_over))


def record_of(job: Job, records: Iterable[HoldRecord]) -> HoldRecord | None:
    """The record by which tr11 holds a job, that of a command before an attempt's; None where there
    is none.
    """
    return next((record for record in records if covers(record.job, job)), None)


def standing_holds(snapshot: Snapshot) -> tuple[HoldRecord, ...]:
    """What tr11 has held, by its records, and the queue still shows as held: a release by hand, or
    the end of the job, is on no record. All that is on record where the queue cannot be seen. Each
    name once.
    """
    records = {record.job: record for record in reversed(known(snapshot.operation.holds, ()))}
    found = tuple(reversed(records.values()))
    if isinstance(snapshot.jobs, Unknown):
        return found
    ours = held_jobs(snapshot.pending_jobs, records).ours
    return tuple(record for record in found if any(covers(record.job, job) for job in ours))


# ----------------------------------------------------------------------------- what a person can do
def way_out(job: Job) -> str:
    """What a person can do for a job that waits for one, in words; "" where the reason says nothing
    of it.
    """
    number = array_number(job)
    replace = "correct the card, then `tr11 launch --replace`"
    cause = reason_of_job(job).cause
    if job.reason == "PartitionTimeLimit":
        return (
            f"`scontrol update JobId={number} TimeLimit=` with what the partition gives keeps its place in the queue, "
            "if a start, a save and slurm.signal_seconds_before_limit fit into that; else lower slurm.time_limit in "
            "the card, and what depends on it"
        )
    if cause is Cause.RESERVATION:
        return f"`scontrol release {number}` lets it go on without a reservation; or {replace}"
    if cause is Cause.LIMIT and reason_of_job(job).wait is Wait.PASSES:
        own = "if it alone asks for more (`tr11 launch --replace --dry-run` says it)"
        return f"it starts when others end; {own}: {replace}"
    if cause is Cause.LIMIT:
        return f"more is granted by the site, or another account or QoS is used: {replace}"
    if cause is Cause.UNKNOWN:
        return f"`scontrol show job {number}` says more"
    return ""
