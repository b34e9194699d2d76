"""What of the status screen is shown where the terminal is too low for all of it. Pure.

The verdict and the answer stay on top; then what is wrong, the most urgent first; then as much of the rest as fits.
What is left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tr11ops.detect.finding import Finding
from tr11ops.report.status_care import Row
from tr11ops.report.status_rows import SEVERITY_STYLES, finding_rows

LEAST_DETAILS = 7  # lines of the state of things that are worth more than a third finding
WORTH = ("unknown", "progress", "jobs", "relaunch", "nodes", "checkpoint", "alerts")  # labels of the rows to keep
EMPTY: Row = ("", "", "")

Lines = Callable[[Row], int]  # how many lines a row takes


def fitted(
    findings: tuple[Finding, ...], unknown: Sequence[Row], details: Sequence[Row], room: int | None, lines: Lines
) -> list[Row]:
    """The rows below the answer, at most `room` lines of them; all, in their usual order, where they fit.

    `findings` are sorted, the most urgent first. Only the most urgent one's first lines may exceed the room.
    """
    wrong = [row for finding in findings for row in (EMPTY, *finding_rows(finding))]
    everything = [EMPTY, *details, *wrong, *unknown]
    if room is None or _sum(everything, lines) <= room:
        return everything
    shown = [*_findings(findings, max(1, room - min(LEAST_DETAILS, room // 3)), lines), EMPTY]
    rest = _by_worth([row for row in (*unknown, *details) if row != EMPTY])
    left = room - _sum(shown, lines) - lines(_more(len(rest)))
    if left < 0:
        return shown
    kept = list(_first(rest, left, lines))
    return [*shown, *kept, _more(len(rest) - len(kept))]


def _findings(findings: tuple[Finding, ...], room: int, lines: Lines) -> list[Row]:
    """The most urgent one whole if there is room, those after it without their evidence, the rest counted."""
    rows: list[Row] = []
    for index, finding in enumerate(findings):
        last = index == len(findings) - 1
        left = room - _sum(rows, lines) - (0 if last else 1)
        whole, short = finding_rows(finding), finding_rows(finding, with_evidence=False)
        later = 0 if last else _sum(finding_rows(findings[index + 1], with_evidence=False), lines)
        chosen = whole if _sum(whole, lines) + later <= left else short
        if index and _sum(chosen, lines) > left:
            return [*rows, _counted(findings[index:])]
        rows += chosen
    return rows


def _counted(findings: Sequence[Finding]) -> Row:
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.severity.name] = counts.get(finding.severity.name, 0) + 1
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    return "", f"and {len(findings)} more: {words}", SEVERITY_STYLES[findings[0].severity]


def _more(count: int) -> Row:
    return "", f"{count} more rows: put `| less` behind the command", "dim"


def _by_worth(rows: Sequence[Row]) -> list[Row]:
    """The rows whose labels are in WORTH first; what continues a row (it has no label) stays with it."""
    groups: list[list[Row]] = []
    for row in rows:
        if row[0] or not groups:
            groups.append([])
        groups[-1].append(row)
    groups.sort(key=lambda group: WORTH.index(group[0][0]) if group[0][0] in WORTH else len(WORTH))
    return [row for group in groups for row in group]


def _first(rows: Sequence[Row], room: int, lines: Lines) -> Iterator[Row]:
    for row in rows:
        room -= lines(row)
        if room < 0:
            return
        yield row


def _sum(rows: Sequence[Row], lines: Lines) -> int:
    return sum(map(lines, rows))
