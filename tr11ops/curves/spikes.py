"""Spikes and divergence: the loss, or the gradient norm before it, leaves what was usual.

The bounds are those that part the spike of April 2022 in the 176B training from its noise: a
gradient norm above ten times its median in two lines after one another, or a loss above twice its
median.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from tr11ops.curves.steps import LoggedStep
from trainer.contract.record import Record

# What a rule finds in a course of numbers.

AnomalyKind = Literal[
    "spike",
    "divergence",
    "throughput-fall",
    "restart",
    "repeated-norm",
    "missing-loss",
    "dropped-steps",
    "gap",
]


class NumberAnomaly(Record):
    """One thing that looks wrong, or, where `is_wrong` is False, that a reader wants to know.

    `first` and `last` are iterations, `line` is where in the log the first one stands.
    """

    kind: AnomalyKind
    first: int
    last: int
    line: int
    text: str
    is_wrong: bool = True
    evidence: tuple[str, ...] = ()


class NumberRule(Protocol):
    """A rule sees every step once, in the order of the log, and says at the end what it found."""

    def take(self, step: LoggedStep) -> None: ...

    def anomalies(self) -> Iterable[NumberAnomaly]: ...


def span(first: int, last: int) -> str:
    """`at iteration 7` or `in iterations 7 to 9`."""
    if first == last:
        return f"at iteration {first:,}"
    return f"in iterations {first:,} to {last:,}"


# What was usual: the median of the last values, kept in order so that each new one costs little.


class RunningMedian:
    """The median of the last `length` values; NaN, above which nothing is high, until there are
    `least`.
    """

    def __init__(self, length: int, least: int) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self._length, self._least = length, least

    def add(self, value: float) -> None:
        """Take a finite value."""
        self._values.append(value)
        insort(self._ordered, value)
        if len(self._values) > self._length:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]

    @property
    def value(self) -> float:
        count = len(self._ordered)
        if count < self._least:
            return math.nan
        return 0.5 * (self._ordered[(count - 1) // 2] + self._ordered[count // 2])

    def clear(self) -> None:
        self._values.clear()
        self._ordered.clear()


NORM_FACTOR, LOSS_FACTOR = 10.0, 2.0
WINDOW = 100  # lines of a median, and the longest that a spike lasts: what stays is a new level
LEARNING_LINES = 10
CALM_LINES = 10  # ordinary lines that end a spike
END_LINES = 50
WORSE_AT_END = 1.1  # the loss at the end over its best stretch


@dataclass
class _Episode:
    """A spike under way."""

    first: LoggedStep
    usual: float
    last: int = 0
    calm: int = 0
    lines: int = 0
    peak_loss: float = -math.inf
    peak_norm: float = -math.inf
    peak: int = 0
    is_sure: bool = False

    def add(self, step: LoggedStep, is_high: bool) -> None:
        record = step.record
        self.lines += 1
        if is_high:
            self.calm = 0
        else:
            self.calm = self.calm + 1
        if is_high:
            self.last = record.iteration
        if record.lm_loss is not None and record.lm_loss > self.peak_loss:
            self.peak_loss, self.peak = record.lm_loss, record.iteration
        if record.grad_norm is not None and record.grad_norm > self.peak_norm:
            self.peak_norm = record.grad_norm


class Spikes:
    """Finds spikes, how high they went, and whether the loss came back."""

    def __init__(self) -> None:
        self._norms = RunningMedian(WINDOW, LEARNING_LINES)
        self._losses = RunningMedian(WINDOW, LEARNING_LINES)
        self._high_norms = 0
        self._episode: _Episode | None = None
        self._found: list[NumberAnomaly] = []

    def take(self, step: LoggedStep) -> None:
        loss, norm = step.record.lm_loss, step.record.grad_norm
        if (
            loss is None
            or not math.isfinite(loss)
            or step.record.skipped_iterations
            or (norm is not None and not math.isfinite(norm))
        ):
            return
        high_loss = loss > LOSS_FACTOR * self._losses.value
        high_norm = norm is not None and norm > NORM_FACTOR * self._norms.value
        if high_norm:
            self._high_norms = self._high_norms + 1
        else:
            self._high_norms = 0
        if (high_loss or high_norm) and self._episode is None:
            self._episode = _Episode(step, self._losses.value)
        if not high_loss:
            self._losses.add(loss)
        if norm is not None and not high_norm:
            self._norms.add(norm)
        if self._episode is None:
            return
        self._episode.add(step, high_loss or high_norm)
        self._episode.is_sure |= high_loss or self._high_norms >= 2
        if self._episode.calm >= (CALM_LINES if self._episode.is_sure else 1):
            self._close(f"back to {self._losses.value:.4g}")
        elif self._episode.lines > WINDOW:
            self._close(f"it did not come back within {WINDOW} lines")
            self._losses.clear()
            self._norms.clear()

    def anomalies(self) -> Iterator[NumberAnomaly]:
        self._close("the log ends in it")
        yield from self._found

    def _close(self, end: str) -> None:
        episode, self._episode = self._episode, None
        if episode is None or not episode.is_sure:
            return
        first = episode.first.record.iteration
        norm = ""
        if math.isfinite(episode.peak_norm):
            norm = f", gradient norm up to {episode.peak_norm:.4g}"
        if episode.peak_loss > LOSS_FACTOR * episode.usual:
            text = f"loss {episode.usual:.4g} -> {episode.peak_loss:.4g} at iteration {episode.peak:,}{norm}; {end}"
        else:
            text = f"gradient norm up to {episode.peak_norm:.4g}, loss not above {episode.peak_loss:.4g}; {end}"
        last = max(first, episode.last)
        self._found.append(
            NumberAnomaly(
                "spike",
                first,
                last=last,
                line=episode.first.line,
                text=f"spike {span(first, last)}: {text}",
            )
        )


class Divergence:
    """Finds a loss that ends well above the best it had: it rose slowly, or a spike was never made
    good.
    """

    def __init__(self) -> None:
        self._recent = RunningMedian(END_LINES, END_LINES)
        self._best = math.inf
        self._best_step: LoggedStep | None = None
        self._last: LoggedStep | None = None

    def take(self, step: LoggedStep) -> None:
        loss = step.record.lm_loss
        if loss is None or not math.isfinite(loss):
            return
        self._recent.add(loss)
        self._last = step
        if self._recent.value < self._best:
            self._best, self._best_step = self._recent.value, step

    def anomalies(self) -> Iterator[NumberAnomaly]:
        now, best = self._recent.value, self._best_step
        if best is None or self._last is None or not now > WORSE_AT_END * self._best > 0:
            return
        first, last = best.record.iteration, self._last.record.iteration
        yield NumberAnomaly(
            "divergence",
            first,
            last=last,
            line=best.line,
            text=f"the loss ends at {now:.4g}, above its best of {self._best:.4g} around iteration {first:,} "
            f"(medians of {END_LINES} lines)",
        )
