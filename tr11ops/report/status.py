"""The status screen: `may I sleep?` answered in its first lines. Pure: what was seen and found in, renderable out."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from tr11ops.detect.finding import Finding
from tr11ops.report.glyphs import plain
from tr11ops.report.status_answer import answer
from tr11ops.report.status_care import Row
from tr11ops.report.status_fit import fitted
from tr11ops.report.status_rows import LABEL_WIDTH, Screen, clock, detail_rows, unknown_rows
from tr11ops.report.status_surroundings import Surroundings
from tr11ops.snapshot import Snapshot
from tr11ops.verdict import Verdict, Word

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Screen", "badge_style", "heading", "render"]

STYLES = {
    Word.HEALTHY: "bold green", Word.FINISHED: "bold green", Word.STARTING: "bold cyan", Word.QUEUED: "bold cyan",
    Word.STOPPED: "bold yellow", Word.STALLED: "bold white on red", Word.DOWN: "bold white on red",
    Word.UNKNOWN: "bold magenta",
}  # fmt: skip
ANSWER_STYLES = {True: "bold green", False: "bold red", None: "bold magenta"}
GREEN = frozenset({Word.HEALTHY, Word.FINISHED})  # words that are good news where a person may sleep, and only there


def badge_style(word: Word, may_sleep: bool | None) -> str:
    """The style of a verdict's word. Nothing is green beside an answer that is not "you may sleep"."""
    return "bold yellow" if word in GREEN and may_sleep is not True else STYLES[word]


def render(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    screen: Screen,
    surroundings: Surroundings = Surroundings(),  # noqa: B008  frozen
) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns, and of `screen.height` lines where it has one."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(plain(words, screen.unicode), style=style, overflow="fold")

    said = answer(snapshot, findings, verdict, surroundings)
    head = heading(
        verdict.word.upper(), badge_style(verdict.word, said.may_sleep), _name(snapshot), snapshot.time, screen
    )
    words = text(f"{said.text}.", ANSWER_STYLES[said.may_sleep])
    words.append(plain(f" {verdict.why[:1].upper()}{verdict.why[1:]}.", screen.unicode), "not bold default")
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(words)
    needs: list[Row] = [("  first" if index == 0 else "", need.fix, "bold") for index, need in enumerate(said.needs)]
    top = _height(head, screen.width) + _height(words, screen.width)

    def lines(row: Row) -> int:
        return max(1, _height(text(row[1]), screen.content_width))

    room = None if screen.height is None else max(1, screen.height - top - sum(map(lines, needs)))
    details = list(detail_rows(snapshot, surroundings, verdict, screen))
    rest = fitted(findings, list(unknown_rows(snapshot, surroundings)), details, room, lines)
    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for label, line, style in (*needs, *rest):
        body.add_row(text(label, "dim"), text(line, style))
    return Group(head, why, body)


def heading(word: str, style: str, name: str, time: float, screen: Screen) -> Text:
    """The first line: the word, the run, the time; the time below where one line does not hold all."""
    from rich.text import Text

    title = Text(overflow="fold")
    title.append(f" {word} ", style)
    title.append(plain(f" {name}", screen.unicode), "bold")
    moment = clock(time, screen)
    gap = screen.width - len(title) - len(moment)
    title.append((" " * gap if gap > 1 else "\n ") + moment, "dim")
    return title


def _name(snapshot: Snapshot) -> str:
    return f"{snapshot.run.name} / {snapshot.run.variant}"


def _height(text: Text, width: int) -> int:
    """Lines that a text takes."""
    from rich.console import Console

    return len(text.wrap(Console(width=width, file=io.StringIO()), width, overflow="fold"))
