"""The journal's entries in words: one table for the hand-over and the report."""

from __future__ import annotations

from datetime import UTC
from types import SimpleNamespace
from typing import cast

from tr11ops.report.material import ReportMaterial
from tr11ops.report.sections.attempts import actions
from tr11ops.rundir.journal import JournalEntry
from tr11ops.rundir.journal_lines import SILENT, lines_of

ASKED = JournalEntry(5.0, "w", 0, "checkpoint-now", "ana", "before the maintenance")


def test_the_report_tells_what_the_hand_over_tells() -> None:
    """The report knew a checkpoint request by a name that no writer uses, and left out what it did
    not know.
    """
    entries = (ASKED, JournalEntry(6.0, "w", 1, "a-new-kind", "ben", ""))
    section = actions(cast(ReportMaterial, SimpleNamespace(journal=entries)), UTC)
    assert section.table is not None
    told = [row[2].text for row in section.table.rows]
    assert (
        told
        == [line.text for line in reversed(lines_of(entries))]
        == ["a new kind", "asked for a checkpoint"]
    )


def test_a_shift_is_told_by_whom_it_goes_to() -> None:
    data = {"before": ["ana@example.org"], "on_call": ["ben@example.org"]}
    kinds = ("shift-taken", "shift-ended")
    entries = [JournalEntry(1.0, "w", 0, kind, "six", "", data) for kind in kinds]
    assert [line.text for line in lines_of(entries)] == [
        "put ben@example.org on call",
        "gave the shift of ana@example.org back to the rota",
    ]


def test_what_is_told_elsewhere_has_no_line() -> None:
    entries = [JournalEntry(1.0, "w", 0, kind, "ana", "") for kind in sorted(SILENT)]
    assert lines_of(entries) == ()
