"""A whole log in one table: steps, losses, restarts, gaps, the watchdog's lines, how it ended. Of
any training's log.

The log is read once, in blocks; only lines that hold one of a few words are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.matcher import Matcher, text_of
from tr11ops.diagnose.signature import Role, Rule
from tr11ops.dialects.reading import StepReader
from tr11ops.logs.lines import task_of
from tr11ops.logs.reader import LONGEST_LINE_BYTES, LogReader
from trainer.contract.record import Record

SCAN_BYTES = 4 << 20
KEPT = 1000  # of a kind of event; all are counted
SILENT_PULSES = 3

_VALIDATION = re.compile(
    r"(\S+) loss at iteration (\d{1,15}) \| lm loss value: *([-+.\dEe]+|nan|-?inf) \|"
)
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] ")
_CONSUMED = b" | consumed samples"
_LOSS = b" lm loss: "
# Iterations, totals (0 where it is not told), losses; a loss that is missing is NaN.
StepColumns = tuple[list[int], list[int], list[float]]
_HEAD = b"iteration %8d/%8d"
_BAR = ord("|")
_HEAD_BYTES = len(_HEAD % (1, 1))  # of numbers of up to eight digits
_EVALUATION = re.compile(rb" loss at iteration \d{1,15} \| lm loss value: ")
_PULSES = {
    "pulse-alert": "not running nor scheduled",
    "pulse-running": "running",
    "pulse-array": "waiting for the previous task",
    "pulse-dependency": "waiting for a dependency",
    "pulse-queued": "waiting to be scheduled",
    "pulse-scheduled": "start is scheduled",
}
_ENDS = {
    "end-time": "its time was up",
    "end-interval": "exit interval",
    "end-signal": "signal",
    "end-switch": "kill switch",
    "end-finished": "finished",
}
_FAMILIES = frozenset({"ends", "pulse"})
_TRACEBACK = "python-traceback"


@cache
def _matcher() -> Matcher:
    """The part of the catalogue that a summary tells of: starts, ends, the watchdog's lines,
    tracebacks.
    """
    return Matcher([rule for rule in rules() if _is_told(rule)])


def _is_told(rule: Rule) -> bool:
    signatures = [*rule.codes.values(), *([] if rule.signature is None else [rule.signature])]
    return any(one.family in _FAMILIES or one.id == _TRACEBACK for one in signatures)


class LoggedStart(Record):
    """A start of the training. `before` and `after`: the last step before it and the first one
    after it.
    """

    before: int | None
    after: int | None
    attempt: str = ""

    @property
    def redone(self) -> int:
        """Steps that were trained a second time."""
        if self.before is None or self.after is None:
            return 0
        return max(0, self.before - self.after + 1)


class CleanEnd(Record):
    """A clean end that the log tells of: how, and after which step."""

    how: str
    iteration: int | None


class Silence(Record):
    """Pulses in a row that said running while no step came: after which step, from when to when,
    and how many.
    """

    iteration: int
    first: str
    last: str
    pulses: int


@dataclass
class Summary:
    """What a log tells. Lists hold the first KEPT entries of their kind."""

    bytes: int = 0
    steps: int = 0
    first: int | None = None
    last: int | None = None
    highest: int | None = None
    total: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    lowest_loss: float | None = None
    lowest_at: int | None = None
    without_loss: int = 0
    unnumbered: int = 0  # lines of steps that do not name their step
    starts: list[LoggedStart] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    ends: list[CleanEnd] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)
    validations: dict[str, tuple[int, float]] = field(default_factory=dict)
    pulses: dict[str, int] = field(default_factory=dict)  # by what they said
    tracebacks: int = 0


def summarise(
    reader: LogReader, size: int, progress: Callable[[int], None] = lambda position: None
) -> Summary:
    """Read the first `size` bytes of a log. Raises OSError as the reader does."""
    scan = _Scan(Summary(bytes=size))
    position = 0
    rest = b""
    while position < size and (block := reader.read(position, min(SCAN_BYTES, size - position))):
        position += len(block)
        data = rest + block
        if position >= size:
            whole = len(data)
        else:
            whole = data.rfind(b"\n") + 1
        scan.block(data if whole == len(data) else data[:whole])
        rest = data[whole:][-LONGEST_LINE_BYTES:]
        progress(position)
    return scan.finished()


class _Scan:
    """Takes the lines in order and keeps the summary."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._previous: int | None = None
        self._interval = 1
        self._start: LoggedStart | None = None  # one whose first step has not come yet
        self._ended: str | None = None
        self._running: list[str] = []  # first and last stamp of the pulses since the last step
        self._running_count = 0
        self._is_usual = False  # whether it is a log of Megatron's form
        self._reader = StepReader()

    def block(self, block: bytes) -> None:
        """The next block of whole lines: its steps and its other lines, in order."""
        self._is_usual = self._is_usual or _CONSUMED in block
        position = 0
        for at, line, ids in self._others(block):
            self._steps(self._lines(block, position, at))
            self._other(line, ids)
            position = at
        self._steps(self._lines(block, position, len(block)))

    def _lines(self, block: bytes, start: int, end: int) -> StepColumns:
        """The steps in a part of a block of whole lines, in whatever form the log has them."""
        if self._is_usual:
            return _step_lines(block, start, end)
        found: list[tuple[int, int, float]] = []
        for line in block[start:end].split(b"\n"):
            if not self._reader.takes(line):
                continue
            for step in self._reader.feed(line.decode("utf-8", "replace")):
                if not step.is_whole or (step.loss is None and not step.lacks_loss):
                    continue  # a bar, or another line that only counts
                if step.iteration is None:
                    self._summary.unnumbered += 1
                    continue
                one = step.iteration, step.total or 0, math.nan if step.loss is None else step.loss
                # a bar that is drawn again, another rank
                if found and found[-1][0] == step.iteration:
                    found[-1] = one
                elif found or self._start is not None or step.iteration != self._previous:
                    found.append(one)
        return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]

    def _others(self, block: bytes) -> list[tuple[int, str, tuple[int, ...]]]:
        """Offset and text of the lines that are no step, and which rules may match them."""
        found = [
            (one.start, text_of(block, one), one.rules) for one in _matcher().candidates(block)
        ]
        for match in _EVALUATION.finditer(block):
            start = block.rfind(b"\n", 0, match.start()) + 1
            end = block.find(b"\n", start)
            found.append(
                (
                    start,
                    block[start : end if end >= 0 else len(block)].decode("utf-8", "replace"),
                    (),
                )
            )
        return sorted(found)

    def _steps(self, found: StepColumns) -> None:
        """Some steps in a row; at once where each follows the one before it."""
        iterations, totals, losses = found
        number = 0
        while number < len(iterations):
            before = self._previous
            if self._start is None and before is not None and self._summary.steps > 1:
                end = number + _following(iterations[number:], before, self._interval)
                if end > number:
                    self._run(iterations[number:end], losses[number:end], totals[end - 1])
                    number = end
                    continue
            self._step(iterations[number], totals[number], losses[number])
            number += 1

    def _run(self, iterations: list[int], losses: list[float], total: int) -> None:
        """Steps that follow each other and the last one."""
        self._close_silence()
        found = self._summary
        self._previous = found.last = iterations[-1]
        self._ended = None
        found.total = total
        found.steps += len(iterations)
        found.highest = max(iterations[-1], found.highest or 0)
        if math.isfinite(sum(losses)):
            finite = losses
        else:
            finite = [loss for loss in losses if math.isfinite(loss)]
        found.without_loss += len(losses) - len(finite)
        if finite:
            lowest = min(finite)
            self._loss(iterations[0], finite[0])
            self._loss(iterations[losses.index(lowest)], lowest)
            self._loss(iterations[-1], finite[-1])

    def _other(self, line: str, numbers: tuple[int, ...]) -> None:
        if validation := _VALIDATION.search(line):
            self._summary.validations[validation[1]] = (int(validation[2]), _number(validation[3]))
        _, text = split_prefixes(line)
        for signature, match in _matcher().match(text, numbers):
            if signature.family == "pulse":
                self._pulse(line, _PULSES.get(signature.id, "other"))
                return
            if signature.id == _TRACEBACK:
                self._summary.tracebacks += 1
            elif signature.role is Role.START:
                self._begin(task_of(text) or match.groupdict().get("attempt") or "")
            elif signature.id in _ENDS:
                self._end(_ENDS[signature.id])

    def finished(self) -> Summary:
        self._close_silence()
        if self._start is not None:
            _keep(self._summary.starts, self._start)
        return self._summary

    def _step(self, iteration: int, total: int, loss: float) -> None:
        found = self._summary
        before = self._previous
        self._close_silence()
        if self._start is not None:
            _keep(found.starts, LoggedStart(self._start.before, iteration, self._start.attempt))
            self._start = None
        elif before is None or iteration <= before:
            _keep(found.starts, LoggedStart(before, iteration))
        elif iteration > before + self._interval:
            if found.steps == 1:
                self._interval = iteration - before  # not every step is logged
            else:
                _keep(found.gaps, (before, iteration))
        self._previous = iteration
        self._ended = None
        found.steps += 1
        found.first = iteration if found.first is None else found.first
        found.last = iteration
        found.total = total
        found.highest = max(iteration, found.highest or 0)
        self._loss(iteration, loss)

    def _loss(self, iteration: int, loss: float) -> None:
        found = self._summary
        if not math.isfinite(loss):
            found.without_loss += 1
            return
        found.first_loss = loss if found.first_loss is None else found.first_loss
        found.last_loss = loss
        if found.lowest_loss is None or loss < found.lowest_loss:
            found.lowest_loss = loss
            found.lowest_at = iteration

    def _begin(self, attempt: str) -> None:
        if self._start is not None and not attempt:
            return  # the trainer's own line after the agent's; or said by more than one rank
        if self._start is not None:
            _keep(self._summary.starts, self._start)
        self._start = LoggedStart(self._previous, None, attempt)
        self._ended = None

    def _end(self, how: str) -> None:
        if how != self._ended:  # each rank may say it
            self._ended = how
            _keep(self._summary.ends, CleanEnd(how, self._previous))

    def _pulse(self, text: str, verdict: str) -> None:
        self._summary.pulses[verdict] = self._summary.pulses.get(verdict, 0) + 1
        stamp = _STAMP.match(text)
        if verdict != "running" or stamp is None or self._previous is None:
            self._close_silence()
        else:
            self._running_count += 1
            self._running = [self._running[0] if self._running else stamp[1], stamp[1]]

    def _close_silence(self) -> None:
        if self._running_count >= SILENT_PULSES and self._previous is not None:
            first, last = self._running
            _keep(self._summary.silences, Silence(self._previous, first, last, self._running_count))
        self._running = []
        self._running_count = 0


def _following(iterations: list[int], before: int, interval: int) -> int:
    """How many of these, from the first one on, follow the one before them by the interval."""
    if iterations == list(
        range(before + interval, before + interval * (len(iterations) + 1), interval)
    ):
        return len(iterations)
    count = 0
    while count < len(iterations) and iterations[count] == before + interval:
        before, count = iterations[count], count + 1
    return count


def _step_lines(block: bytes, start: int, end: int) -> StepColumns:
    """The lines of steps in a part of a block of whole lines.

    A line that a crash or a full disk cut says nothing sure. Plain searches: an expression takes
    four times as long. Where a line stands as the one before it did, one iteration on, its numbers
    are not read again.
    """
    iterations: list[int] = []
    totals: list[int] = []
    losses: list[float] = []
    iteration = -1
    step = 0
    total = 0
    width = 0
    at = block.find(_CONSUMED, start, end)
    while at >= 0:
        line_end = block.find(b"\n", at)
        if line_end < 0:
            line_end = len(block)
        if step > 0 and block.startswith(
            _HEAD % (iteration + step, total), max(start, at - _HEAD_BYTES)
        ):
            iteration += step
        else:
            before = iteration
            numbers = _numbers(block[max(start, at - 64) : at])
            iteration, total = numbers or (-1, 0)
            step = 0
            if numbers and before >= 0:
                step = iteration - before
        loss = at + width
        if not block.startswith(_LOSS, loss):
            loss = block.find(_LOSS, at, line_end)
            width = 0
            if loss >= 0:
                width = loss - at
        if loss >= 0:
            text = block[loss + len(_LOSS) : block.find(b" |", loss + len(_LOSS), line_end)]
        else:
            text = b"nan"
        if iteration >= 0 and (
            block[line_end - 1] == _BAR or block[line_end - 3 : line_end].rstrip().endswith(b"|")
        ):
            iterations.append(iteration)
            totals.append(total)
            losses.append(_number(text))
        at = block.find(_CONSUMED, line_end, end)
    return iterations, totals, losses


def _numbers(head: bytes) -> tuple[int, int] | None:
    """Iteration and total of the text before what a step consumed; None where it is no step's."""
    parts = head.rpartition(b"iteration ")[2].split(b"/")
    if len(parts) != 2 or not parts[0].strip().isdigit() or not parts[1].strip().isdigit():
        return None
    return int(parts[0]), int(parts[1])


def _number(text: str | bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _keep(entries: list, entry: object) -> None:  # type: ignore[type-arg]
    if len(entries) < KEPT:
        entries.append(entry)
