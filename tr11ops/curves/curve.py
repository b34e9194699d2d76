"""One run's course, or a part of it, ready to be laid beside another's."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal

from tr11ops.curves.steps import LoggedStep
from trainer.contract.documents import document
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

# A part of a training's course: from one place to another, each in iterations, samples or tokens.
# Pure.

CurveUnit = Literal["iterations", "samples", "tokens"]
EXAMPLES = "1200, 3Msamples or 50Btokens"
_PLACE = re.compile(r"(\d+(?:\.\d+)?) ?([kMBT]?) ?(iterations?|samples?|tokens?)?")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # as screens show large counts


class CurvePlace(Record):
    """A place on a course: so many iterations done, or samples or tokens consumed."""

    value: float
    unit: CurveUnit = "iterations"

    def __str__(self) -> str:
        if self.unit == "iterations":
            return f"iteration {self.value:,.0f}"
        return f"{self.value:,.0f} {self.unit}"

    @classmethod
    def of(cls, text: str) -> CurvePlace:
        """The place that a person means: a number of iterations, or with a unit, e.g. `3Msamples`,
        `50 B tokens`.

        Raises ValueError for anything else.
        """
        match = _PLACE.fullmatch(text.strip())
        if match is None or len(text) > 40:
            raise ValueError(f"{text[:40]!r} is no place in a training; write it like {EXAMPLES}")
        unit = match[3] or "iterations"
        return cls(float(match[1]) * _FACTORS[match[2]], _UNITS[unit.removesuffix("s")])


_UNITS: dict[str, CurveUnit] = {"iteration": "iterations", "sample": "samples", "token": "tokens"}


class CurveRange(Record):
    """The steps from `first` to `last`, both included; None: from the begin, to the end."""

    first: CurvePlace | None = None
    last: CurvePlace | None = None

    def has(self, iteration: int, samples: float | None, tokens: float | None) -> bool:
        """Whether a step after which so much was done lies in it; where that is not known, it does
        not.
        """
        done: dict[CurveUnit, float | None] = {
            "iterations": iteration,
            "samples": samples,
            "tokens": tokens,
        }
        for bound in (self.first, self.last):
            if bound is not None and done[bound.unit] is None:
                return False
        if self.first is not None and (done[self.first.unit] or 0) < self.first.value:
            return False
        return self.last is None or (done[self.last.unit] or 0) <= self.last.value

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.first is None and self.last is None

    def __str__(self) -> str:
        """In words; "" for all of a course."""
        if self.first is None:
            begin = ""
        else:
            begin = f"from {self.first}"
        if self.last is None:
            end = ""
        else:
            end = f"to {self.last}"
        return " ".join(filter(None, (begin, end)))

    def document(self) -> dict[str, object]:
        """As JSON values; null where it is open."""
        ends = {"from": self.first, "to": self.last}
        return {name: None if place is None else document(place) for name, place in ends.items()}


WHOLE = CurveRange()


def range_of(first: CurvePlace | None, last: CurvePlace | None) -> CurveRange:
    """Both ends together. Raises ValueError where the second is before the first."""
    if (
        first is not None
        and last is not None
        and first.unit == last.unit
        and last.value < first.value
    ):
        raise ValueError(f"{last} is before {first}")
    return CurveRange(first, last)


CurveAxis = Literal["iteration", "samples", "tokens", "hours"]
CurveValue = Literal["loss", "sop-loss", "grad-norm", "learning-rate", "batch", "tflops"]
_FIELDS = {
    "loss": "lm_loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "batch": "global_batch_size",
    "tflops": "tflops",
}


class CurveLevel(Record):
    """The mean of some lines, and its standard error; NaN of none, and of one."""

    mean: float
    error: float


class RunCurve(Record):
    """Finite values over x, which rises. `hours` as x are hours of training, without waits and
    restarts.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def level(self, at: float, lines: int) -> CurveLevel:
        """The mean of the last `lines` values up to `at`."""
        end = bisect_right(self.x, at)
        values = self.y[max(0, end - lines) : end]
        if not values:
            return CurveLevel(math.nan, math.nan)
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return CurveLevel(mean, math.nan)
        spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return CurveLevel(mean, math.sqrt(spread / len(values)))

    def reaches(self, value: float, lines: int) -> float | None:
        """The first x at which the mean of the last `lines` values is `value` or less; None where
        it never is.
        """
        total = 0.0
        for index, own in enumerate(self.y):
            total += own - (self.y[index - lines] if index >= lines else 0.0)
            if index + 1 >= lines and total / lines <= value:
                return self.x[index]
        return None


def curve_of(
    name: str,
    steps: Iterable[LoggedStep],
    axis: CurveAxis,
    value: CurveValue,
    within: CurveRange = WHOLE,
) -> RunCurve:
    """The course as it counts: what was done again after a restart or a roll-back replaces what it
    was done for.

    Of it the steps `within` a range; hours are counted from the begin of the training all the same.
    """
    iterations: list[int] = []
    x: list[float] = []
    y: list[float] = []
    hours: list[float] = []
    inside: list[bool] = []
    for step in steps:
        record = step.record
        cut = bisect_left(iterations, record.iteration)
        del iterations[cut:], x[cut:], y[cut:], hours[cut:], inside[cut:]
        if iterations:
            distance = record.iteration - iterations[-1]
        else:
            distance = 1
        if math.isfinite(record.seconds_per_iteration):
            seconds = record.seconds_per_iteration
        else:
            seconds = 0.0
        spent = (hours[-1] if hours else 0.0) + distance * seconds / 3600.0
        own = _measured(record, value)
        iterations.append(record.iteration)
        hours.append(spent)
        x.append(spent if axis == "hours" else _place(record, axis))
        y.append(math.nan if own is None else float(own))
        inside.append(within.has(record.iteration, record.consumed_samples, record.consumed_tokens))
    kept = [
        index
        for index, own in enumerate(y)
        if inside[index] and math.isfinite(own) and math.isfinite(x[index])
    ]
    return RunCurve(name, [x[index] for index in kept], [y[index] for index in kept])


def wants_logarithm(low: float, high: float) -> bool:
    """Whether values from `low` to `high` are easier to read on a logarithmic axis: a loss that
    falls by much more than half.
    """
    return low > 0 and high > 4 * low


def _measured(record: MeasuredStep, value: CurveValue) -> float | None:
    if value == "sop-loss":
        return dict(record.other_losses).get("sop")
    found: float | None = getattr(record, _FIELDS[value])
    return found


def _place(record: MeasuredStep, axis: str) -> float:
    """NaN where the log does not count what the axis is of."""
    if axis == "iteration":
        return float(record.iteration)
    if axis == "samples":
        count = record.consumed_samples
    else:
        count = record.consumed_tokens
    if count is None or (not count and record.iteration):
        return math.nan
    return float(count)
