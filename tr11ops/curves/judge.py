"""What looks wrong in the numbers of a log, by every rule, in one pass."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from tr11ops.base.units import counted
from tr11ops.curves.spikes import Divergence, NumberAnomaly, NumberRule, RunningMedian, Spikes, span
from tr11ops.curves.steps import LoggedStep
from trainer.contract.metrics_record import MeasuredStep
from trainer.contract.record import Record

# Restarts: what was done again, and whether samples, learning rate and loss go on where they stood.

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
    def first(self) -> MeasuredStep:
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
        before = None
        if self._history:
            before = self._history[-1]
        if before is not None and (
            step.start != before.start or step.record.iteration <= before.record.iteration
        ):
            self._close()
            self._seam = _Seam(before, tuple(self._history))
        if self._seam is not None:
            self._seam.after.append(step)
            if (
                len(self._seam.after) >= LEVEL_LINES
                and step.record.iteration > self._seam.before.record.iteration
            ):
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
    if again:
        done = f"{counted(again, 'iteration')} done again"
    else:
        done = "nothing done again"
    text = f"restart after iteration {last.iteration:,}: goes on at {first.iteration:,}, {done}"
    if missing > _interval(seam.history):
        wrong.append(f"no line between iterations {last.iteration:,} and {first.iteration:,}")
    evidence = (*wrong, *_same_iterations(seam))
    text += f"; {wrong[0]}" if wrong else ""
    return NumberAnomaly(
        "restart",
        min(first.iteration, last.iteration),
        last=max(first.iteration, last.iteration),
        line=seam.after[0].line,
        text=text,
        is_wrong=bool(wrong),
        evidence=evidence,
    )


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
        if (
            before is None
            or before.global_batch_size != first.global_batch_size
            or not first.global_batch_size
        ):
            return
        distance = first.iteration - before.iteration
        if before.consumed_samples is None:
            return
        expected = before.consumed_samples + distance * first.global_batch_size
    if expected is None or first.consumed_samples is None:
        return
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
        pace = abs(usual - before[0].learning_rate) / max(
            1, before[-1].iteration - before[0].iteration
        )
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
    finite = [
        (old, new)
        for old, new in twice
        if old is not None and new is not None and math.isfinite(old) and math.isfinite(new)
    ]
    if finite:
        worst = max(abs(new - old) for old, new in finite)
        if worst == 0:
            said = "are the same"
        else:
            said = f"differ by at most {worst:.3g}"
        yield f"the losses of {counted(len(finite), 'iteration')} that were done twice {said}"


def _finite(steps: Sequence[LoggedStep], name: str) -> list[float]:
    values = (getattr(step.record, name) for step in steps)
    return [value for value in values if value is not None and math.isfinite(value)]


def _interval(history: Sequence[LoggedStep]) -> int:
    """Iterations from one line to the next, as the last lines before the restart have them."""
    last = [step.record.iteration for step in history[-3:]]
    return max((second - first for first, second in pairwise(last)), default=1)


# What a log does not say: losses that are missing or not finite, updates that were dropped, missing
# iterations.

# equal norms after one another; by chance a rounded one repeats, eight do not
SURE_REPEATS = {True: 2, False: 8}
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
        is_missing = step.record.has_bad_loss
        if is_missing:
            if self._goes_on:
                self._found[-1:] = [self._found[-1].with_step(step)]
            else:
                self._found[-1:] = [*self._found[-1:], _stretch(step)]
        self._goes_on = is_missing

    def anomalies(self) -> Iterator[NumberAnomaly]:
        for one in self._found:
            if one.count == 1:
                lines = "1 line"
            else:
                lines = f"{one.count:,} lines"
            text = f"no finite loss {span(one.first, one.last)} ({lines}): it was NaN or infinite"
            yield NumberAnomaly("missing-loss", one.first, last=one.last, line=one.line, text=text)


class RepeatedNorms:
    """The same gradient norm again and again: the step was dropped, and the norm of an earlier one
    is shown.
    """

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
            where = span(one.first, one.last)
            text = (
                f"the gradient norm is {norm:.6g} in {one.count:,} lines after one another, {where}"
            )
            yield NumberAnomaly("repeated-norm", one.first, last=one.last, line=one.line, text=text)

    def _close(self) -> None:
        now, self._now = self._now, None
        if now is not None and self._norm is not None and now.count >= SURE_REPEATS[self._is_sure]:
            self._found.append((now, self._norm))


class DroppedUpdates:
    """Updates that the optimizer dropped. Some are the loss scale of fp16 at work; many in a row
    change nothing.
    """

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
        if self._now is None:
            self._now = _stretch(step)
        else:
            self._now = self._now.with_step(step)
        if self._longest is None or self._now.count > self._longest.count:
            self._longest = self._now

    def anomalies(self) -> Iterator[NumberAnomaly]:
        if self._first is None or self._longest is None:
            return
        is_wrong = self._longest.count >= DROPPED_IN_A_ROW
        row = ""
        if is_wrong:
            row = f", {self._longest.count:,} lines after one another {span(self._longest.first, self._longest.last)}"
        text = f"{self._all:,} updates were dropped in {self._lines:,} lines{row}"
        first = self._first.record.iteration
        yield NumberAnomaly(
            "dropped-steps",
            first,
            last=self._last,
            line=self._first.line,
            text=text,
            is_wrong=is_wrong,
        )


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
            self._found.append(NumberAnomaly("gap", first, last=last, line=step.line, text=text))
        self._interval = min(self._interval or distance, distance)

    def anomalies(self) -> Iterator[NumberAnomaly]:
        yield from self._found


# Throughput that falls at once and stays low: one slow GPU holds all others back.

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
    """Compares within one start, at one batch size and one sequence length: else the numbers mean
    something else.
    """

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
        if like != self._like or (
            self._recent and record.iteration <= self._recent[-1].record.iteration
        ):
            self._close("to the next start, or change of batch")
            self._usual.clear()
            self._recent.clear()
            self._like = like
        self._recent.append(step)
        mean = sum(map(_rate, self._recent)) / len(self._recent)
        if self._fall is not None:
            self._fall.sum, self._fall.lines, self._fall.last = (
                self._fall.sum + rate,
                self._fall.lines + 1,
                record.iteration,
            )
            if mean >= RETURN * self._fall.usual:
                self._close("")
        elif len(self._recent) == MEAN_LINES and mean < FALL * self._usual.value:
            first = self._recent[0]
            self._fall = _Fall(
                first,
                self._usual.value,
                last=record.iteration,
                sum=sum(map(_rate, self._recent)),
                lines=MEAN_LINES,
            )
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
        change = f"{_shown(fall.usual)} to {_shown(low)} {unit} ({low / fall.usual - 1:+.1%})"
        text = f"throughput falls from {change} at iteration {first:,}, {span}"
        self._found.append(
            NumberAnomaly("throughput-fall", first, last=fall.last, line=fall.first.line, text=text)
        )


def _rate(step: LoggedStep) -> float:
    """TFLOPs where they are logged, samples a second where those are, else iterations an hour."""
    record = step.record
    if math.isfinite(record.tflops):
        return record.tflops
    if math.isfinite(record.samples_per_second):
        return record.samples_per_second
    if record.seconds_per_iteration > 0:
        return 3600.0 / record.seconds_per_iteration
    return math.nan


def _shown(value: float) -> str:
    """A small training's TFLOPs are thousandths of one."""
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.3g}"


def _unit(step: LoggedStep) -> str:
    if math.isfinite(step.record.tflops):
        return "TFLOPs"
    if math.isfinite(step.record.samples_per_second):
        return "samples/s"
    return "iterations/h"


RULES: tuple[Callable[[], NumberRule], ...] = (
    Spikes,
    Divergence,
    ThroughputFalls,
    RestartSeams,
    RepeatedNorms,
    MissingLosses,
    DroppedUpdates,
    LogGaps,
)


class CurveJudgement(Record):
    """`steps` lines were read, from iteration `first` to `last`, of `starts` starts. Anomalies by
    iteration.
    """

    steps: int
    first: int
    last: int
    starts: int
    anomalies: tuple[NumberAnomaly, ...]

    @property
    def wrong(self) -> tuple[NumberAnomaly, ...]:
        return tuple(anomaly for anomaly in self.anomalies if anomaly.is_wrong)


def judge(steps: Iterable[LoggedStep]) -> CurveJudgement:
    """Judge a whole course. Pure; holds no more than the rules remember."""
    rules = [make() for make in RULES]
    count, first, last, starts, start = 0, 0, 0, 0, None
    for step in steps:
        first = first if count else step.record.iteration
        last = max(last, step.record.iteration)
        count += 1
        starts += step.start != start
        start = step.start
        for rule in rules:
            rule.take(step)
    found = [anomaly for rule in rules for anomaly in rule.anomalies()]
    return CurveJudgement(
        count,
        first,
        last=last,
        starts=starts,
        anomalies=tuple(sorted(found, key=lambda one: (one.first, one.kind))),
    )
