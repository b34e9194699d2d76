"""What is shown while something goes on: progress of long work, and a view that is refreshed."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from tr11ops.base.errors import WrongUsage
from tr11ops.base.units import duration, plain, size
from tr11ops.cli.common import drawing_console, is_terminal, say
from tr11ops.cli.runner import Outcome, emit
from trainer.contract.errors import Tr11Error

# ------------------------------------------------------------------------- a view that is refreshed
TICK_SECONDS = 0.25
HINT_LINES = 2
WAITING_SECONDS = 2.0  # a look that takes longer than this is worth a word


class WatchFrame(Protocol):
    """What one look gives: an exit code, a document for programs, and a screen."""

    @property
    def exit_code(self) -> int: ...

    def document(self) -> dict[str, object]: ...

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType: ...


@dataclass
class ViewWatcher:
    """Looks again and again, beside the screen. A slow scheduler is asked less often: the pause is
    at least twice what a look took, and at least what a failure asks for (`wait`). A look that
    fails is said, and the next one is tried.

    `look` may take as long as it likes; it is never called twice at once.
    """

    look: Callable[[], WatchFrame]
    seconds: float
    last: WatchFrame | None = None
    seen_at: float = 0.0  # of `last`, monotonic
    trouble: str = ""
    began: float | None = None  # of the look that is under way, monotonic
    count: int = 0
    _due: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self, now: float) -> int:
        """Start a look if one is due; returns how many have ended so far. `now` is monotonic."""
        with self._lock:
            if self.began is None and now >= self._due:
                self.began = now
                threading.Thread(target=self._look, daemon=True).start()
            return self.count

    def _look(self) -> None:
        found, trouble, wait = None, "", 0.0
        try:
            found = self.look()
        except Exception as error:  # whatever it was, the screen must say so and go on
            trouble, wait = _words(error), _wait(error)
        with self._lock:
            now = time.monotonic()
            took = now - (self.began or now)
            if found is not None:
                self.last, self.seen_at = found, now
            self.trouble, self.began, self._due = (
                trouble,
                None,
                now + max(self.seconds, 2 * took, wait),
            )
            self.count += 1

    def hint(self, now: float) -> str:
        """The line at the foot: how old what is shown is, and what is under way."""
        with self._lock:
            age = ""
            if self.last is not None:
                age = f"seen {duration(now - self.seen_at)} ago; "
            waiting = self.began is not None and now - self.began >= WAITING_SECONDS
            doing = ""
            if waiting:
                doing = f"looking since {duration(now - (self.began or now))}; "
            trouble = ""
            if self.trouble:
                trouble = f"the last look failed ({self.trouble}); "
            return f"{age}{trouble}{doing}every {self.seconds:g} s; Ctrl-C ends"


def look_again(look: Callable[[], WatchFrame], seconds: float, as_json: bool) -> Outcome:
    """Look again and again until Ctrl-C; the exit code is that of the last look."""
    console = drawing_console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        return Outcome(exit_code=watch_lines(look, seconds, as_json, console))
    return Outcome(exit_code=watch_live(look, seconds, console))


def watch_lines(
    view: Callable[[], WatchFrame], seconds: float, as_json: bool, console: Console
) -> int:
    """Into a pipe or a terminal that cannot be drawn on: one look after another. Returns the last
    exit code.
    """
    code = 3
    try:
        for look in _looks(view, seconds):
            code = look.exit_code
            if as_json:
                emit(look.document(), indent=None)
            else:
                console.print(look.screen())
                console.print()
    except KeyboardInterrupt:
        pass
    return code


def _looks(view: Callable[[], WatchFrame], seconds: float) -> Iterator[WatchFrame]:
    while True:
        began = time.monotonic()
        look, wait = None, 0.0
        try:
            look = view()
        except WrongUsage:  # no look makes it right
            raise
        except Exception as error:  # whatever it was, the next look may see
            wait = _wait(error)
            say(f"tr11: the look failed ({_words(error)}); trying again")
        if look is not None:
            yield look
        time.sleep(max(seconds, 2 * (time.monotonic() - began), wait))


def _words(error: Exception) -> str:
    """What failed, on one line."""
    if isinstance(error, Tr11Error):
        kind = ""
    else:
        kind = f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def _wait(error: Exception) -> float:
    """Seconds for which the one who was asked wants to be left alone."""
    wait = getattr(error, "wait", 0.0)
    if isinstance(wait, float):
        return wait
    return 0.0


def watch_live(view: Callable[[], WatchFrame], seconds: float, console: Console) -> int:
    """In a terminal, in place. The screen is drawn again at each look, each second, and when the
    window changes.
    """
    from rich.live import Live

    watcher = ViewWatcher(view, seconds)
    drawn: tuple[object, ...] | None = None
    try:
        with Live(Text("looking ..."), console=console, screen=True, auto_refresh=False) as live:
            while True:
                now = time.monotonic()
                key = (watcher.poll(now), console.size, watcher.hint(now))
                if key != drawn:
                    drawn = key
                    live.update(_frame(watcher, console, now), refresh=True)
                time.sleep(TICK_SECONDS)
    except KeyboardInterrupt:
        if watcher.last is not None:
            console.print(watcher.last.screen())
    if watcher.last is None:
        return 3
    return watcher.last.exit_code


def _frame(watcher: ViewWatcher, console: Console, now: float) -> RenderableType:

    hint = Text(plain(watcher.hint(now), unicode=False), style="dim", no_wrap=True, overflow="crop")
    if watcher.last is None:
        return Group(Text("looking ..."), hint)
    height = max(1, console.size.height - HINT_LINES)
    return Group(
        _cut(watcher.last.screen(console.size.width, height), console, height), Text(""), hint
    )


def _cut(screen: RenderableType, console: Console, height: int) -> RenderableType:
    """The first lines of a screen that is too high, so that the line at the foot is always seen."""
    from rich.segment import Segment, Segments

    lines = console.render_lines(screen, console.options, pad=False)
    if len(lines) <= height:
        return screen
    return Segments(
        [segment for line in lines[:height] for segment in (*line, Segment.line())][:-1]
    )


def bar_of(*columns: ProgressColumn) -> Progress:
    """A bar of these columns, on the error stream, of which nothing is left in the end."""
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def node_progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """How many nodes are done, for whoever looks: called once for each, with a line where it is not
    fine. A bar on a terminal, with the last line; elsewhere the lines.
    """
    if not is_terminal():
        yield _say_any
        return

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    with bar_of(*columns) as bar:
        task = bar.add_task("", total=total, last="")

        def done(line: str) -> None:
            bar.update(task, advance=1, last=line)

        yield done


def _say_any(line: str) -> None:
    if line:
        say(line)


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

    def __exit__(self, *error: object) -> None:
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
