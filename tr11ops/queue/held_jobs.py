"""Is this queued job held, and by whom? And: hold it, release it. Only what tr11 has held is ever
released by it.

`cluster/pending_reasons.py` reads the scheduler's reasons, `rundir/hold_store.py` the records; here
they become one answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Unknown, cause, known
from tr11ops.cluster.arrays import array_number, covered, covers, names_of, split
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.pending_reasons import Cause, HeldBy, Wait, is_held, reason_of_job
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.hold_store import HoldRecord, forget_holds, record_holds
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record


# ----------------------------------------------------------------------------- is it held, and by
# whom?
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


# ----------------------------------------------------------------------------- hold and release
class HoldResult(Record):
    """What came of holding, or releasing, queued jobs: `done` are names of jobs, arrays and tasks,
    `refused` say why.

    `unanswered` are those of `refused` for which the scheduler was silent: it may have come about
    all the same.

    `unrecorded`: why it is not on record, so that `tr11 resume` will not release what was held, or
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
) -> HoldResult:
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


def hold_unrecorded(numbers: Iterable[str], scheduler: Scheduler, why: str) -> HoldResult:
    """Hold queued jobs of a run whose directory takes no record, and `why` it does not."""
    return replace(_each(tuple(numbers), scheduler.hold, scheduler, True), unrecorded=why)


def release(directory: RunDirectory, numbers: Iterable[str], scheduler: Scheduler) -> HoldResult:
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
) -> HoldResult:
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
    return HoldResult(tuple(done), tuple(refused), unanswered=tuple(unanswered))


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
