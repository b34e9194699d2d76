"""The status screen: `may I sleep?` answered in its first lines. Pure: the status document in, a renderable out."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tr11ops.base.glyphs import plain
from tr11ops.base.units import timestamp
from tr11ops.status import care, rows
from tr11ops.status.document import Status
from tr11ops.status.fit import fitted
from tr11ops.status.rows import LABEL_WIDTH, Row, Screen
from tr11ops.watchdog.verdict import VerdictWord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = {
    VerdictWord.HEALTHY: "bold green", VerdictWord.FINISHED: "bold green", VerdictWord.STARTING: "bold cyan",
    VerdictWord.QUEUED: "bold cyan", VerdictWord.AT_RISK: "bold white on red",
    VerdictWord.STOPPED: "bold yellow", VerdictWord.STALLED: "bold white on red", VerdictWord.DOWN: "bold white on red",
    VerdictWord.UNKNOWN: "bold magenta",
}  # fmt: skip
ANSWER_STYLES = {True: "bold green", False: "bold red", None: "bold magenta"}
GREEN = frozenset(
    {VerdictWord.HEALTHY, VerdictWord.FINISHED}
)  # words that are good news where a person may sleep, and only there


def badge_style(word: VerdictWord, may_sleep: bool | None) -> str:
    """The style of a verdict's word. Nothing is green beside an answer that is not "you may sleep"."""
    return "bold yellow" if word in GREEN and may_sleep is not True else STYLES[word]


def render(status: Status, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns, and of `screen.height` lines where it has one."""
    from rich.console import Group
    from rich.table import Table

    badge, name = badge_style(status.verdict, status.may_sleep), f"{status.run.name} / {status.run.variant}"
    head = heading(status.verdict.upper(), badge, name, status.time, screen)
    words = line(f"{status.answer}.", screen, ANSWER_STYLES[status.may_sleep])
    words.append(plain(f" {status.why[:1].upper()}{status.why[1:]}.", screen.unicode), "not bold default")
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(words)
    needs: list[Row] = [
        ("  first" if index == 0 else "", need.fix, "bold") for index, need in enumerate(status.sleep_needs)
    ]
    top = _height(head, screen.width) + _height(words, screen.width)

    def lines(row: Row) -> int:
        return max(1, _height(line(row[1], screen), screen.content_width))

    room = None if screen.height is None else max(1, screen.height - top - sum(map(lines, needs)))
    incidents, unknown = rows.incidents_of(status.findings), list(rows.unknown_rows(status))
    rest = fitted(incidents, unknown, list(_details(status, screen)), room, lines)
    return Group(head, why, table_of((*needs, *rest), screen))


def _details(status: Status, screen: Screen) -> Iterator[Row]:
    """The state of everything, as (label, text, style)."""
    yield from rows.training(status, screen)
    yield "", "", ""
    yield from rows.jobs(status)
    yield from care.nodes(status)
    yield from rows.relaunch(status)
    yield from rows.attempts(status)
    yield from rows.checkpoint(status)
    yield from rows.next_save(status)
    yield from care.copies(status)
    yield from care.filesystems(status)
    yield from care.periodic(status)
    yield from care.alerts(status)
    yield from rows.stops(status, screen)


# ----------------------------------------------------------------------------- how, for the remote screen too
def line(words: str, screen: Screen, style: str = "") -> Text:
    """Words that a terminal can be trusted with."""
    from rich.text import Text

    return Text(plain(words, screen.unicode), style=style, overflow="fold")


def table_of(given: Iterable[Row], screen: Screen) -> Table:
    """The rows, their labels in a column of their own."""
    from rich.table import Table

    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for label, words, style in given:
        body.add_row(line(label, screen, "dim"), line(words, screen, style))
    return body


def heading(word: str, style: str, name: str, time: float, screen: Screen) -> Text:
    """The first line: the word, the run, the time; the time below where one line does not hold all."""
    from rich.text import Text

    title = Text(overflow="fold")
    title.append(f" {word} ", style)
    title.append(plain(f" {name}", screen.unicode), "bold")
    moment = timestamp(time, screen.zone)
    gap = screen.width - len(title) - len(moment)
    title.append((" " * gap if gap > 1 else "\n ") + moment, "dim")
    return title


def _height(text: Text, width: int) -> int:
    """Lines that a text takes."""
    from rich.console import Console

    return len(text.wrap(Console(width=width, file=io.StringIO()), width, overflow="fold"))
