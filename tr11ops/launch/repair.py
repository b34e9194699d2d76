"""Changing a run's queue: mending what cannot go on by itself, and giving all that is queued a new card.

`plan_repair` and `plan_replacement` decide from a snapshot; `carry_out` does it through the scheduler and writes it to
the journal. What is cancelled comes again: those attempts are launched before the old ones are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tr11ops.cluster.base import Job, Scheduler, SchedulerError
from tr11ops.cluster.pending import Cause, Wait, reason_of_job
from tr11ops.detect import signs
from tr11ops.detect.blocked import way_out
from tr11ops.detect.zombie import batch_host, has_lost_its_host, is_zombie, seconds_to_wait
from tr11ops.holds import may_steer, release
from tr11ops.journal import Journal
from tr11ops.launch.session import LaunchJob, LaunchView, carry_out_locked
from tr11ops.launch.submit import launch_lock
from tr11ops.runcard import parse_array
from tr11ops.rundir import Submission
from tr11ops.snapshot import Snapshot, Unknown


@dataclass(frozen=True)
class Step:
    """One thing to do to one job, in the order of the plan."""

    action: Literal["cancel", "release"]
    job: str
    why: str

    def __str__(self) -> str:
        return f"{self.action} {self.job}: {self.why}"


@dataclass(frozen=True)
class Repair:
    """What will be done. `resubmit` attempts are launched behind `after` (None: at once), then come the steps.

    `left_alone` says what is wrong but not ours to mend; `doubts` what could not be seen, and `refusals` why it must
    not be done: each forbids any step.
    """

    steps: tuple[Step, ...] = ()
    resubmit: int = 0
    after: str | None = None
    left_alone: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    kind: Literal["repaired", "replaced"] = "repaired"  # the journal's word for each step

    @property
    def cancelled(self) -> tuple[str, ...]:
        return tuple(step.job for step in self.steps if step.action == "cancel")

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.resubmit


def plan_repair(snapshot: Snapshot, held: Iterable[str], switch: str = "") -> Repair:
    """What mends the queue as it is seen. `held`: the numbers of the jobs that tr11 has held.

    While a stop switch is set (`switch` names it), what is held stays so. A dead rest is cancelled and launched anew.
    """
    if isinstance(snapshot.jobs, Unknown):
        return Repair(doubts=(f"jobs: {snapshot.jobs.why}",))
    ours, steps, alone = frozenset(held), [], []
    for job in signs.active_jobs(snapshot):
        if is_zombie(snapshot, job):
            host = batch_host(snapshot, job)
            steps.append(Step("cancel", job.raw_id, f"its batch host {host} is lost, nothing ends it"))
        elif has_lost_its_host(snapshot, job):
            wait = seconds_to_wait(snapshot, job)
            host = batch_host(snapshot, job)
            alone.append(f"job {job.job_id} has lost its batch host {host}, but was alive: look again in {wait:.0f} s")
    dead = [job for job in signs.pending_jobs(snapshot) if signs.is_dead(job)]
    living = {job.array_id for job in (*signs.active_jobs(snapshot), *signs.pending_jobs(snapshot)) if job not in dead}
    steps += [Step("cancel", _part(job, living), f"it can never start: {job.reason}") for job in dead]
    for job in signs.pending_jobs(snapshot):
        row, number = reason_of_job(job), _number(job)
        if row.wait is Wait.SITE:
            alone.append(f"job {number} waits for the site ({job.reason}): it starts by itself when the site is done")
        elif row.wait is Wait.PERSON and row.cause is not Cause.HOLD:
            alone.append(f"job {number} waits for a person ({job.reason}): {way_out(job)}")
        if not signs.is_held(job):
            continue
        if switch:
            alone.append(f"job {number} stays held: {switch} is set, which `tr11 resume` takes away")
        elif number not in ours or not job.reason.startswith("JobHeldUser"):
            alone.append(f"job {number} was not held by tr11 ({job.reason}): `scontrol release {number}` by its owner")
        else:
            steps.append(Step("release", number, "tr11 held it after a fault; it goes on as before"))
    lost = 0 if signs.is_finished(snapshot) else signs.queued_tasks(tuple(dead))
    cancelled = {step.job for step in steps if step.action == "cancel"}
    return Repair(tuple(steps), lost, _last(snapshot, cancelled), tuple(alone))


def plan_replacement(snapshot: Snapshot, user: str) -> Repair:
    """Every queued attempt of the run cancelled, and as many launched behind the one that lives.

    What a chain of self-submitting jobs has still to queue counts too.
    """
    if isinstance(snapshot.jobs, Unknown):
        return Repair(doubts=(f"jobs: {snapshot.jobs.why}",))
    queued, active = signs.pending_jobs(snapshot), signs.active_jobs(snapshot)
    foreign = [job for job in queued if not may_steer(job, user)]
    refusals = [f"job {job.job_id} is {job.user}'s, who alone can cancel it" for job in foreign]
    if not queued:
        behind = f" --after {_number(active[-1])}" if active else ""
        refusals.append(f"no attempt of this run is queued: `tr11 launch{behind}` queues the card as it is now")
    living = {job.array_id for job in active}
    names = tuple(dict.fromkeys(_part(job, living) for job in queued))
    steps = tuple(Step("cancel", name, "the new card takes its place") for name in names)
    tasks = signs.queued_tasks(queued) + signs.tasks_to_come(snapshot)
    return Repair(steps, tasks, _last(snapshot, set(names)), refusals=tuple(refusals), kind="replaced")


def _part(job: Job, living: set[str | None]) -> str:
    """What cancels a queued job: an array of which another task runs or waits must not be cancelled as a whole."""
    return job.job_id if job.array_id is not None and job.array_id in living else _number(job)


def _last(snapshot: Snapshot, cancelled: set[str]) -> str | None:
    """The number of the job that stands last in the line, once the cancelled ones are gone."""
    every = (*signs.active_jobs(snapshot), *signs.pending_jobs(snapshot))
    living = {_number(job) for job in every if not {_number(job), job.raw_id, job.job_id} & cancelled}
    return max(living, key=lambda number: (len(number), number), default=None)


@dataclass(frozen=True)
class Outcome:
    """What came of a change: the new jobs, and what could not be done, in words (empty: all was done)."""

    submitted: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def relaunch_of(job: LaunchJob, change: Repair) -> LaunchJob | None:
    """The launch that puts new attempts in the place of the cancelled ones; None where there is nothing to launch."""
    if not change.resubmit:
        return None
    request = replace(job.request, after=change.after, replaces=change.cancelled)
    return replace(job, array=job.array or parse_array(f"1-{change.resubmit}"), request=request)


def carry_out(
    job: LaunchJob, change: Repair, view: LaunchView | None, plan_again: Callable[[], Repair], why: str
) -> Outcome:
    """Launch what is to be launched, then do the steps, all under the launch lock and in the journal.

    `view` is the launch that was shown. Nothing is done where the queue is not as it was planned for any more
    (`plan_again`), nor where the launch is refused. What is cancelled has its successor in the queue by then, which
    waits for it. Raises LaunchBusy, SchedulerError and OSError as a launch does.
    """
    journal = Journal(job.directory.journal)
    records: tuple[Submission, ...] = ()
    with launch_lock(job.directory.launch_lock):
        found = plan_again()
        if (found.steps, found.resubmit, found.after) != (change.steps, change.resubmit, change.after):
            return Outcome(failed=("the queue has changed meanwhile, and nothing was done: look again",))
        again = relaunch_of(job, change)
        if again is not None and view is not None:
            checked, records = carry_out_locked(again, view, why or change.kind)
            if not records:
                return Outcome(failed=tuple(str(check) for check in checked.faults))
        submitted = tuple(str(record.job_id) for record in records)
        failed = []
        for step in change.steps:
            data = {"action": step.action, "job_id": step.job, "why": step.why, "submitted": list(submitted)}
            refused = _cancel(step.job, job.scheduler) if step.action == "cancel" else _release(step.job, job)
            if refused:
                failed.append(f"{step.action} {step.job}: {refused}")
            else:
                journal.write(change.kind, why or step.why, data, job.user)
    return Outcome(submitted, tuple(failed))


def _cancel(number: str, scheduler: Scheduler) -> str:
    try:
        scheduler.cancel(number)
    except SchedulerError as error:
        return str(error)
    return ""


def _release(number: str, job: LaunchJob) -> str:
    return "; ".join(why for _, why in release(job.directory, [number], job.scheduler).refused)


def _number(job: Job) -> str:
    return job.array_id or job.raw_id
