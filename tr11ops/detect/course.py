"""The course of a training's numbers, for all that judges it: restarts, what lies far above the usual,
which lines may be compared. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import median

from tr11ops.base.observed import known
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

LEARNING_LINES = 10  # before a median means anything
RECENT_LINES = 50  # what a look an hour later must still find, at the pace of the largest run


class High(Record):
    """A line whose value lies far above what was usual before it; `index` among the steps of the
    snapshot.
    """

    index: int
    value: float
    usual: float

    @property
    def factor(self) -> float:
        if self.usual > 0:
            return self.value / self.usual
        return math.inf


def recent_highs(
    steps: tuple[Step, ...],
    value_of: Callable[[MeasuredStep], float | None],
    factor: float,
    window: int,
) -> tuple[High, ...]:
    """The recent lines with a value above `factor` times the median of the `window` ordinary lines
    before them.

    A high value is not learned, so that a spike does not lift what it is measured by. Lines without
    a finite value, or whose update was dropped, are passed over.
    """
    found: list[High] = []
    usual: list[float] = []
    begin = len(steps) - RECENT_LINES
    for index, step in enumerate(steps):
        value = value_of(step.record)
        if value is None or not math.isfinite(value) or step.record.skipped_iterations:
            continue
        if index >= begin and len(usual) >= LEARNING_LINES:
            level = median(usual[-window:])
            if value > factor * level:
                found.append(High(index, value, level))
                continue
        usual.append(value)
    return tuple(found)


def not_undone(snapshot: Snapshot, highs: Iterable[High]) -> tuple[High, ...]:
    """Those of the highs that no person's roll-back has undone."""
    undone = _undone_lines(snapshot)
    return tuple(high for high in highs if high.index not in undone)


def _undone_lines(snapshot: Snapshot) -> frozenset[int]:
    """Indices of the lines that a person's roll-back has undone: what they showed, that person
    knew.
    """
    steps, undone = known(snapshot.steps, ()), set[int]()
    for event in derived.standing_rollbacks(snapshot):
        to = event.values.get("to")
        if not event.values.get("by") or not isinstance(to, int):
            continue
        undone |= {
            index
            for index, step in enumerate(steps)
            if step.time is not None and step.time <= event.time and step.record.iteration > to
        }
    return frozenset(undone)


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


def turns_back(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Indices of the first lines after the training went back to an iteration that it had done
    before.
    """
    return tuple(
        index
        for index in restarts(steps)
        if steps[index].record.iteration <= steps[index - 1].record.iteration
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
