"""Mending a run's queue: what can never start, what tr11 itself has held, and an allocation without its batch script.

`plan_repair` decides from a snapshot; `carry_out` does it through the scheduler and writes it to the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tr11ops.cluster.base import Job, Scheduler, SchedulerError
from tr11ops.detect import signs
from tr11ops.detect.zombie import batch_host, has_lost_its_host, is_zombie, seconds_to_wait
from tr11ops.holds import release
from tr11ops.journal import Journal
from tr11ops.rundir import RunDirectory
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
    """What will be done. `resubmit` attempts are then launched anew, behind `after` (None: at once).

    `left_alone` says what is wrong but not ours to mend; `doubts` what could not be seen, and forbids any step.
    """

    steps: tuple[Step, ...] = ()
    resubmit: int = 0
    after: str | None = None
    left_alone: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

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
    steps += [Step("cancel", _dead_part(job, living), f"it can never start: {job.reason}") for job in dead]
    for job in signs.pending_jobs(snapshot):
        if not signs.is_held(job):
            continue
        number = _number(job)
        if switch:
            alone.append(f"job {number} stays held: {switch} is set, which `tr11 resume` takes away")
        elif number not in ours or not job.reason.startswith("JobHeldUser"):
            alone.append(f"job {number} was not held by tr11 ({job.reason}): `scontrol release {number}` by its owner")
        else:
            steps.append(Step("release", number, "tr11 held it after a fault; it goes on as before"))
    lost = 0 if signs.is_finished(snapshot) else signs.queued_tasks(tuple(dead))
    cancelled = {step.job for step in steps if step.action == "cancel"}
    return Repair(tuple(steps), lost, _last(snapshot, cancelled), tuple(alone))


def _dead_part(job: Job, living: set[str | None]) -> str:
    """What to cancel of a dead job: an array of which another task runs or waits must not be cancelled as a whole."""
    return job.job_id if job.array_id is not None and job.array_id in living else _number(job)


def _last(snapshot: Snapshot, cancelled: set[str]) -> str | None:
    """The number of the job that stands last in the line, once the cancelled ones are gone."""
    every = (*signs.active_jobs(snapshot), *signs.pending_jobs(snapshot))
    living = {_number(job) for job in every if not {_number(job), job.raw_id} & cancelled}
    return max(living, key=lambda number: (len(number), number), default=None)


def carry_out(repair: Repair, scheduler: Scheduler, directory: RunDirectory, user: str, why: str) -> tuple[str, ...]:
    """Do the steps, each one noted; returns what could not be done, in words. Raises OSError for the journal."""
    journal = Journal(directory.journal)
    failed = []
    for step in repair.steps:
        refused = _cancel(step.job, scheduler) if step.action == "cancel" else _release(step.job, scheduler, directory)
        if refused:
            failed.append(f"{step.action} {step.job}: {refused}")
            continue
        journal.write("repaired", why or step.why, {"action": step.action, "job_id": step.job, "why": step.why}, user)
    return tuple(failed)


def _cancel(number: str, scheduler: Scheduler) -> str:
    try:
        scheduler.cancel(number)
    except SchedulerError as error:
        return str(error)
    return ""


def _release(number: str, scheduler: Scheduler, directory: RunDirectory) -> str:
    return "; ".join(why for _, why in release(directory, [number], scheduler).refused)


def _number(job: Job) -> str:
    return job.array_id or job.raw_id
