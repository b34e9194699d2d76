"""What a log does not say: losses that are missing or not finite, updates that were dropped, missing iterations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from tr11ops.curves.anomaly import NumberAnomaly, span
from tr11ops.curves.steps import LoggedStep
from trainer.contract.record import Record

SURE_REPEATS = {True: 2, False: 8}  # equal norms after one another; by chance a rounded one repeats, eight do not
DROPPED_IN_A_ROW = 3


class _Stretch(Record):
    """Lines after one another that have something in common."""

    first: int
    last: int
    line: int
    count: int = 1

    def with_step(self, step: LoggedStep) -> _Stretch:
        return replace(self, last=step.record.iteration, count=self.count + 1)


def _stretch(step: LoggedStep) -> _Stretch:
    return _Stretch(step.record.iteration, step.record.iteration, step.line)


class MissingLosses:
    """The historical trainer left the field out exactly when the loss was NaN."""

    def __init__(self) -> None:
        self._found: list[_Stretch] = []
        self._goes_on = False

    def take(self, step: LoggedStep) -> None:
        is_missing = not math.isfinite(step.record.lm_loss)
        if is_missing:
            self._found[-1:] = (
                [self._found[-1].with_step(step)] if self._goes_on else [*self._found[-1:], _stretch(step)]
            )
        self._goes_on = is_missing

    def anomalies(self) -> Iterator[NumberAnomaly]:
        for one in self._found:
            lines = "1 line" if one.count == 1 else f"{one.count:,} lines"
            text = f"no finite loss {span(one.first, one.last)} ({lines}): it was NaN or infinite"
            yield NumberAnomaly("missing-loss", one.first, one.last, one.line, text)


class RepeatedNorms:
    """The same gradient norm again and again: the step was dropped, and the norm of an earlier one is shown."""

    def __init__(self) -> None:
        self._found: list[tuple[_Stretch, float]] = []
        self._now: _Stretch | None = None
        self._norm: float | None = None
        self._is_sure = False

    def take(self, step: LoggedStep) -> None:
        norm = step.record.grad_norm
        if self._now is not None and norm is not None and norm == self._norm and norm > 0:
            self._now = self._now.with_step(step)
        else:
            self._close()
            self._now, self._norm, self._is_sure = _stretch(step), norm, step.decimals > 6
        self._is_sure |= step.record.skipped_iterations > 0

    def anomalies(self) -> Iterator[NumberAnomaly]:
        self._close()
        for one, norm in self._found:
            text = (
                f"the gradient norm is {norm:.6g} in {one.count:,} lines after one another, {span(one.first, one.last)}"
            )
            yield NumberAnomaly("repeated-norm", one.first, one.last, one.line, text)

    def _close(self) -> None:
        now, self._now = self._now, None
        if now is not None and self._norm is not None and now.count >= SURE_REPEATS[self._is_sure]:
            self._found.append((now, self._norm))


class DroppedUpdates:
    """Updates that the optimizer dropped. Some are the loss scale of fp16 at work; many in a row change nothing."""

    def __init__(self) -> None:
        self._all = self._lines = 0
        self._now: _Stretch | None = None
        self._longest: _Stretch | None = None
        self._first: LoggedStep | None = None
        self._last = 0

    def take(self, step: LoggedStep) -> None:
        skipped = step.record.skipped_iterations
        self._lines += 1
        if not skipped:
            self._now = None
            return
        self._all += skipped
        self._first, self._last = self._first or step, step.record.iteration
        self._now = _stretch(step) if self._now is None else self._now.with_step(step)
        if self._longest is None or self._now.count > self._longest.count:
            self._longest = self._now

    def anomalies(self) -> Iterator[NumberAnomaly]:
        if self._first is None or self._longest is None:
            return
        is_wrong = self._longest.count >= DROPPED_IN_A_ROW
        row = (
            f", {self._longest.count:,} lines after one another {span(self._longest.first, self._longest.last)}"
            if is_wrong
            else ""
        )
        text = f"{self._all:,} updates were dropped in {self._lines:,} lines{row}"
        first = self._first.record.iteration
        yield NumberAnomaly("dropped-steps", first, self._last, self._first.line, text, is_wrong)


class LogGaps:
    """Iterations without a line within one start: the log was cut, or lines were lost."""

    def __init__(self) -> None:
        self._before: LoggedStep | None = None
        self._interval = 0
        self._found: list[NumberAnomaly] = []

    def take(self, step: LoggedStep) -> None:
        before, self._before = self._before, step
        if before is None or before.start != step.start:
            return
        distance = step.record.iteration - before.record.iteration
        if distance <= 0:
            return
        if self._interval and distance > self._interval:
            first, last = before.record.iteration + 1, step.record.iteration - 1
            text = f"no line {span(first, last)}"
            self._found.append(NumberAnomaly("gap", first, last, step.line, text))
        self._interval = min(self._interval or distance, distance)

    def anomalies(self) -> Iterator[NumberAnomaly]:
        yield from self._found
