"""The course of a training's numbers, for all that judges it: what lies far above the usual, and what
a roll-back has undone. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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


def turns_back(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Indices of the first lines after the training went back to an iteration that it had done
    before.
    """
    return tuple(
        index
        for index in derived.restarts(steps)
        if steps[index].record.iteration <= steps[index - 1].record.iteration
    )
