"""A whole log in one table: steps, losses, restarts, gaps, the watchdog's lines, how it ended. Of any training's log.

The log is read once, in blocks; only lines that hold one of a few words are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tr11ops.logs.lines import ATTEMPT, LOSS, STEP, body, is_step
from tr11ops.logs.reader import LONGEST_LINE_BYTES, Reader

SCAN_BYTES = 4 << 20
KEPT = 1000  # of a kind of event; all are counted
SILENT_PULSES = 3

_WORDS = (
    b"iteration ", b"] PULSE: ", b"] ***ALERT", b"exiting program ", b"Detected kill switch at",
    b"after training is done", b"tr11: attempt ", b"using world size: ", b"Traceback (most recent call last)",
)  # fmt: skip
_VALIDATION = re.compile(r"(\S+) loss at iteration (\d{1,15}) \| lm loss value: *([-+.\dEe]+|nan|-?inf) \|")
_WORLD = re.compile(r"^using world size: \d+")
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] ")
_PULSES = (
    ("not running nor scheduled", re.compile(r"\*\*\*ALERT")),
    ("running", re.compile(r" is running for ")),
    ("waiting for the previous task", re.compile(r"waiting for the previous array task")),
    ("waiting for a dependency", re.compile(r"waiting through the dependency")),
    ("waiting to be scheduled", re.compile(r"waiting to be scheduled")),
    ("start is scheduled", re.compile(r"is scheduled to start")),
)
_ENDS = (
    ("its time was up", re.compile(r"exiting program after .* minutes")),
    ("exit interval", re.compile(r"exiting program at iteration")),
    ("signal", re.compile(r"exiting program on signal")),
    ("kill switch", re.compile(r"Detected kill switch at")),
    ("finished", re.compile(r"after training is done")),
)


@dataclass(frozen=True)
class Restart:
    """A start of the training. `before` and `after`: the last step before it and the first one after it."""

    before: int | None
    after: int | None
    attempt: str = ""

    @property
    def redone(self) -> int:
        """Steps that were trained a second time."""
        return 0 if self.before is None or self.after is None else max(0, self.before - self.after + 1)


@dataclass(frozen=True)
class End:
    """A clean end that the log tells of: how, and after which step."""

    how: str
    iteration: int | None


@dataclass(frozen=True)
class Silence:
    """Pulses in a row that said running while no step came: after which step, from when to when, and how many."""

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
    starts: list[Restart] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)
    validations: dict[str, tuple[int, float]] = field(default_factory=dict)
    pulses: dict[str, int] = field(default_factory=dict)  # by what they said
    tracebacks: int = 0


def summarise(reader: Reader, size: int, progress: Callable[[int], None] = lambda position: None) -> Summary:
    """Read the first `size` bytes of a log. Raises OSError as the reader does."""
    scan = _Scan(Summary(bytes=size))
    for line in _interesting(reader, size, progress):
        scan.read(line)
    return scan.finished()


def _interesting(reader: Reader, size: int, progress: Callable[[int], None]) -> Iterator[str]:
    """The lines that hold one of the words, in order."""
    position, rest = 0, b""
    while position < size and (block := reader.read(position, min(SCAN_BYTES, size - position))):
        position += len(block)
        data = rest + block
        whole = len(data) if position >= size else data.rfind(b"\n") + 1
        starts = {data.rfind(b"\n", 0, at) + 1 for word in _WORDS for at in _places(data, word, whole)}
        for start in sorted(starts):
            end = data.find(b"\n", start)
            yield data[start : end if end >= 0 else len(data)].decode("utf-8", "replace")
        rest = data[whole:][-LONGEST_LINE_BYTES:]
        progress(position)


def _places(data: bytes, word: bytes, end: int) -> Iterator[int]:
    at = data.find(word, 0, end)
    while at >= 0:
        yield at
        at = data.find(word, at + len(word), end)


class _Scan:
    """Takes the lines in order and keeps the summary."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._previous: int | None = None
        self._interval = 1
        self._start: Restart | None = None  # one whose first step has not come yet
        self._ended: str | None = None
        self._running: list[str] = []  # first and last stamp of the pulses since the last step
        self._running_count = 0

    def read(self, line: str) -> None:
        text = body(line)
        if step := STEP.search(text):
            if is_step(text):
                self._step(int(step[1]), int(step[2]), text)
        elif "] PULSE: " in text or "] ***ALERT" in text:
            self._pulse(text)
        elif validation := _VALIDATION.search(text):
            self._summary.validations[validation[1]] = (int(validation[2]), _number(validation[3]))
        elif "Traceback (most recent call last)" in text:
            self._summary.tracebacks += 1
        elif (attempt := ATTEMPT.match(text)) or _WORLD.match(text):
            self._begin(attempt[1] if attempt else "")
        else:
            self._end(text)

    def finished(self) -> Summary:
        self._close_silence()
        if self._start is not None:
            _keep(self._summary.starts, self._start)
        return self._summary

    def _step(self, iteration: int, total: int, text: str) -> None:
        found, before = self._summary, self._previous
        self._close_silence()
        if self._start is not None:
            _keep(found.starts, Restart(self._start.before, iteration, self._start.attempt))
            self._start = None
        elif before is None or iteration <= before:
            _keep(found.starts, Restart(before, iteration))
        elif iteration > before + self._interval:
            if found.steps == 1:
                self._interval = iteration - before  # not every step is logged
            else:
                _keep(found.gaps, (before, iteration))
        self._previous, self._ended = iteration, None
        found.steps += 1
        found.first = iteration if found.first is None else found.first
        found.last, found.total = iteration, total
        found.highest = max(iteration, found.highest or 0)
        loss = LOSS.search(text)
        self._loss(iteration, _number(loss[1]) if loss else math.nan)

    def _loss(self, iteration: int, loss: float) -> None:
        found = self._summary
        if not math.isfinite(loss):
            found.without_loss += 1
            return
        found.first_loss = loss if found.first_loss is None else found.first_loss
        found.last_loss = loss
        if found.lowest_loss is None or loss < found.lowest_loss:
            found.lowest_loss, found.lowest_at = loss, iteration

    def _begin(self, attempt: str) -> None:
        if self._start is not None and self._start.attempt == attempt and not attempt:
            return  # said by more than one rank
        if self._start is not None:
            _keep(self._summary.starts, self._start)
        self._start, self._ended = Restart(self._previous, None, attempt), None

    def _end(self, text: str) -> None:
        how = next((name for name, pattern in _ENDS if pattern.search(text)), None)
        if how is not None and how != self._ended:  # each rank may say it
            self._ended = how
            _keep(self._summary.ends, End(how, self._previous))

    def _pulse(self, text: str) -> None:
        verdict = next((name for name, pattern in _PULSES if pattern.search(text)), "other")
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
        self._running, self._running_count = [], 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _keep(entries: list, entry: object) -> None:  # type: ignore[type-arg]
    if len(entries) < KEPT:
        entries.append(entry)
