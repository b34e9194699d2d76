"""What of the status screen is shown where the terminal is too low for all of it. Pure.

The verdict and the answer stay on top; then what is wrong, the most urgent first; then as much of the rest as fits.
What is left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tr11ops.base.units import counted
from tr11ops.status.rows import SEVERITY_STYLES, Row, ShownIncident, incident_rows

LEAST_DETAILS = 7  # lines of the state of things that are worth more than a third finding
URGENT = ("red", "bold red", "yellow")  # styles of the rows about something to act on, the worst first
# labels of the rows to keep, the first ones first
WORTH = ("unknown", "progress", "jobs", "relaunch", "paused", "nodes", "checkpoint", "alerts")
EMPTY: Row = ("", "", "")

Lines = Callable[[Row], int]  # how many lines a row takes


def fitted(
    incidents: tuple[ShownIncident, ...], unknown: Sequence[Row], details: Sequence[Row], room: int | None, lines: Lines
) -> list[Row]:
    """The rows below the answer, at most `room` lines of them; all, in their usual order, where they fit.

    `incidents` are sorted, the most urgent first. Only the most urgent one's first lines may exceed the room.
    """
    wrong = [row for incident in incidents for row in (EMPTY, *incident_rows(incident))]
    everything = [EMPTY, *details, *wrong, *unknown]
    if room is None or _sum(everything, lines) <= room:
        return everything
    rest = _by_worth([row for row in (*unknown, *details) if row != EMPTY])
    action = 2 + _sum([row for row in rest if row[2] in URGENT], lines)  # worth more than a finding's evidence
    kept_free = max(min(LEAST_DETAILS, room // 3), min(action, room // 2))
    shown = [*_incidents(incidents, max(1, room - kept_free), lines), EMPTY]
    left = room - _sum(shown, lines) - lines(_more(len(rest)))
    if left < 0:
        return shown
    kept = list(_first(rest, left, lines))
    return [*shown, *kept, _more(len(rest) - len(kept))]


def _incidents(incidents: tuple[ShownIncident, ...], room: int, lines: Lines) -> list[Row]:
    """The most urgent one whole if there is room, those after it without their evidence, the rest counted."""
    rows: list[Row] = []
    for index, incident in enumerate(incidents):
        last = index == len(incidents) - 1
        left = room - _sum(rows, lines) - (0 if last else 1)
        whole, short = incident_rows(incident), incident_rows(incident, with_evidence=False)
        later = 0 if last else _sum(incident_rows(incidents[index + 1], with_evidence=False), lines)
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
    return "", f"{counted(count, 'more row')}: in a taller window, or by `tr11 status | less`", "dim"


def _by_worth(rows: Sequence[Row]) -> list[Row]:
    """The rows that need action first, then those whose labels are in WORTH; what continues a row stays with it."""
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
