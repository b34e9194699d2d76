"""How far a long reading, copying or removing is, on stderr: a bar on a terminal, else one line now
and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from tr11ops.base.units import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 60.0  # between two lines where there is no terminal
RATE_SECONDS = 30.0  # the rate is that of the last so many seconds


class Rate:
    """Bytes per second lately, by a clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._points: deque[tuple[float, int]] = deque([(now, 0)])

    def note(self, now: float, done: int) -> None:
        """Take a count of all bytes so far into account."""
        self._points.append((now, done))
        while len(self._points) > 2 and self._points[1][0] <= now - RATE_SECONDS:
            self._points.popleft()

    def per_second(self) -> float | None:
        """None where nothing has moved yet."""
        (begin, first), (end, last) = self._points[0], self._points[-1]
        if end > begin and last > first:
            return (last - first) / (end - begin)
        return None


class ByteProgress:
    """Progress of `total` bytes of `what`, a word or two. A context manager; `advance` may be
    called by any thread.

    `is_quiet` shows nothing (for `--json`), so that callers need no second way.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        is_quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._done = what, total, 0
        self._is_quiet = is_quiet
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._rate = Rate(clock())
        self._told = clock()
        self._noted = clock()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ByteProgress:
        if not self._is_quiet and self._stream.isatty():
            self._bar = _bar(self._stream)
            self._task = self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def done(self) -> int:
        """Bytes so far."""
        return self._done

    def advance(self, count: int) -> None:
        """So many bytes more are done; below zero, some have to be done again."""
        with self._lock:
            self._done += count
            if self._bar is not None and self._task is not None:
                self._bar.advance(self._task, count)
                return
            now = self._clock()
            if now - self._noted >= 1.0:
                self._noted = now
                self._rate.note(now, self._done)
            if not self._is_quiet and now - self._told >= LINE_SECONDS:
                self._told = now
                self._print(self.line())

    def describe(self, what: str) -> None:
        """Name what is being done now, in a word or two."""
        with self._lock:
            self._what = what
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, description=what)

    def say(self, line: str) -> None:
        """A line of its own for the person, above the bar; also where progress is not shown."""
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(line), soft_wrap=True)
        else:
            self._print(line)

    def line(self) -> str:
        """Where it stands, in one line."""
        share = ""
        if self._total:
            share = f" ({100 * self._done / self._total:.0f} %)"
        text = f"{self._what}: {size(self._done)} of {size(self._total)}{share}"
        rate = self._rate.per_second()
        if rate is None:
            return text
        left = max(0, self._total - self._done) / rate
        return f"{text}, {size(rate)}/s, {duration(left)} left"

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def by_file(advance: Callable[[int], None]) -> Callable[[str, int], None]:
    """What hears (file, position in it), from any thread, and tells `advance` of the bytes that are
    new.

    A file that is sent again from its beginning takes back what it had told.
    """
    reached: dict[str, int] = {}
    lock = threading.Lock()

    def told(path: str, position: int) -> None:
        with lock:
            new = position - reached.get(path, 0)
            reached[path] = position
        advance(new)

    return told


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Amounts(ProgressColumn):
        """In the units of everything else here."""

        def render(self, task: Task) -> Text:
            text = f"{size(task.completed)} of {size(task.total or 0)}"
            if task.speed:
                text += f", {size(task.speed)}/s"
            if task.time_remaining is not None:
                text += f", {duration(task.time_remaining)}"
            return Text(text)

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TextColumn("{task.percentage:>3.0f}%"),
        Amounts(),
        console=Console(file=stream, highlight=False, emoji=False),
        speed_estimate_period=RATE_SECONDS,
        transient=True,
    )
