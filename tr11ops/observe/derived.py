"""What a snapshot means before any judgement: which jobs count, the pace, the remaining work.

Pure functions over a Snapshot, shared by the detectors, the verdict and the status screen.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from tr11ops.base.invocation import command_for
from tr11ops.base.observed import Unknown, known
from tr11ops.base.robust import usual_step_seconds
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job
from tr11ops.cluster.pending_reasons import PARTITION_CLOSED, JobReason, Wait, reason_of_job
from tr11ops.observe.jobs import is_shut, misplaced, too_few_usable
from tr11ops.observe.observations import LaunchEnd, TrainingEvent
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot, Step, newest_attempt
from tr11ops.rundir.paths import FIRST_LAUNCH, parse_comment
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.metrics_record import MeasuredStep

if TYPE_CHECKING:
    from tr11ops.runcard.exit_duration import ExitPlan

MINUTE = 60.0
HOUR = 3600.0
DAY = 86400.0

ROLL_BACK = "roll-back"  # the note that a trainer or `tr11 rollback` leaves beside the steps
ROLL_BACK_EVENTS = frozenset({ROLL_BACK, "roll-back-undone"})
# from the end marker, or from COMPLETING, to the end of the allocation
LEAVING_SECONDS = 15 * MINUTE
# from a kill switch to an answer of the scheduler that shows the holds of what is queued
HOLDING_SECONDS = 20.0


# ----------------------------------------------------------------------------- jobs
def stop_of(snapshot: Snapshot) -> KillSwitch | Unknown | None:
    """What keeps the run from going on because someone wants so: the kill switch, else a pause;
    None for neither.
    """
    switch = snapshot.kill_switch
    if switch is not None:
        return switch
    return snapshot.pause


def other_variants(snapshot: Snapshot) -> dict[str, str]:
    """Jobs of this run that train another variant than the one looked at, by their submissions: job
    id -> variant.
    """
    entries = [
        entry
        for entry in known(snapshot.submissions, ())
        if entry.variant not in {"", snapshot.run.variant}
    ]
    if not entries:
        return {}
    variants = {
        name: entry.variant for entry in entries for name in (entry.tag, entry.job_id) if name
    }
    found = {}
    for job in (*snapshot.active_jobs, *snapshot.pending_jobs):
        mark = parse_comment(job.comment)
        names = (mark[0],) if mark is not None else (job.raw_id, array_number(job))
        variant = next((variants[name] for name in names if name in variants), "")
        if variant:
            found[job.job_id] = variant
    return found


def label_of(snapshot: Snapshot, job_id: str) -> str:
    """The name that people know an attempt by; the scheduler's own number where none is on record."""
    for attempt in known(snapshot.attempts, ()):
        if attempt.job_id == job_id:
            return attempt.label or job_id
    return job_id


def checkpoint_label(snapshot: Snapshot, step: int) -> str:
    """A checkpoint as people know it: of another trainer by its own name, else as the run's folder."""
    standing = snapshot.run.standing
    if standing is None:
        return checkpoint_name(step)
    return standing.name_of(step)


def is_dead(job: Job) -> bool:
    """True when a pending job can never start as it stands."""
    return reason_of_job(job).wait is Wait.NEVER


def startable_jobs(snapshot: Snapshot) -> tuple[Job, ...]:
    """Pending jobs that will start without a person of the run: by themselves, or when site or
    nodes let them.
    """
    return _waiting_for(snapshot, Wait.PASSES, Wait.NODES, Wait.SITE)


def sure_jobs(snapshot: Snapshot) -> tuple[Job, ...]:
    """Pending jobs that start by themselves, whatever the site and people do: they cover what is
    left to train.
    """
    return _waiting_for(snapshot, Wait.PASSES)


def some_wait_for_site(snapshot: Snapshot) -> bool:
    """Whether queued work starts when the site is done: more of it, launched now, would meet the
    same.
    """
    return bool(_waiting_for(snapshot, Wait.SITE))


def some_wait_for_nodes(snapshot: Snapshot) -> bool:
    """Whether too few nodes can be used for queued work: more of it, launched now, would meet the
    same.
    """
    return bool(_waiting_for(snapshot, Wait.NODES))


def why_not_starting(snapshot: Snapshot, job: Job) -> str:
    """Why a pending job that is none of `sure_jobs` does not start by itself, in words."""
    row = reason_of_job(job)
    if row.wait is not Wait.PASSES:
        if job.reason:
            return f"{row.meaning} ({job.reason})"
        return row.meaning
    shut = PARTITION_CLOSED.meaning if is_shut(snapshot, job) else ""
    return (
        misplaced(snapshot, job)
        or shut
        or too_few_usable(snapshot, job)
        or "it waits for a job that cannot start"
    )


def closed_by_site(snapshot: Snapshot) -> JobReason | None:
    """Why nothing of the run can start before the site lets it; None where something runs, or may
    start by itself.
    """
    if snapshot.active_jobs or _waiting_for(snapshot, Wait.PASSES):
        return None
    return next((site_reason(job) for job in _waiting_for(snapshot, Wait.SITE)), None)


def site_reason(job: Job) -> JobReason:
    """Why a job that only the site lets start waits: its own reason, or that its partition starts
    nothing.
    """
    row = reason_of_job(job)
    if row.wait is Wait.SITE:
        return row
    return PARTITION_CLOSED


def is_idle(snapshot: Snapshot) -> bool:
    """Nothing runs, nothing will start by itself or by the site, and no one has stopped the run."""
    return not snapshot.active_jobs and not startable_jobs(snapshot) and stop_of(snapshot) is None


def _waiting_for(snapshot: Snapshot, *waits: Wait) -> tuple[Job, ...]:
    """Pending jobs by what ends their wait; one that is queued behind another waits for what that
    one waits for.
    """
    # thousands may share a few reasons and places: each is looked at once
    waiting = snapshot.pending_jobs
    kinds = {kind_of_wait(job): job for job in waiting}
    judged = {kind: _wait_of(snapshot, job) for kind, job in kinds.items()}
    if set(judged.values()) <= {Wait.PASSES}:
        if Wait.PASSES in waits:
            return waiting
        return ()
    own = [(job, judged[kind_of_wait(job)]) for job in waiting]
    stuck = {
        number: wait
        for job, wait in own
        if wait is not Wait.PASSES
        for number in (job.array_id or "", job.raw_id)
    }
    behind = [job for job, wait in own if wait is Wait.PASSES and job.dependency]
    inherited: dict[str, Wait] = {}
    fresh = True
    while fresh:
        found = {
            job.raw_id: stuck[number]
            for job in behind
            if job.raw_id not in inherited
            for number in awaited_by(job)
            if number in stuck
        }
        inherited |= found
        stuck |= found
        fresh = bool(found)
    return tuple(
        job
        for job, wait in own
        if (wait if wait is not Wait.PASSES else inherited.get(job.raw_id, wait)) in waits
    )


def kind_of_wait(job: Job) -> tuple[object, ...]:
    """What a job's wait is judged by: equal for thousands."""
    return (
        job.reason,
        job.priority == 0,
        job.partition,
        job.node_count,
        job.gpus_per_node,
        job.excluded,
    )


def _wait_of(snapshot: Snapshot, job: Job) -> Wait:
    """What ends the wait of a job: what the scheduler says, and the place in which it is queued, as
    that is now.
    """
    wait = reason_of_job(job).wait
    if wait is Wait.PASSES and misplaced(snapshot, job):
        return Wait.PERSON
    if wait is Wait.PASSES and is_shut(snapshot, job):
        return Wait.SITE
    if wait is Wait.PASSES and too_few_usable(snapshot, job):
        return Wait.NODES
    return wait


def first_in_line(queued: tuple[Job, ...]) -> tuple[Job, ...]:
    """Those of these queued jobs that wait for no other of them."""
    numbers = {number for job in queued for number in (job.array_id or "", job.raw_id)}
    return tuple(job for job in queued if numbers.isdisjoint(awaited_by(job))) or queued


def awaited_by(job: Job) -> tuple[str, ...]:
    """The numbers of the jobs after which a job may start."""
    return tuple(re.findall(r"\d+", job.dependency))


def queued_tasks(jobs: tuple[Job, ...]) -> int:
    return sum(max(1, len(job.pending_tasks)) for job in jobs)


def last_of_queue(snapshot: Snapshot) -> str:
    """The number of the newest job or array that runs or will start; "" where there is none."""
    jobs = (*snapshot.active_jobs, *startable_jobs(snapshot))
    newest = max(jobs, key=lambda job: int(job.raw_id) if job.raw_id.isdigit() else 0, default=None)
    if newest is None:
        return ""
    return array_number(newest)


def launch_ends(snapshot: Snapshot, names: Container[str]) -> list[LaunchEnd]:
    """How the launches of a job ended that bears one of these names, the oldest first."""
    return [end for end in known(snapshot.training.launch_ends, ()) if end.job_id in names]


def launch_again(snapshot: Snapshot) -> str:
    """The launch that was last typed, as words of a command; an array where none is on record."""
    newest = next(iter(known(snapshot.submissions, ())), None)
    if newest is None:
        return FIRST_LAUNCH
    return newest.launch_words


def launch_more(snapshot: Snapshot) -> str:
    """The command that queues as many tasks as were queued last behind what runs and waits."""
    after = last_of_queue(snapshot)
    return command(snapshot, launch_again(snapshot) + (f" --after {after}" if after else ""))


def go_on(snapshot: Snapshot, behind: bool = False) -> tuple[str, ...]:
    """What lets a run train again that a kill switch has stopped: what is queued, or, where nothing
    is, a launch; `behind` what leaves still, else for when that has ended.
    """
    resume = command(snapshot, "resume")
    if snapshot.pending_jobs:
        return (resume,)
    if behind:
        return resume, launch_more(snapshot)
    return resume, command(snapshot, launch_again(snapshot))


def train_on(snapshot: Snapshot) -> tuple[str, ...]:
    """What lets a run train on as things are: its holds and switches are taken away where there are
    any, and it is launched where nothing is queued.
    """
    if snapshot.pending_jobs or stop_of(snapshot) is not None:
        return go_on(snapshot)
    return (command(snapshot, launch_again(snapshot)),)


def tasks_to_come(snapshot: Snapshot) -> int:
    """Attempts that a chain of self-submitting jobs has still to queue, beyond what the queue
    shows.
    """
    living = {array_number(job) for job in (*snapshot.active_jobs, *startable_jobs(snapshot))}
    own = [
        entry
        for entry in known(snapshot.submissions, ())
        if entry.job_id in living and entry.chain == "self"
    ]
    return min((entry.left for entry in own), default=0)


def first_submission(snapshot: Snapshot) -> float | None:
    """When the run was first submitted; None where no submission is on record."""
    return min((entry.time for entry in known(snapshot.submissions, ())), default=None)


def identifiers(job: Job) -> frozenset[str]:
    """Every id under which the run directory may know a started job."""
    return frozenset({job.job_id, job.raw_id})


def identifiers_of(jobs: Iterable[Job]) -> frozenset[str]:
    """The same of several jobs together."""
    return frozenset(name for job in jobs for name in identifiers(job))


# ----------------------------------------------------------------------------- attempts
def last_attempt(snapshot: Snapshot) -> Attempt | None:
    return newest_attempt(known(snapshot.attempts, ()))


def marker_of(snapshot: Snapshot, names: frozenset[str]) -> EndMarker | None:
    """The end marker of the attempt with one of these ids, where it has one that can be read."""
    for attempt in known(snapshot.attempts, ()):
        if attempt.job_id in names and isinstance(attempt.end, EndMarker):
            return attempt.end
    return None


def last_marker(snapshot: Snapshot) -> EndMarker | None:
    """The newest end marker of all."""
    return newest_marker(known(snapshot.attempts, ()))


def newest_marker(attempts: Iterable[Attempt]) -> EndMarker | None:
    """The newest end marker of these attempts."""
    markers = [attempt.end for attempt in attempts if isinstance(attempt.end, EndMarker)]
    return max(markers, key=lambda marker: marker.time, default=None)


def was_refused(snapshot: Snapshot) -> bool:
    """Whether the trainer refused the input of the last attempt, which another try would meet
    again.
    """
    newest, marker = last_attempt(snapshot), last_marker(snapshot)
    if newest is None or marker is None or newest.end != marker:
        return False
    return marker.reason == "refused" and marker.launch > 0


# ----------------------------------------------------------------------------- progress
def iteration(snapshot: Snapshot) -> int | None:
    """The last finished iteration. After a roll-back this is less than the largest one ever seen,
    as it must be.
    """
    steps = known(snapshot.steps, ())
    if steps:
        return steps[-1].record.iteration
    marker = last_marker(snapshot)
    if marker is not None:
        return marker.iteration
    return None


def is_rolled_back(snapshot: Snapshot) -> bool:
    """Whether the run has gone back since its last step, by a person or the trainer: what that step
    showed is over.
    """
    newest = next(iter(known(snapshot.steps, ())[-1:]), None)
    if newest is None or newest.time is None:
        return False
    return is_rolled_back_since(newest.time, known(snapshot.training.events, ()))


def is_rolled_back_since(moment: float, events: Iterable[TrainingEvent]) -> bool:
    """Whether the last of the trainer's notes on going back, not before `moment`, is of a roll-back
    and not of its undoing.
    """
    turns = [event for event in events if event.kind in ROLL_BACK_EVENTS and event.time >= moment]
    return bool(turns) and max(turns, key=attrgetter("time")).kind == ROLL_BACK


def standing_rollbacks(snapshot: Snapshot) -> tuple[TrainingEvent, ...]:
    """The notes of the roll-backs that were not undone, oldest first, as far as the log's end
    reaches.
    """
    standing: list[TrainingEvent] = []
    for event in known(snapshot.training.events, ()):
        if event.kind == ROLL_BACK:
            standing.append(event)
        elif event.kind in ROLL_BACK_EVENTS and standing:
            standing.pop()  # an undo takes back the last one
    return tuple(standing)


def total_iterations(snapshot: Snapshot) -> int | None:
    """Iterations of the whole training: the running trainer's own count before the card's; None
    where neither says it.
    """
    steps = known(snapshot.steps, ())
    told = [step.record.total_iterations for step in steps[-1:]]
    return next(filter(None, told), snapshot.run.total_iterations)


def seconds_per_iteration(snapshot: Snapshot) -> float | None:
    """The usual time of a recent step; None without one."""
    return pace_of(known(snapshot.steps, ()))


def newest_loss(steps: Sequence[Step]) -> Step | None:
    """The last of these steps that tells a loss, be it a number or not; None where none does."""
    return next((step for step in reversed(steps) if step.record.lm_loss is not None), None)


def pace_of(steps: Sequence[Step]) -> float | None:
    """The usual time of one of these steps, in seconds: as their trainer tells it, else by the times
    at which they were logged.
    """
    told = usual_step_seconds(step.record.seconds_per_iteration for step in steps)
    if told is not None:
        return told
    return usual_step_seconds(_seconds_between(steps))


def _seconds_between(steps: Sequence[Step]) -> Iterator[float]:
    """What an iteration took from each line of a job to its next."""
    for before, after in pairwise(steps):
        done = after.record.iteration - before.record.iteration
        if done <= 0 or before.job_id != after.job_id:
            continue
        if before.time is not None and after.time is not None:
            yield (after.time - before.time) / done


def restarts(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Indices of the first lines after a restart or a roll-back: of another attempt, or of an
    iteration done before.
    """
    return tuple(
        index
        for index in range(1, len(steps))
        if steps[index].job_id != steps[index - 1].job_id
        or steps[index].record.iteration <= steps[index - 1].record.iteration
    )


def comparable(snapshot: Snapshot) -> tuple[Step, ...]:
    """The newest lines that one launch wrote at one batch size and one sequence length, oldest
    first.
    """
    steps = known(snapshot.steps, ())
    if not steps:
        return ()
    begins = (0, *restarts(steps))
    own = steps[begins[-1] :]
    last = own[-1].record
    began = max(
        (
            span.began
            for span in known(snapshot.training.phases, ())
            if span.job_id == own[-1].job_id and span.phase == "loading"
        ),
        default=None,
    )
    return tuple(reversed(list(_alike(own, last, began))))


def _alike(steps: tuple[Step, ...], last: MeasuredStep, began: float | None) -> Iterator[Step]:
    for step in reversed(steps):
        record = step.record
        if (
            record.global_batch_size != last.global_batch_size
            or record.curriculum_length != last.curriculum_length
        ):
            return
        if began is not None and step.time is not None and step.time < began:
            return
        yield step


def is_finished(snapshot: Snapshot) -> bool:
    return finished_at(snapshot) is not None


def finished_at(snapshot: Snapshot) -> float | None:
    events = known(snapshot.training.events, ())
    return finish_time(last_marker(snapshot), iteration(snapshot), events)


def is_cancelled_by_owner(snapshot: Snapshot) -> bool:
    """Whether a job that is only watched was cancelled: whoever may do that meant it."""
    marker = last_marker(snapshot)
    return snapshot.run.is_watched and marker is not None and marker.reason == "signal"


def finish_time(
    marker: EndMarker | None, done: int | None, events: Iterable[TrainingEvent]
) -> float | None:
    """When the training was finished, by its newest end marker; None where it is not, was taken up
    again since, or has gone back. `events`: what the trainer noted beside its steps.
    """
    if marker is None or marker.reason != "finished":
        return None
    if done is not None and done > marker.iteration:
        return None
    if is_rolled_back_since(marker.time, events):
        return None
    return marker.time


def is_left_over(job: Job, finished: float | None) -> bool:
    """Whether a queued job has nothing left to do: the training was finished (then) after the job
    was submitted.
    """
    return finished is not None and (job.submit_time is None or job.submit_time <= finished)


def exit_plan_of(snapshot: Snapshot, job: Job) -> ExitPlan | None:
    """When an attempt of this job leaves by the card that it was launched with; by the present card
    where that one is not known.
    """
    launched, mark, own = snapshot.run.launched, parse_comment(job.comment), None
    if job.state.is_active:
        own = launched.get(job.raw_id)
    if own is None and mark is not None:
        own = launched.get(mark[0])
    if own is None:
        return snapshot.run.exit_plan
    return own


def task_seconds(snapshot: Snapshot, job: Job) -> float | None:
    """How long one task of this job trains, by its own card and the limit that it has now."""
    plan = exit_plan_of(snapshot, job)
    if plan is not None:
        return plan.seconds_within(job.time_limit_seconds)
    if job.time_limit_seconds is None:
        return None
    return float(job.time_limit_seconds)


def leaves_at(snapshot: Snapshot, job: Job) -> float | None:
    """When a running job ends its training by the clock, as its limit is now, in seconds since the
    epoch; None where that is not known.
    """
    whole = task_seconds(snapshot, job)
    if whole is None or job.start_time is None:
        return None
    return job.start_time + whole


# ----------------------------------------------------------------------------- what a person types
def command(snapshot: Snapshot, words: str) -> str:
    """A command of tr11 for this very run, as a person would type it: `tr11 launch --run CARD
    --array 1-10`.
    """
    return command_for(snapshot.run.card, words)


def scheduler_command(snapshot: Snapshot, program: str, job: Job) -> str:
    """`scancel ID`, `scontrol release ID` and the like; "" where the scheduler is not Slurm."""
    if snapshot.scheduler == "slurm":
        return f"{program} {job.job_id.split('_[')[0]}"
    return ""
