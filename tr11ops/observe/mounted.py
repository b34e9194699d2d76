"""Is the run directory that is seen here the one that the run's jobs were queued from? Pure, but
for a folder's names.

A file system that is not mounted leaves an empty mount point, or nothing: there a run was never
launched, has no checkpoint, and would begin again from random weights. What the scheduler shows of
the run says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.cluster.base import Job, Overview
from tr11ops.rundir.paths import RunDirectory, parse_comment

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
