"""Spikes and divergence: the loss, or the gradient norm before it, leaves what was usual.

The bounds are those that part the spike of April 2022 in the 176B training from its noise: a
gradient norm above ten times its median in two lines after one another, or a loss above twice its
median.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tr11ops.curves.anomaly import NumberAnomaly, span
from tr11ops.curves.steps import LoggedStep
from tr11ops.curves.windows import RunningMedian

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
        if record.lm_loss > self.peak_loss:
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
            not math.isfinite(loss)
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
                "spike", first, last, episode.first.line, f"spike {span(first, last)}: {text}"
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
        if not math.isfinite(step.record.lm_loss):
            return
        self._recent.add(step.record.lm_loss)
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
            last,
            best.line,
            f"the loss ends at {now:.4g}, above its best of {self._best:.4g} around iteration {first:,} "
            f"(medians of {END_LINES} lines)",
        )
