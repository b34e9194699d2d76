"""How quick the training is now, and what comes next: its end as a range, the next checkpoint. Pure.

The earliest end is all that is left at the speed of now. The likely one is longer by what the last
weeks were longer than their steps: saves, evaluations, restarts, waits and what was done twice are
in it, without anyone having to know them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC
from operator import attrgetter
from statistics import median

from tr11ops.base.observed import Unknown, known
from tr11ops.base.robust import is_step_time
from tr11ops.base.units import timestamp
from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job, JobState
from tr11ops.observe import derived
from tr11ops.observe.liveness import (
    ENDED_PHASE,
    batch_host,
    has_lost_its_host,
    is_leaving,
    launch_began,
    launch_trained_since,
    liveness_of,
    liveness_outside,
    silent_host,
)
from tr11ops.observe.snapshot import EqualSteps, Snapshot, Step, fits, steps_left, weight_at, work
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

WINDOW_SECONDS = 30 * derived.DAY  # how far back the likely pace looks
LEAST_WINDOW_SECONDS = 2 * derived.HOUR  # less says nothing about weeks
LAST_LINES = 3
LAST_SECONDS = 30.0  # at least: three quick lines are a hiccup
MOST_LAST_LINES = 100
HISTORY_LINES = 100
LEAST_HISTORY = 20  # lines of the same launch before its usual speed is known
FLOPS, SAMPLES = "TFLOPs", "samples/s"
OTHER_SPEED = 1.25  # times as long as usual: what a step takes longer is told
LATE_SECONDS = 15 * 60.0  # nothing trains for so long: the queue does not go on without a gap


class ForecastEnd(Record):
    """When the training will be done, in seconds from the look.

    `earliest`: at the speed of now, nothing in between. `likely`: as the `window` seconds before the
    last step went, None where too little is known of them. `share` of that time went into steps
    that count (0..1). `usual`: the earliest at the usual speed; None where it is not clearly slower now.
    """

    earliest: float
    likely: float | None = None
    window: float | None = None
    share: float | None = None
    usual: float | None = None


class NextCheckpoint(Record):
    """The next save that is due: after `step` iterations (None where the clock says when), in
    `seconds`.

    `seconds` is None before the first steps have shown a pace: it is `iterations` away then. `why`
    is "interval", "minutes" or "end of the task".
    """

    step: int | None
    seconds: float | None
    why: str
    iterations: int | None = None


SLOW_PERCENT = 95.0  # of the best: the speed is told as slow below it


class Throughput(Record):
    """What the last steps did, and the best that the run has kept up, in `unit` (of each worker, or of
    all).
    """

    current: float
    best: float | None
    unit: str

    @property
    def percent(self) -> float | None:
        """Of the best; 100 where it is the best now."""
        if self.best is None or self.best <= 0:
            return None
        return 100.0 * min(1.0, self.current / self.best)

    @property
    def is_slow(self) -> bool:
        """Whether it is clearly below the best."""
        return self.percent is not None and self.percent < SLOW_PERCENT


class CurrentSpeed(Record):
    """How quick the training is now: all that is told of it beside each other is of these lines, the
    newest of one launch.

    `seconds`: that an iteration takes. `usual`: what one took before them in the same launch; None
    where too few lines tell, or where one takes hardly longer now.
    """

    seconds: float
    usual: float | None
    throughput: Throughput | None


# ----------------------------------------------------------------------------- the end
def end_of(snapshot: Snapshot) -> ForecastEnd | None:
    """The range of the training's end; None where the pace or the length is not known. The one
    forecast of a run.
    """
    done, total = derived.iteration(snapshot), derived.total_iterations(snapshot)
    speed = speed_of(snapshot)
    if done is None or total is None or speed is None:
        return None
    course = course_seen(snapshot)
    left = steps_left(course, done, total)
    earliest = left * speed.seconds
    usual = None
    pace = speed.seconds
    if speed.usual is not None:
        usual = left * speed.usual
        pace = speed.usual  # the weeks before went by that
    began, last = _first_point(snapshot), known(snapshot.steps, ())[-1].time
    if began is None or last is None:
        return ForecastEnd(earliest, usual=usual)
    window = last - began[0]
    useful = work(course, began[1], done) / weight_at(course, done) * pace
    if window < LEAST_WINDOW_SECONDS or useful <= 0:
        return ForecastEnd(earliest, usual=usual)
    share = min(1.0, useful / window)
    return ForecastEnd(
        earliest,
        likely=earliest / share,
        window=window,
        share=share,
        usual=usual,
    )


def course_seen(snapshot: Snapshot) -> tuple[EqualSteps, ...]:
    """The card's course; none, so that all steps count alike, where the training that was seen is
    not on it.
    """
    done, steps = derived.iteration(snapshot), known(snapshot.steps, ())
    if done is None or not steps:
        return ()
    batch = steps[-1].record.global_batch_size
    if batch is None or not fits(snapshot.run.course, done, batch):
        return ()  # the card was changed, or is another's
    return snapshot.run.course


def _first_point(snapshot: Snapshot) -> tuple[float, int] | None:
    """The oldest moment of the window at which it is known how far the training was: (time,
    iteration).
    """
    done = derived.iteration(snapshot) or 0
    points = [
        (attempt.end.time, attempt.end.iteration)
        for attempt in known(snapshot.attempts, ())
        if isinstance(attempt.end, EndMarker)
    ]
    points += [
        (step.time, step.record.iteration)
        for step in known(snapshot.steps, ())[:1]
        if step.time is not None
    ]
    inside = [
        (time, iteration)
        for time, iteration in points
        if snapshot.time - WINDOW_SECONDS <= time < snapshot.time and 0 < iteration < done
    ]
    return min(inside, default=None)


# ----------------------------------------------------------------------------- the queue
class NoCover(Record):
    """What runs or is queued and covers none of the training that is left, as things are now, and
    why.

    `job`: as people type it. `seconds`: the training time that its `tasks` would hold, None where
    no limit says it.
    """

    job: str
    tasks: int
    seconds: float | None
    why: str

    def __str__(self) -> str:
        tasks = ""
        if self.tasks > 1:
            tasks = f" ({self.tasks} tasks)"
        return f"job {self.job}{tasks}: {self.why}"


def no_cover(snapshot: Snapshot) -> tuple[NoCover, ...]:
    """Running jobs that may have no batch script any more, and queued ones that do not start by
    themselves.

    The tasks of an array that have one reason are one.
    """
    running = [(job, why) for job in snapshot.active_jobs if (why := _lost_script(snapshot, job))]
    sure = {job.job_id for job in derived.sure_jobs(snapshot)}
    stuck = [job for job in snapshot.pending_jobs if job.job_id not in sure]
    late = [job for job in _late(snapshot) if job.job_id in sure]
    reasons = {derived.kind_of_wait(job): job for job in stuck}  # thousands may share a few
    words = {kind: derived.why_not_starting(snapshot, job) for kind, job in reasons.items()}
    groups: dict[tuple[str, str], list[Job]] = {}
    for job, why in running:
        groups.setdefault((job.job_id, why), []).append(job)
    for job in stuck:
        groups.setdefault((array_number(job), words[derived.kind_of_wait(job)]), []).append(job)
    for job in late:
        when = timestamp(job.eligible_time or 0.0, UTC)
        groups.setdefault((array_number(job), f"it may not start before {when}"), []).append(job)
    return tuple(_without_cover(snapshot, name, why, jobs) for (name, why), jobs in groups.items())


def _late(snapshot: Snapshot) -> tuple[Job, ...]:
    """Queued jobs that someone has forbidden to start before a time long after what runs now ends."""
    ends = [derived.leaves_at(snapshot, job) or 0.0 for job in trains_on(snapshot)]
    awaited = max([snapshot.time, *ends]) + LATE_SECONDS
    return tuple(job for job in snapshot.pending_jobs if (job.eligible_time or 0.0) > awaited)


def _without_cover(snapshot: Snapshot, name: str, why: str, jobs: list[Job]) -> NoCover:
    tasks, each = derived.queued_tasks(tuple(jobs)), derived.task_seconds(snapshot, jobs[0])
    shown = jobs[0].job_id if len(jobs) == 1 else name
    return NoCover(shown, tasks, None if each is None else tasks * each, why)


def _lost_script(snapshot: Snapshot, job: Job) -> str:
    """Why a running job may not go on by itself: its batch script is lost, or cannot be seen to
    live; else "".
    """
    if has_lost_its_host(snapshot, job):
        return f"it has lost {batch_host(snapshot, job)}, which ran its batch script"
    silent = silent_host(snapshot, job)
    if silent:
        return f"{silent}, which runs its batch script, does not answer the scheduler"
    return ""


def trains_on(snapshot: Snapshot) -> tuple[Job, ...]:
    """The running jobs that go on by themselves: not one whose batch script's node is lost, or does
    not answer.
    """
    return tuple(job for job in snapshot.active_jobs if not _lost_script(snapshot, job))


def queue_coverage_seconds(snapshot: Snapshot, only_sure: bool = False) -> float | None:
    """Training time that the running task and the queued ones still hold; None where it cannot be
    told.

    A task that may have lost the node of its batch script holds none: it ends with its trainers.
    `only_sure` leaves out tasks that wait for the site, for nodes that can be used, or for a time
    that is far (see `no_cover`).
    """
    if isinstance(snapshot.jobs, Unknown):
        return None
    if only_sure:
        late = {job.job_id for job in _late(snapshot)}
        queued = tuple(job for job in derived.sure_jobs(snapshot) if job.job_id not in late)
    else:
        queued = derived.startable_jobs(snapshot)
    covered = longest = 0.0
    known_limits: dict[int | None, float | None] = {}
    # that trains no more
    running = tuple(job for job in trains_on(snapshot) if job.state is not JobState.COMPLETING)
    for job in (*running, *queued):
        limit = job.time_limit_seconds
        if limit not in known_limits:
            known_limits[limit] = derived.task_seconds(snapshot, job)
        whole = known_limits[limit]
        if whole is None:
            return None
        if job.state is JobState.PENDING:
            covered += whole * max(1, len(job.pending_tasks))
        elif job.start_time is not None:
            covered += max(0.0, whole - max(0.0, snapshot.time - job.start_time))
        longest = max(longest, whole)
    return covered + longest * derived.tasks_to_come(snapshot)


# ----------------------------------------------------------------------------- the next checkpoint
def next_checkpoint(snapshot: Snapshot) -> NextCheckpoint | None:
    """The next save of the running attempt, whichever comes first; None where nothing trains or
    nothing tells.
    """
    running = [job for job in snapshot.active_jobs if job.start_time is not None]
    if running:
        liveness = liveness_of(snapshot, running[0])
    else:
        liveness = liveness_outside(snapshot)
    if liveness is None or liveness.phase == ENDED_PHASE or not liveness.is_fresh(snapshot.time):
        return None
    found = [*_by_interval(snapshot), *_by_minutes(snapshot)]
    if not found and snapshot.run.checkpoint_interval and speed_of(snapshot) is None:
        done = _done(snapshot)
        step = _next_step(snapshot, done, snapshot.run.checkpoint_interval)
        return NextCheckpoint(step, None, "interval", step - done)
    standing = snapshot.run.standing
    if standing is not None and not standing.saves_when_asked:
        running = []  # it leaves then without a save
    for job in running:
        limit = derived.task_seconds(snapshot, job)
        if limit is not None and job.start_time is not None:
            found.append(
                NextCheckpoint(
                    None, max(0.0, job.start_time + limit - snapshot.time), "end of the task"
                )
            )
    return min(found, key=lambda entry: entry.seconds or 0.0, default=None)


def _by_interval(snapshot: Snapshot) -> Iterable[NextCheckpoint]:
    interval, done = snapshot.run.checkpoint_interval, derived.iteration(snapshot)
    speed, steps = speed_of(snapshot), known(snapshot.steps, ())
    if not interval or done is None or speed is None:
        return
    step = _next_step(snapshot, done, interval)
    if steps[-1].time is None:
        since = 0.0
    else:
        since = max(0.0, snapshot.time - steps[-1].time)
    yield NextCheckpoint(step, max(0.0, (step - done) * speed.seconds - since), "interval")


def _done(snapshot: Snapshot) -> int:
    """The last iteration; before the first one is logged, that of the checkpoint from which the
    training goes on.
    """
    newest = snapshot.newest_sound
    return derived.iteration(snapshot) or (newest.step if newest is not None else 0)


def _next_step(snapshot: Snapshot, done: int, interval: int) -> int:
    return min(done - done % interval + interval, derived.total_iterations(snapshot) or 10**12)


def _by_minutes(snapshot: Snapshot) -> Iterable[NextCheckpoint]:
    """They count from the last save, or from where the launch that runs began to train."""
    minutes, newest = snapshot.run.checkpoint_minutes, snapshot.newest_sound
    names = frozenset().union(*(derived.identifiers(job) for job in snapshot.active_jobs))
    began = launch_trained_since(snapshot, names) or launch_began(snapshot, names)
    saved = None if newest is None else newest.created
    moments = [moment for moment in (began, saved) if moment is not None]
    if minutes and moments:
        due = max(moments) + 60.0 * minutes
        yield NextCheckpoint(None, max(0.0, due - snapshot.time), "minutes")


# ----------------------------------------------------------------------------- throughput
def last_lines(snapshot: Snapshot, pace: float) -> int:
    """How many lines of the log are "now", at `pace` seconds a step: a slow node must show in them
    at once.
    """
    enough = math.ceil(LAST_SECONDS / (pace * snapshot.run.log_interval))
    return min(MOST_LAST_LINES, max(LAST_LINES, enough))


def windows_before(values: Sequence[float]) -> Iterator[Sequence[float]]:
    """The newest HISTORY_LINES of these values, then older ones: a lasting loss would become the usual."""
    for end in range(len(values), 0, -HISTORY_LINES):
        window = values[max(0, end - HISTORY_LINES) : end]
        if len(window) < LEAST_HISTORY:
            return
        yield window


def speed_of(snapshot: Snapshot, best: tuple[float, float] | None = None) -> CurrentSpeed | None:
    """How quick the run is, on the nodes that train now; None before they have shown it. `best`: the
    best (TFLOPs of a worker, samples a second) that it kept up.
    """
    lines = _lines_of_now(snapshot)
    seconds, timed = derived.pace_of(lines), _timed(lines)
    if seconds is None:
        return None
    record = lines[-1].record
    if timed:  # of one step, so that no two figures are of different ones
        timed.sort(key=attrgetter("seconds_per_iteration"))
        record = timed[len(timed) // 2]
        seconds = record.seconds_per_iteration
    before = _timed(derived.comparable(snapshot)[: -len(lines)])
    windows = windows_before([record.seconds_per_iteration for record in before])
    usual = min(map(median, windows), default=math.inf)
    (rate, unit), ever = rate_of(record), None
    if best is not None:
        ever = max(best[unit != FLOPS], rate or 0.0)
    return CurrentSpeed(
        seconds,
        usual=usual if seconds > OTHER_SPEED * usual else None,
        throughput=None if rate is None else Throughput(rate, ever, unit),
    )


def rate_of(record: MeasuredStep) -> tuple[float | None, str]:
    """TFLOPs as logged, or samples a second where the log has none; and which of them."""
    for rate, unit in ((record.tflops, FLOPS), (record.samples_per_second, SAMPLES)):
        if math.isfinite(rate) and rate > 0:
            return rate, unit
    return None, SAMPLES


def _timed(steps: Sequence[Step]) -> list[MeasuredStep]:
    """Those that tell how long they took."""
    return [step.record for step in steps if is_step_time(step.record.seconds_per_iteration)]


def _lines_of_now(snapshot: Snapshot) -> tuple[Step, ...]:
    """The newest lines of the log, of one launch as soon as it has written enough; () where the nodes
    that train now have written too few.
    """
    steps, pace = _of_these_nodes(snapshot), derived.seconds_per_iteration(snapshot)
    if not steps or pace is None:
        return ()
    alike = derived.comparable(snapshot)
    if len(alike) >= LAST_LINES:
        steps = alike
    return steps[-last_lines(snapshot, pace) :]


def _of_these_nodes(snapshot: Snapshot) -> tuple[Step, ...]:
    """Where an attempt has other nodes than the one before it, only its own steps tell: a slow node may
    have been left behind, or have come.
    """
    steps = known(snapshot.steps, ())
    running = [job for job in snapshot.active_jobs if not is_leaving(snapshot, job)]
    names = derived.identifiers_of(running)
    others = [step.job_id for step in steps if step.job_id and step.job_id not in names]
    if not running or not others:
        return steps
    nodes = {attempt.job_id: attempt.nodes for attempt in known(snapshot.attempts, ())}
    before, now = set(nodes.get(others[-1], ())), {name for job in running for name in job.nodes}
    if not before or before == now:
        return steps
    own = tuple(step for step in steps if step.job_id in names)
    if len(own) < LAST_LINES:
        return ()
    return own
