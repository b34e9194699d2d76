"""What repairs a run's queue: one plan, from a snapshot, for `tr11 launch --repair`, `--replace`
and the watchdog.

Dead jobs and allocations without a batch host are cancelled and launched again, and that host is
excluded; what tr11 held is released; all else is left alone, and said. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.cluster.arrays import array_number, covers, names_of
from tr11ops.cluster.base import Job
from tr11ops.cluster.pending_reasons import Cause, HeldBy, Wait, is_held, reason_of_job
from tr11ops.observe import derived
from tr11ops.observe.jobs import HeldJobs, held_jobs, way_out
from tr11ops.observe.liveness import (
    batch_host,
    gone_host,
    has_lost_its_host,
    is_zombie,
    liveness_outside,
    seconds_to_wait,
)
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.held_jobs import can_modify
from tr11ops.rundir.exclusion import ExclusionLimit
from trainer.contract.record import Record


class RepairStep(Record):
    """One thing to do to what `job` names, in the order of the plan; `jobs` are the jobs, or parts,
    that it changes.

    `exclude` keeps `node`, which `job` died of, out of the run.
    """

    action: Literal["exclude", "cancel", "release"]
    job: str
    why: str
    jobs: tuple[Job, ...] = ()
    node: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.node or self.job}: {self.why}"


class Repair(Record):
    """What will be done. `resubmit` attempts are launched behind `after` (None: at once), then come
    the steps.

    `left_alone` says what is wrong but not ours to repair; `read_errors` what could not be seen,
    and `refusals` why it must not be done: each forbids any step. `taken_over`: names of what tr11
    held and another holds now, and the reason. `limit`: how many nodes may be excluded. `finished_at`:
    the last iteration of a training that is finished; `starts`: what to type where nothing runs and
    nothing is queued; `launch`: what queues more.
    """

    steps: tuple[RepairStep, ...] = ()
    resubmit: int = 0
    after: str | None = None
    left_alone: tuple[str, ...] = ()
    read_errors: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    kind: Literal["repaired", "replaced"] = "repaired"  # the journal's word for each step
    taken_over: tuple[tuple[str, str], ...] = ()
    limit: ExclusionLimit | None = None
    finished_at: int | None = None
    starts: tuple[str, ...] = ()
    launch: str = ""

    @property
    def cancelled(self) -> tuple[str, ...]:
        return tuple(step.job for step in self.steps if step.action == "cancel")

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.resubmit

    def is_as(self, other: Repair) -> bool:
        """Whether both would do the same to the same jobs; why these wait, and since when, changes
        by itself.
        """
        return self._acts() == other._acts()

    def _acts(self) -> tuple[object, ...]:
        steps = [
            (step.action, step.job, step.node, [job.job_id for job in step.jobs])
            for step in self.steps
        ]
        return steps, self.resubmit, self.after


def plan_repair(
    snapshot: Snapshot,
    held: Iterable[str],
    switch: str = "",
    is_automatic: bool = False,
    user: str | None = None,
    refused: Mapping[str, str] | None = None,
    limit: ExclusionLimit | None = None,
) -> Repair:
    """What repairs the queue as it is seen. `held`: the names of what tr11 has held, and may
    release.

    `refused`: held jobs that the trainer would refuse, by `job_id`, and why: they stay held.

    `is_automatic`: no person agrees to the plan, so that what an administrator holds stays held,
    and what is left over of a finished training is not cancelled. `user`: who does it; what is not
    theirs to change is left alone (None: the caller judges each step). `limit`: how many nodes may
    be excluded (None: the caller judges that too).

    The batch host of a job that is given up is excluded where two facts speak against it: the
    scheduler says at this moment that it is gone, and no trainer of the job shows life.

    While a stop switch is set (`switch` names it), what is held stays so. Dead jobs are cancelled
    and launched again, behind what can still start or end, never behind what is dead itself. What
    tr11 holds of a training that is finished is never released.
    """
    if unseen := _unseen(snapshot):
        return Repair(read_errors=(unseen,))
    others = derived.other_variants(snapshot)  # repaired with a card of their own
    active = tuple(job for job in snapshot.active_jobs if job.job_id not in others)
    pending = tuple(job for job in snapshot.pending_jobs if job.job_id not in others)
    lost = [job for job in active if is_zombie(snapshot, job)]
    dead = [job for job in pending if derived.is_dead(job)]

    def may(job: Job) -> bool:
        return user is None or can_modify(job, user)

    gone = {job.job_id for job in lost}
    never = {job.job_id for job in dead}
    every = (*snapshot.active_jobs, *snapshot.pending_jobs)
    holds = held_jobs(pending, held, is_automatic)
    bad = tuple(_lost_hosts(snapshot, filter(may, lost)))
    listed = {entry.node for entry in known(snapshot.exclusions, ())}
    too_many = limit is not None and limit.forbids((step.node for step in bad), listed)
    steps = [] if too_many else [*bad]
    steps += [
        RepairStep(
            "cancel",
            job.job_id,
            f"its batch host {batch_host(snapshot, job)} is lost, nothing ends it",
            (job,),
        )
        for job in lost
        if may(job)
    ]
    rest = {job.array_id for job in every if job.job_id not in never}
    mine = [job for job in dead if may(job)]
    steps += _cancel_steps(mine, rest, "it can never start: {reason}")
    finished = derived.finished_at(snapshot)
    over = [job for job in holds.ours if derived.is_left_over(job, finished) and may(job)]
    kept = {*(job.job_id for job in over), *(refused or {})}
    free = [job for job in holds.ours if job.job_id not in kept and may(job)]
    if not is_automatic:
        steps += _named_steps(
            "cancel", over, holds, "the training is finished, nothing is left for it"
        )
    if not switch:
        steps += _named_steps(
            "release", free, holds, "tr11 held it after a fault; it goes on as before"
        )
    return Repair(
        tuple(steps),
        0 if derived.is_finished(snapshot) else derived.queued_tasks(tuple(mine)),
        _last(job for job in every if job.job_id not in gone | never)
        or (lost[-1].raw_id if lost else None),
        (
            *(
                f"job {job} trains variant {name} of this run: repair it with that card"
                for job, name in others.items()
            ),
            *_of_others(job for job in (*lost, *dead, *holds.ours) if not may(job)),
            *(_not_excluded(step.node, limit) for step in bad if too_many),
            *_left_alone(snapshot, active, pending=pending, holds=holds, switch=switch),
            *(
                f"job {job} stays held, the trainer would refuse it: {why}; then `tr11 launch --replace`"
                for job, why in (refused or {}).items()
            ),
        ),
        taken_over=tuple(_taken_over(holds)),
        limit=limit,
        finished_at=derived.iteration(snapshot) if derived.is_finished(snapshot) else None,
        launch=derived.launch_more(snapshot),
        starts=() if every or liveness_outside(snapshot) else derived.train_on(snapshot),
    )


def _unseen(snapshot: Snapshot) -> str:
    """Why nothing of the queue is known; "" where it was seen."""
    if isinstance(snapshot.jobs, Unknown):
        return f"jobs: {snapshot.jobs.why}"
    return snapshot.unmounted


def _lost_hosts(snapshot: Snapshot, lost: Iterable[Job]) -> Iterator[RepairStep]:
    """The exclusion of each batch host that a job was lost by, and that is gone now; not where it is
    on the list, or where what is on it is not known.
    """
    if isinstance(snapshot.exclusions, Unknown):
        return
    listed = {entry.node for entry in snapshot.exclusions}
    for job in lost:
        host = gone_host(snapshot, job)
        if host and host not in listed:
            why = f"lost as the batch host of job {job.job_id}"
            yield RepairStep("exclude", job.job_id, why, (job,), node=host)


def _not_excluded(node: str, limit: ExclusionLimit | None) -> str:
    return f"{node} is not excluded, though it is lost: {limit}; it gets no work while it is lost"


def plan_replacement(snapshot: Snapshot, user: str) -> Repair:
    """Every queued attempt of the run cancelled, and as many launched behind the one that lives.

    What a chain of self-submitting jobs has still to queue counts too.
    """
    if unseen := _unseen(snapshot):
        return Repair(read_errors=(unseen,))
    others = derived.other_variants(snapshot)
    active = snapshot.active_jobs
    queued = tuple(job for job in snapshot.pending_jobs if job.job_id not in others)
    staying = (*active, *(job for job in snapshot.pending_jobs if job.job_id in others))
    foreign = [job for job in queued if not can_modify(job, user)]
    refusals = [f"job {job.job_id} is {job.user}'s, who alone can cancel it" for job in foreign]
    if not queued:
        behind = ""
        if active:
            behind = f" --after {array_number(active[-1])}"
        refusals.append(
            f"no attempt of this run is queued: `tr11 launch{behind}` queues the card as it is now"
        )
    steps = _cancel_steps(queued, {job.array_id for job in active}, "the new card takes its place")
    tasks = derived.queued_tasks(queued) + derived.tasks_to_come(snapshot)
    return Repair(tuple(steps), tasks, _last(staying), refusals=tuple(refusals), kind="replaced")


def _cancel_steps(jobs: Iterable[Job], living: set[str | None], why: str) -> list[RepairStep]:
    """One step for each name: of an array of which another task runs or waits, only these tasks are
    cancelled.
    """
    named: dict[str, list[Job]] = {}
    for job in jobs:
        is_part = job.array_id is not None and job.array_id in living
        named.setdefault(job.job_id if is_part else array_number(job), []).append(job)
    return [
        RepairStep("cancel", name, why.format(reason=found[0].reason), tuple(found))
        for name, found in named.items()
    ]


def _named_steps(
    action: Literal["cancel", "release"], jobs: Iterable[Job], holds: HeldJobs, why: str
) -> Iterator[RepairStep]:
    """One step for each name of these held jobs, that names none of the other held ones."""
    chosen = tuple(jobs)
    rest = [job for job in (*holds.ours, *holds.others) if job not in chosen]
    return (RepairStep(action, name, why, _meant(name, chosen)) for name in names_of(chosen, rest))


def _of_others(jobs: Iterable[Job]) -> Iterator[str]:
    for job in jobs:
        yield f"job {job.job_id} is {job.user}'s, who alone can repair it: `tr11 launch --repair`, typed by {job.user}"


def _meant(name: str, jobs: Iterable[Job]) -> tuple[Job, ...]:
    return tuple(job for job in jobs if covers(name, job))


def _taken_over(holds: HeldJobs) -> Iterator[tuple[str, str]]:
    rest = [job for job in (*holds.ours, *holds.others) if job not in holds.taken_over]
    for name in names_of(holds.taken_over, rest):
        yield name, _meant(name, holds.taken_over)[0].reason


def _last(jobs: Iterable[Job]) -> str | None:
    """The number of the job that stands last in the line."""
    return max(map(array_number, jobs), key=lambda number: (len(number), number), default=None)


def _left_alone(
    snapshot: Snapshot,
    active: tuple[Job, ...],
    pending: tuple[Job, ...],
    holds: HeldJobs,
    switch: str,
) -> Iterator[str]:
    for job in active:
        if has_lost_its_host(snapshot, job) and not is_zombie(snapshot, job):
            wait = seconds_to_wait(snapshot, job)
            host = batch_host(snapshot, job)
            yield f"job {job.job_id} has lost its batch host {host}, but was alive: look again in {duration(wait)}"
    sure = derived.sure_jobs(snapshot)
    for job in pending:
        row = reason_of_job(job)
        number = array_number(job)
        if row.wait is Wait.PASSES and job not in sure:
            yield f"job {number} cannot start as things are: {derived.why_not_starting(snapshot, job)}"
        elif row.wait is Wait.SITE:
            yield f"job {number} waits for the site ({job.reason}): it starts by itself when the site is done"
        elif row.wait is Wait.PERSON and row.cause is not Cause.HOLD:
            yield f"job {number} waits for a person ({job.reason}): {way_out(job)}"
        elif switch and is_held(job):
            yield f"job {number} stays held: {switch} is set, which `tr11 resume` takes away"
    for name in () if switch else names_of(holds.others, holds.ours):
        job = _meant(name, holds.others)[0]
        row = reason_of_job(job)
        if row.held_by in {HeldBy.ADMINISTRATOR, HeldBy.SCHEDULER}:
            yield f"job {name} is held by {row.held_by} ({job.reason}), not by tr11: `scontrol release {name}`"
        else:
            yield f"job {name} was not held by tr11 ({job.reason}): `scontrol release {name}` by its owner"
