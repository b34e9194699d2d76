"""Restarts: what was done again, and whether samples, learning rate and loss go on where they stood."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

from tr11ops.base.units import counted
from tr11ops.curves.anomaly import NumberAnomaly
from tr11ops.curves.steps import LoggedStep
from trainer.contract.logline import StepRecord

REMEMBERED = 5000  # lines before a restart; what is done again is among them
LEVEL_LINES = 10  # of a level before and after
LEARNING_RATE_BOUND = 1e-3  # relative, at the same iteration; a log rounds to four digits
LEARNING_RATE_JUMP = 0.05  # relative, from the iteration before, beyond what it had been moving by
LOSS_RISE = 1.05
NORM_RISE = 2.0


@dataclass
class _Seam:
    """A restart whose first lines are being read."""

    before: LoggedStep
    history: Sequence[LoggedStep]
    after: list[LoggedStep] = field(default_factory=list)

    @property
    def first(self) -> StepRecord:
        return self.after[0].record

    @cached_property
    def earlier(self) -> Sequence[LoggedStep]:
        """What was logged of the iterations before the first one after the restart."""
        return [step for step in self.history if step.record.iteration < self.first.iteration]

    @cached_property
    def done(self) -> Mapping[int, LoggedStep]:
        """What was logged of each iteration before the restart, for the last time."""
        return {step.record.iteration: step for step in self.history}


class RestartSeams:
    """One anomaly a restart; it is wrong where a number does not go on as it should."""

    def __init__(self) -> None:
        self._history: deque[LoggedStep] = deque(maxlen=REMEMBERED)
        self._seam: _Seam | None = None
        self._found: list[NumberAnomaly] = []

    def take(self, step: LoggedStep) -> None:
        before = self._history[-1] if self._history else None
        if before is not None and (step.start != before.start or step.record.iteration <= before.record.iteration):
            self._close()
            self._seam = _Seam(before, tuple(self._history))
        if self._seam is not None:
            self._seam.after.append(step)
            if len(self._seam.after) >= LEVEL_LINES and step.record.iteration > self._seam.before.record.iteration:
                self._close()
        self._history.append(step)

    def anomalies(self) -> Iterator[NumberAnomaly]:
        self._close()
        yield from self._found

    def _close(self) -> None:
        seam, self._seam = self._seam, None
        if seam is not None:
            self._found.append(_judged(seam))


def _judged(seam: _Seam) -> NumberAnomaly:
    first, last = seam.first, seam.before.record
    again = max(0, last.iteration - first.iteration + 1)
    missing = first.iteration - last.iteration - 1
    wrong = list(_what_is_wrong(seam))
    done = f"{counted(again, 'iteration')} done again" if again else "nothing done again"
    text = f"restart after iteration {last.iteration:,}: goes on at {first.iteration:,}, {done}"
    if missing > _interval(seam.history):
        wrong.append(f"no line between iterations {last.iteration:,} and {first.iteration:,}")
    evidence = (*wrong, *_same_iterations(seam))
    text += f"; {wrong[0]}" if wrong else ""
    return NumberAnomaly(
        "restart", min(first.iteration, last.iteration), max(first.iteration, last.iteration), seam.after[0].line,
        text, bool(wrong), evidence,
    )  # fmt: skip


def _what_is_wrong(seam: _Seam) -> Iterator[str]:
    yield from _samples(seam)
    yield from _learning_rate(seam)
    yield from _level("the loss", seam, "lm_loss", LOSS_RISE)
    yield from _level("the gradient norm", seam, "grad_norm", NORM_RISE)


def _samples(seam: _Seam) -> Iterator[str]:
    first = seam.first
    same = seam.done.get(first.iteration)
    if same is not None:
        expected = same.record.consumed_samples
    else:
        before = seam.earlier[-1].record if seam.earlier else None
        if before is None or before.global_batch_size != first.global_batch_size or not first.global_batch_size:
            return
        distance = first.iteration - before.iteration
        expected = before.consumed_samples + distance * first.global_batch_size
    if first.consumed_samples != expected:
        yield f"consumed samples are {first.consumed_samples:,} at iteration {first.iteration:,}, not {expected:,}"


def _learning_rate(seam: _Seam) -> Iterator[str]:
    first = seam.first
    same = seam.done.get(first.iteration)
    if same is not None:
        usual, allowed = same.record.learning_rate, LEARNING_RATE_BOUND
    else:
        before = [step.record for step in seam.earlier[-2:]]
        if len(before) < 2:
            return
        usual = before[-1].learning_rate
        pace = abs(usual - before[0].learning_rate) / max(1, before[-1].iteration - before[0].iteration)
        moved = 2 * pace * (first.iteration - before[-1].iteration)
        allowed = LEARNING_RATE_JUMP + (moved / usual if usual > 0 else math.inf)
    if abs(first.learning_rate - usual) > allowed * max(usual, 1e-12):
        yield f"the learning rate is {first.learning_rate:.4g} at iteration {first.iteration:,}, {usual:.4g} before"


def _level(name: str, seam: _Seam, value: str, rise: float) -> Iterator[str]:
    was = _finite(seam.earlier[-LEVEL_LINES:], value)
    now = _finite(seam.after[:LEVEL_LINES], value)
    if len(was) < LEVEL_LINES or len(now) < LEVEL_LINES // 2:
        return
    if median(now) > rise * median(was):
        yield f"{name} is {median(now):.4g} after it, {median(was):.4g} before"


def _same_iterations(seam: _Seam) -> Iterator[str]:
    """How the losses of iterations that were done twice compare."""
    twice = [
        (old.record.lm_loss, step.record.lm_loss)
        for step in seam.after
        if (old := seam.done.get(step.record.iteration)) is not None
    ]
    finite = [(old, new) for old, new in twice if math.isfinite(old) and math.isfinite(new)]
    if finite:
        worst = max(abs(new - old) for old, new in finite)
        said = "are the same" if worst == 0 else f"differ by at most {worst:.3g}"
        yield f"the losses of {counted(len(finite), 'iteration')} that were done twice {said}"


def _finite(steps: Sequence[LoggedStep], name: str) -> list[float]:
    values = (getattr(step.record, name) for step in steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _interval(history: Sequence[LoggedStep]) -> int:
    """Iterations from one line to the next, as the last lines before the restart have them."""
    last = [step.record.iteration for step in history[-3:]]
    return max((second - first for first, second in pairwise(last)), default=1)
