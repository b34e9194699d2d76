"""`tr11 status --watch`: looks in a thread of their own, so that the screen stays alive while a
scheduler is silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tr11ops.base.units import duration
from tr11ops.cli.common import say
from tr11ops.cli.context import emit
from tr11ops.cli.terminal import drawing_console
from trainer.contract.errors import Tr11Error

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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
class Watcher:
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
            if self.last is None:
                age = ""
            else:
                age = f"seen {duration(now - self.seen_at)} ago; "
            waiting = self.began is not None and now - self.began >= WAITING_SECONDS
            doing = ""
            if waiting:
                doing = f"looking since {duration(now - (self.began or now))}; "
            trouble = ""
            if self.trouble:
                trouble = f"the last look failed ({self.trouble}); "
            return f"{age}{trouble}{doing}every {self.seconds:g} s; Ctrl-C ends"


def look_again(look: Callable[[], WatchFrame], seconds: float, as_json: bool) -> int:
    """Look again and again until Ctrl-C; returns the exit code of the last look."""
    console = drawing_console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        return watch_lines(look, seconds, as_json, console)
    return watch_live(look, seconds, console)


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
    from rich.text import Text

    watcher = Watcher(view, seconds)
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


def _frame(watcher: Watcher, console: Console, now: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from tr11ops.base.glyphs import plain

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
