"""What the coming shift will bring, as far as today's pace tells: saves, ends, milestones of the
schedule, forecasts.

Pure. Moments that follow from iterations are the likely ones: the pace with its usual
interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from tr11ops.base.observed import known
from tr11ops.base.units import counted, duration
from tr11ops.handover.shift import Happened
from tr11ops.observe import derived
from tr11ops.observe.forecast import (
    ForecastEnd,
    course_seen,
    end_of,
    next_checkpoint,
    no_cover,
    queue_coverage_seconds,
    speed_of,
)
from tr11ops.observe.snapshot import EqualSteps, Snapshot, weight_at, work
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.status.assessment import forecast_of
from tr11ops.status.extra_observations import ExtraObservations
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.path import path_of

NO_COVER_SHOWN = 3


def coming_events(
    snapshot: Snapshot, extra: ExtraObservations, card: RunCard, seconds: float
) -> Iterator[Happened]:
    """Everything that is expected within `seconds` of the look."""
    until = snapshot.time + seconds
    events = [
        *_saves(snapshot),
        *_queue(snapshot),
        *_milestones(snapshot, card, until),
        *_operation(snapshot, extra),
    ]
    yield from (event for event in events if event.time <= until)


def _saves(snapshot: Snapshot) -> Iterator[Happened]:
    following = next_checkpoint(snapshot)
    if (
        following is not None
        and following.seconds is not None
        and following.why != "end of the task"
    ):
        name = ""
        if following.step is not None:
            name = f" of step {following.step}"
        yield Happened(snapshot.time + following.seconds, f"the next checkpoint{name} is due")


def _queue(snapshot: Snapshot) -> Iterator[Happened]:
    if snapshot.kill_switch is not None:
        return
    end = end_of(snapshot)
    covered = queue_coverage_seconds(snapshot, only_sure=True)
    left = math.inf if end is None else end.earliest
    for job in snapshot.active_jobs:
        limit = derived.task_seconds(snapshot, job)
        if (
            limit is not None
            and job.start_time is not None
            and job.start_time + limit < snapshot.time + left
        ):
            moment = max(snapshot.time, job.start_time + limit)
            end_of_time = "saves and leaves: its time is over"
            if snapshot.run.is_watched:
                end_of_time = "is at its time limit"
            yield Happened(moment, f"{job.job_id} {end_of_time}")
    if snapshot.run.is_watched:
        return  # what comes after it is someone else's to say
    idle_work = no_cover(snapshot)
    if covered is not None and covered < left and idle_work:
        reasons = "; ".join(map(str, idle_work[:NO_COVER_SHOWN]))
        yield Happened(
            snapshot.time + covered, f"what else is queued cannot start as things are: {reasons}"
        )
    elif covered and covered < left:
        more = derived.launch_more(snapshot)
        yield Happened(
            snapshot.time + covered, f"the last queued task ends: launch more before (`{more}`)"
        )


# ----------------------------------------------------------------------------- the schedule
def _milestones(snapshot: Snapshot, card: RunCard, until: float) -> Iterator[Happened]:
    """Where the batch grows, the warm-up and the decay end, an evaluation is due, the training is
    finished.
    """
    end = end_of(snapshot)
    done = derived.iteration(snapshot)
    # nothing trains: nothing is reached
    if end is None or done is None or next_checkpoint(snapshot) is None:
        return
    course = course_seen(snapshot)
    points = list(_evaluations(card, done))
    if course and isinstance(card, OwnCard):
        points += _points(card, done)
    for iteration, text in points:
        moment = snapshot.time + _seconds_to(
            snapshot, course, end=end, done=done, iteration=iteration
        )
        if moment <= until:
            yield Happened(moment, text)
    final = end.likely if end.likely is not None else end.earliest
    yield Happened(snapshot.time + final, "the training is finished")


def _evaluations(card: RunCard, done: int) -> Iterator[tuple[int, str]]:
    if isinstance(card, OwnCard) and card.evaluation.iterations:
        every = card.evaluation.interval
        iteration = done - done % every + every
        yield iteration, f"evaluation after iteration {iteration}"


def _points(card: OwnCard, done: int) -> Iterator[tuple[int, str]]:
    """What the card's own course of batch and learning rate changes after iteration `done`."""
    path = path_of(card)
    plan = plan_of(card)
    levels = path.batch_levels
    for before, level in pairwise(levels):
        if level.first_iteration > done:
            yield (
                level.first_iteration,
                f"the batch grows from {before.batch_size} to {level.batch_size} samples",
            )
    warm = 0
    if plan.warmup_samples > 0:
        warm = path.after_samples(plan.warmup_samples).iteration
    if warm > done:
        yield warm, f"the warm-up ends: the learning rate is {plan.learning_rate:g}"
    if plan.decay_style == "wsd":
        position = plan.decayed_at(path, plan.cooldown)
        if done < position.iteration < path.total_iterations:
            yield (
                position.iteration,
                f"the cooldown of the learning rate begins ({plan.cooldown_style})",
            )
    if plan.decay_style != "constant":
        position = plan.decayed_at(path)
        if done < position.iteration < path.total_iterations:
            yield (
                position.iteration,
                f"the decay ends: the learning rate stays at {plan.min_learning_rate:g}",
            )


def _seconds_to(
    snapshot: Snapshot, course: tuple[EqualSteps, ...], end: ForecastEnd, done: int, iteration: int
) -> float:
    speed = speed_of(snapshot)
    pace = 0.0 if speed is None else speed.seconds
    stretch = 1.0
    if end.likely is not None and end.earliest > 0:
        stretch = end.likely / end.earliest
    return stretch * pace / weight_at(course, done) * work(course, done, iteration)


# ----------------------------------------------------------------------------- the operation
def _operation(snapshot: Snapshot, extra: ExtraObservations) -> Iterator[Happened]:
    now = snapshot.time
    check = derived.command(snapshot, "nodes check --due")
    for entry in known(snapshot.exclusions, ()):
        if entry.until is not None:
            yield Happened(max(now, entry.until), f"{entry.node} is due for a check (`{check}`)")
    for alert in known(extra.alerts, ()):
        if alert.snoozed_until is not None and alert.snoozed_until > now:
            yield Happened(alert.snoozed_until, f"the snooze ends: {alert.title}")
    duty = extra.on_call
    if duty is not None and duty.taken is not None and duty.until is not None:
        yield Happened(duty.until, f"the shift that {duty.names} took ends: the rota counts again")
    for name in sorted({usage.name for usage in known(snapshot.operation.usage, ())}):
        full_at = forecast_of(snapshot, name).full_at
        if full_at is not None:
            yield Happened(max(now, full_at), f"file system {name} is full, at its trend")
    purge = snapshot.run.watch.scratch_purge_days
    for used in known(snapshot.operation.least_used, ()):
        if purge is not None:
            moment = used.time + purge * derived.DAY
            if moment > now:
                words = "may be purged"
            else:
                words = f"may have been purged {duration(now - moment)} ago"
            yield Happened(
                max(now, moment),
                f"{used.what} {words}: no one touched it for {counted(purge, 'day')}",
            )
    for chain in known(snapshot.operation.chains, ()):
        yield Happened(
            max(now, chain.next_due), f"the {chain.name} periodic jobs run (job {chain.job_id})"
        )
