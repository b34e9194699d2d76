"""The status screen: `may I sleep?` answered in its first lines. Pure: what was seen and found in, renderable out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr11ops.detect.finding import Finding
from tr11ops.report.glyphs import plain
from tr11ops.report.status_answer import answer
from tr11ops.report.status_care import Row
from tr11ops.report.status_rows import LABEL_WIDTH, Screen, clock, detail_rows, finding_rows, unknown_rows
from tr11ops.report.status_surroundings import Surroundings
from tr11ops.snapshot import Snapshot
from tr11ops.verdict import Verdict, Word

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Screen", "render"]

STYLES = {
    Word.HEALTHY: "bold green", Word.FINISHED: "bold green", Word.STARTING: "bold cyan", Word.QUEUED: "bold cyan",
    Word.STOPPED: "bold yellow", Word.STALLED: "bold white on red", Word.DOWN: "bold white on red",
    Word.UNKNOWN: "bold magenta",
}  # fmt: skip
ANSWER_STYLES = {True: "bold green", False: "bold red", None: "bold magenta"}
FRAME_LINES = 6  # of the head, the answer and empty lines, around the rows


def render(
    snapshot: Snapshot,
    findings: tuple[Finding, ...],
    verdict: Verdict,
    screen: Screen,
    surroundings: Surroundings = Surroundings(),  # noqa: B008  frozen
) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(plain(words, screen.unicode), style=style, overflow="fold")

    head = Table.grid(expand=True)
    head.add_column(overflow="fold")
    head.add_column(justify="right", no_wrap=True)
    title = text("")
    title.append(f" {verdict.word.upper()} ", STYLES[verdict.word])
    title.append(plain(f" {snapshot.run.name} / {snapshot.run.variant}", screen.unicode), "bold")
    head.add_row(title, text(clock(snapshot.time, screen), "dim"))
    said = answer(verdict, findings, surroundings.alerts)
    words = text(f"{said.text}.", ANSWER_STYLES[said.may_sleep])
    words.append(plain(f" {verdict.why[:1].upper()}{verdict.why[1:]}.", screen.unicode), "not bold default")
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(words)
    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for label, line, style in _ordered(snapshot, findings, verdict, screen, surroundings):
        body.add_row(text(label, "dim"), text(line, style))
    return Group(head, why, body)


def _ordered(
    snapshot: Snapshot, findings: tuple[Finding, ...], verdict: Verdict, screen: Screen, surroundings: Surroundings
) -> list[Row]:
    """All rows. On a screen too low for them what is wrong comes first, as the rest is cut off there."""
    empty: Row = ("", "", "")
    details = [empty, *detail_rows(snapshot, surroundings, verdict, screen)]
    wrong = [*finding_rows(findings), *unknown_rows(snapshot, surroundings)]
    if screen.height is not None and len(details) + len(wrong) + FRAME_LINES > screen.height:
        return [*wrong, *details]
    return [*details, *wrong]
