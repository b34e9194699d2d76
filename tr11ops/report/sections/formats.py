"""How the page writes moments, hours and severities."""

from __future__ import annotations

from datetime import tzinfo

from tr11ops.base.units import MINUTE, timestamp
from tr11ops.detect.detector import Severity
from tr11ops.report.page import Cell

ROWS_SHOWN = 200


def clock(time: float | None, zone: tzinfo) -> str:
    """A moment to the minute; a dash for none."""
    if time is None:
        return "-"
    return timestamp(time, zone, MINUTE)


def moment(time: float, zone: tzinfo) -> Cell:
    """The same as a table's cell, which is not broken."""
    return Cell(clock(time, zone), "time")


def hours(count: float) -> str:
    """Hours of a long run without decimals, of a short one with some."""
    if count >= 1000:
        return f"{count:,.0f}"
    if count >= 1:
        return f"{count:.2f}"
    return f"{count:.4f}"


def severity(found: Severity) -> Cell:
    """A severity; information does not stand out."""
    name = found.name.lower()
    return Cell(name, name if found > Severity.INFO else "")
