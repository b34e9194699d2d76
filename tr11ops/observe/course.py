"""What each step of a training costs against the others: all forecasts of what is left count in it.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard


class EqualSteps(Record):
    """Consecutive steps that cost the same: `weight` is one step's time against one of the full
    batch and length.
    """

    iterations: int
    weight: float
    batch_size: int = 0


def course_of(card: RunCard) -> tuple[EqualSteps, ...]:
    """What each step of the card's training costs against the others, by its batch and its sequence
    length.
    """
    from tr11ops.runcard.speed import step_weights
    from trainer.schedule.path import path_of

    segments = path_of(card).segments
    weights = step_weights(card, segments)
    return tuple(
        EqualSteps(part.iterations, weight, part.batch_size)
        for part, weight in zip(segments, weights, strict=True)
    )


def work(course: Iterable[EqualSteps], first: int, last: int) -> float:
    """The steps from `first` (not counted) to `last`, in steps of the full batch. Beyond the course
    its last weight.
    """
    done, total, weight = 0, 0.0, 1.0
    for stretch in course:
        weight = stretch.weight
        total += weight * max(0, min(last, done + stretch.iterations) - max(first, done))
        done += stretch.iterations
    return total + weight * max(0, last - max(first, done))


def fits(course: Iterable[EqualSteps], iteration: int, batch_size: int) -> bool:
    """Whether the course tells of the training that was seen: step `iteration` has this batch in
    it.
    """
    done = 0
    for stretch in course:
        done += stretch.iterations
        if iteration <= done:
            return stretch.batch_size == batch_size
    return False


def weight_at(course: Iterable[EqualSteps], iteration: int) -> float:
    """The weight of step `iteration` (from 1)."""
    return work(course, max(0, iteration - 1), max(1, iteration))


def steps_left(course: Iterable[EqualSteps], done: int, total: int) -> float:
    """What is left after step `done` of `total`, in steps as long as that one: times its seconds,
    it is the time.
    """
    course = tuple(course)
    return work(course, done, total) / weight_at(course, done)
