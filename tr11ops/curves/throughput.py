"""Throughput that falls at once and stays low: one slow GPU holds all others back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tr11ops.curves.anomaly import NumberAnomaly
from tr11ops.curves.steps import LoggedStep
from tr11ops.curves.windows import RunningMedian

WINDOW, LEARNING_LINES = 100, 20
MEAN_LINES = 3
FALL, RETURN = 0.97, 0.985  # of what was usual: begins, and ends
LEAST_LINES = 10  # a save or an evaluation costs a few lines; this is no such thing


@dataclass
class _Fall:
    """Throughput below what was usual. `sum` of `lines` values, the last of them at `last`."""

    first: LoggedStep
    usual: float
    last: int
    sum: float = 0.0
    lines: int = 0


class ThroughputFalls:
    """Compares within one start, at one batch size and one sequence length: else the numbers mean something else."""

    def __init__(self) -> None:
        self._usual = RunningMedian(WINDOW, LEARNING_LINES)
        self._recent: deque[LoggedStep] = deque(maxlen=MEAN_LINES)
        self._like: tuple[object, ...] = ()
        self._fall: _Fall | None = None
        self._found: list[NumberAnomaly] = []

    def take(self, step: LoggedStep) -> None:
        record = step.record
        rate = _rate(step)
        if not math.isfinite(rate) or rate <= 0:
            return
        like = (step.start, record.global_batch_size, record.curriculum_length)
        if like != self._like or (self._recent and record.iteration <= self._recent[-1].record.iteration):
            self._close("to the next start, or change of batch")
            self._usual.clear()
            self._recent.clear()
            self._like = like
        self._recent.append(step)
        mean = sum(map(_rate, self._recent)) / len(self._recent)
        if self._fall is not None:
            self._fall.sum, self._fall.lines, self._fall.last = (
                self._fall.sum + rate, self._fall.lines + 1, record.iteration,
            )  # fmt: skip
            if mean >= RETURN * self._fall.usual:
                self._close("")
        elif len(self._recent) == MEAN_LINES and mean < FALL * self._usual.value:
            first = self._recent[0]
            self._fall = _Fall(first, self._usual.value, record.iteration, sum(map(_rate, self._recent)), MEAN_LINES)
        else:
            self._usual.add(rate)

    def anomalies(self) -> Iterator[NumberAnomaly]:
        self._close("to the end of the log")
        yield from self._found

    def _close(self, until: str) -> None:
        fall, self._fall = self._fall, None
        if fall is None or fall.lines < LEAST_LINES:
            return
        first = fall.first.record.iteration
        low, unit = fall.sum / fall.lines, _unit(fall.first)
        span = until or f"for {fall.last - first + 1:,} iterations"
        change = f"{fall.usual:.1f} to {low:.1f} {unit} ({low / fall.usual - 1:+.1%})"
        text = f"throughput falls from {change} at iteration {first:,}, {span}"
        self._found.append(NumberAnomaly("throughput-fall", first, fall.last, fall.first.line, text))


def _rate(step: LoggedStep) -> float:
    """TFLOPs where they are logged, samples a second where those are, else iterations an hour."""
    record = step.record
    if math.isfinite(record.tflops):
        return record.tflops
    if math.isfinite(record.samples_per_second):
        return record.samples_per_second
    return 3600.0 / record.seconds_per_iteration if record.seconds_per_iteration > 0 else math.nan


def _unit(step: LoggedStep) -> str:
    if math.isfinite(step.record.tflops):
        return "TFLOPs"
    return "samples/s" if math.isfinite(step.record.samples_per_second) else "iterations/h"
