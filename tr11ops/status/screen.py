"""The status screen: `may I sleep?` answered in its first lines. Pure: the status document in, a
renderable out.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tr11ops.base.glyphs import plain
from tr11ops.base.units import counted, timestamp
from tr11ops.status import care, rows
from tr11ops.status.document import Status
from tr11ops.status.rows import (
    LABEL_WIDTH,
    SEVERITY_STYLES,
    Row,
    Screen,
    ShownIncident,
    incident_rows,
)
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.units import shortened

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


# What of the status screen is shown where the terminal is too low for all of it. Pure.
#
# The verdict and the answer stay on top; then what is wrong, the most urgent first; then as much of
# the rest as fits. What is left out is counted.

LEAST_DETAILS = 7  # lines of the state of things that are worth more than a third finding
# styles of the rows about something to act on, the worst first
URGENT = ("red", "bold red", "yellow")
# labels of the rows to keep, the first ones first
WORTH = ("unknown", "progress", "jobs", "relaunch", "paused", "nodes", "checkpoint", "alerts")
EMPTY: Row = ("", "", "")
# as long as the words of a row may be; all of them are in the JSON document
LONGEST = 240

Lines = Callable[[Row], int]  # how many lines a row takes


def fitted(
    incidents: tuple[ShownIncident, ...],
    unknown: Sequence[Row],
    details: Sequence[Row],
    room: int | None,
    lines: Lines,
) -> list[Row]:
    """The rows below the answer, at most `room` lines of them; all, in their usual order, where
    they fit.

    `incidents` are sorted, the most urgent first. Only the most urgent one's first lines may exceed
    the room.
    """
    wrong = [row for incident in incidents for row in (EMPTY, *incident_rows(incident))]
    everything = [EMPTY, *details, *wrong, *unknown]
    if room is None or _sum(everything, lines) <= room:
        return everything
    rest = _by_worth([row for row in (*unknown, *details) if row != EMPTY])
    # worth more than a finding's evidence
    action = 2 + _sum([row for row in rest if row[2] in URGENT], lines)
    kept_free = max(min(LEAST_DETAILS, room // 3), min(action, room // 2))
    shown = [*_incidents(incidents, max(1, room - kept_free), lines), EMPTY]
    left = room - _sum(shown, lines) - lines(_more(len(rest)))
    if left < 0:
        return shown
    kept = list(_first(rest, left, lines))
    if len(kept) == len(rest):
        return [*shown, *kept]
    return [*shown, *kept, _more(len(rest) - len(kept))]


def _incidents(incidents: tuple[ShownIncident, ...], room: int, lines: Lines) -> list[Row]:
    """The most urgent one whole if there is room, those after it without their evidence, the rest
    counted.
    """
    rows: list[Row] = []
    for index, incident in enumerate(incidents):
        last = index == len(incidents) - 1
        left = room - _sum(rows, lines) - (0 if last else 1)
        whole, short = incident_rows(incident), incident_rows(incident, with_evidence=False)
        if last:
            later = 0
        else:
            later = _sum(incident_rows(incidents[index + 1], with_evidence=False), lines)
        chosen = whole if _sum(whole, lines) + later <= left else short
        if index and _sum(chosen, lines) > left:
            return [*rows, _counted(incidents[index:])]
        rows += chosen
    return rows


def _counted(incidents: Sequence[ShownIncident]) -> Row:
    counts: dict[str, int] = {}
    for incident in incidents:
        counts[incident.severity] = counts.get(incident.severity, 0) + 1
    words = ", ".join(f"{count} {severity.upper()}" for severity, count in counts.items())
    return "", f"and {len(incidents)} more: {words}", SEVERITY_STYLES[incidents[0].severity]


def _more(count: int) -> Row:
    return (
        "",
        f"{counted(count, 'more row')}: in a taller window, or by `tr11 status | less`",
        "dim",
    )


def _by_worth(rows: Sequence[Row]) -> list[Row]:
    """The rows that need action first, then those whose labels are in WORTH; what continues a row
    stays with it.
    """
    groups: list[list[Row]] = []
    for row in rows:
        if row[0] or not groups:
            groups.append([])
        groups[-1].append(row)
    groups.sort(key=_rank)
    return [row for group in groups for row in group]


def _rank(group: Sequence[Row]) -> tuple[bool, int]:
    label = group[0][0]
    is_quiet = not any(style in URGENT for _, _, style in group)
    return is_quiet, WORTH.index(label) if label in WORTH else len(WORTH)


def _first(rows: Sequence[Row], room: int, lines: Lines) -> Iterator[Row]:
    for row in rows:
        room -= lines(row)
        if room < 0:
            return
        yield row


def _sum(rows: Sequence[Row], lines: Lines) -> int:
    return sum(map(lines, rows))


STYLES = {
    VerdictWord.HEALTHY: "bold green",
    VerdictWord.FINISHED: "bold green",
    VerdictWord.STARTING: "bold cyan",
    VerdictWord.QUEUED: "bold cyan",
    VerdictWord.AT_RISK: "bold white on red",
    VerdictWord.STOPPED: "bold yellow",
    VerdictWord.STALLED: "bold white on red",
    VerdictWord.DOWN: "bold white on red",
    VerdictWord.UNKNOWN: "bold magenta",
}
ANSWER_STYLES = {True: "bold green", False: "bold red", None: "bold magenta"}
# words that are good news where a person may sleep, and only there
GREEN = frozenset({VerdictWord.HEALTHY, VerdictWord.FINISHED})


def badge_style(word: VerdictWord, may_sleep: bool | None) -> str:
    """The style of a verdict's word. Nothing is green beside an answer that is not "you may sleep"."""
    if word in GREEN and may_sleep is not True:
        return "bold yellow"
    return STYLES[word]


def render(status: Status, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns, and of `screen.height` lines
    where it has one.
    """
    from rich.console import Group
    from rich.table import Table

    badge, name = (
        badge_style(status.verdict, status.may_sleep),
        f"{status.run.name} / {status.run.variant}",
    )
    head = heading(status.verdict.upper(), badge, name=name, time=status.time, screen=screen)
    words = line(f"{status.answer}.", screen, ANSWER_STYLES[status.may_sleep])
    reason = shortened(f"{status.why[:1].upper()}{status.why[1:]}.", LONGEST)
    words.append(plain(f" {reason}", screen.unicode), "not bold default")
    why = Table.grid(padding=(0, 0, 0, 1))
    why.add_column(overflow="fold")
    why.add_row(words)
    needs: list[Row] = [
        ("  first" if index == 0 else "", need.fix, "bold")
        for index, need in enumerate(status.sleep_needs)
    ]
    top = _height(head, screen.width) + _height(words, screen.width)

    def lines(row: Row) -> int:
        return max(1, _height(line(_cut(row), screen), screen.content_width))

    if screen.height is None:
        room = None
    else:
        room = max(1, screen.height - top - sum(map(lines, needs)))
    incidents, unknown = rows.incidents_of(status.findings), list(rows.unknown_rows(status))
    rest = fitted(
        incidents, unknown, details=list(_details(status, screen)), room=room, lines=lines
    )
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


# ----------------------------------------------------------------------------- how, for the remote
# screen too
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
    for row in given:
        body.add_row(line(row[0], screen, "dim"), line(_cut(row), screen, row[2]))
    return body


def _cut(row: Row) -> str:
    """A row's words, of which a rank may have written hundreds; a command stays whole."""
    _, words, style = row
    if style == "bold":
        return words
    return shortened(words, LONGEST)


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
