"""Is this job of this run, and this directory the one that its jobs were queued from? One rule for
every command that looks at, launches, changes or stops jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cached_property

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.cluster.arrays import array_number, is_cell
from tr11ops.cluster.base import Job, Overview
from tr11ops.observe.files import read_submissions
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
CLOCK_SECONDS = 60.0  # by which the clocks of a submission's record and of the scheduler may differ


class Ownership:
    """The rule, for thousands of jobs: what it needs of the submissions is looked up, not searched.

    A job is of this run by the mark in its comment, which names the run directory. One without a
    mark is, if it has the run's name and either a submission's record has its number, or it works
    in the run directory (submitted by hand). A number counts only for a job submitted no earlier
    than its record was begun: schedulers reuse numbers after a reset. Whose the job is does not
    count: the answer is the same for anyone who asks.

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
        if job.name != self._directory.paths.name or job.comment.startswith(OWN_COMMENT):
            return False
        return self._is_recorded(job) or self._works_here(job)

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
        return entry is not None and (
            job.submit_time is None or job.submit_time >= entry.time - CLOCK_SECONDS
        )

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
