"""Holds queued jobs, and releases them. Only what tr11 has held is ever released by it
(`observe/jobs.py` tells).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import cause
from tr11ops.cluster.arrays import covered, names_of
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.rundir.hold_store import forget_holds, record_holds
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record


class JobChanges(Record):
    """What came of holding, releasing, stopping or cancelling jobs: `done` are names of jobs, arrays
    and tasks, `refused` say why.

    `unanswered` are those of `refused` for which the scheduler was silent: it may have come about
    all the same.

    `unrecorded`: why a hold is not on record, so that `tr11 resume` will not release what was held, or
    releases again what was released; "" when it is.
    """

    done: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    unrecorded: str = ""
    unanswered: tuple[str, ...] = ()


def can_modify(job: Job, user: str) -> bool:
    """Whether the scheduler lets `user` hold or cancel a job: its owner may, and root."""
    return job.user in {"", user} or os.geteuid() == 0


def not_held(
    queued: Iterable[Job], may: Callable[[Job], bool] = lambda job: True
) -> tuple[str, ...]:
    """Names of the queued jobs that are not held yet, of those that one `may` hold.

    Of an array of which a part is held already, only the other tasks are named: who held that part
    releases it.
    """
    jobs = tuple(queued)
    return names_of((job for job in jobs if not is_held(job) and may(job)), filter(is_held, jobs))


def to_hold(queued: Iterable[Job], user: str) -> tuple[tuple[str, ...], tuple[Job, ...]]:
    """Names of the queued jobs that `user` may hold and that are not held yet; and the jobs of
    others.
    """
    jobs = tuple(queued)
    mine = not_held(jobs, lambda job: can_modify(job, user))
    return mine, tuple(job for job in jobs if not is_held(job) and not can_modify(job, user))


def hold(
    directory: RunDirectory,
    numbers: Iterable[str],
    scheduler: Scheduler,
    who: str,
    why: str,
    must_record: bool = True,
) -> JobChanges:
    """Hold queued jobs and put them on record first: a record too many releases nothing that
    someone else holds.

    Raises OSError when it cannot be recorded, unless it shall be held all the same: also where the
    disk is silent.
    """
    wanted = tuple(numbers)
    unrecorded = ""
    if wanted and must_record:
        record_holds(directory, wanted, who, why)
    elif wanted:
        unrecorded = _tried(lambda: record_holds(directory, wanted, who, why))
    return replace(_each(wanted, scheduler.hold, scheduler, True), unrecorded=unrecorded)


def hold_unrecorded(numbers: Iterable[str], scheduler: Scheduler, why: str) -> JobChanges:
    """Hold queued jobs of a run whose directory takes no record, and `why` it does not."""
    return replace(_each(tuple(numbers), scheduler.hold, scheduler, True), unrecorded=why)


def release(directory: RunDirectory, numbers: Iterable[str], scheduler: Scheduler) -> JobChanges:
    """Release what was held, and take it off the record."""
    result = _each(tuple(numbers), scheduler.release, scheduler, False)
    return replace(result, unrecorded=_tried(lambda: forget_holds(directory, result.done)))


def _tried(write: Callable[[], None]) -> str:
    """Write to the record, for as long as a step of a stop may take; returns why it could not be
    done, or "".
    """
    try:
        deadline.within(deadline.STOP_SECONDS, write)
    except OSError as error:
        return cause(error)
    return ""


def _each(
    numbers: tuple[str, ...], change: Callable[[str], None], scheduler: Scheduler, held: bool
) -> JobChanges:
    """Change each. Where the scheduler was silent it is not asked again: a stop must not wait for
    it twice.
    """
    done: list[str] = []
    refused: list[tuple[str, str]] = []
    unanswered: list[str] = []
    for number in numbers:
        try:
            change(number)
        except SchedulerUnreachable as error:
            refused.append((number, cause(error)))
            unanswered.append(number)
        except SchedulerError as error:
            if shows(scheduler.jobs, number, lambda job: is_held(job) is held):
                done.append(number)
            else:
                refused.append((number, cause(error)))
        else:
            done.append(number)
    return JobChanges(tuple(done), tuple(refused), unanswered=tuple(unanswered))


def shows(
    look: Callable[[], Iterable[Job]], name: str, is_so: Callable[[Job], bool]
) -> bool | None:
    """Whether the queue shows all that a name covers as it should be, whatever the answer to the
    change was.

    Slurm may refuse for one task of an array what it did for the others. None: nothing of that name
    waits any more; False where `look` raises SchedulerError, too.
    """
    try:
        waiting = covered(name, (job for job in look() if job.state is JobState.PENDING))
    except SchedulerError:
        return False
    if waiting:
        return all(map(is_so, waiting))
    return None
