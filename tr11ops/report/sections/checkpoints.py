"""The checkpoints that are there, whether they are whole, and their copies. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from tr11ops.base.observed import Unknown
from tr11ops.base.units import quantity, size
from tr11ops.observe.observations import CopyStatus
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, table
from tr11ops.report.sections.formats import ROWS_SHOWN, clock, moment


def checkpoints(material: ReportMaterial, zone: tzinfo) -> ReportSection:
    """One row a checkpoint, the newest first."""
    title = "Checkpoints"
    if isinstance(material.checkpoints, Unknown):
        return ReportSection(
            "checkpoints", title, empty=f"cannot be read: {material.checkpoints.why}"
        )
    rows = [
        (
            f"{row.step:,}",
            Cell("-") if row.created is None else moment(row.created, zone),
            size(row.bytes),
            row.shape,
            "-" if row.consumed_tokens is None else quantity(row.consumed_tokens),
            Cell(row.state, "critical")
            if row.faults
            else Cell(row.state + (", latest" if row.is_latest else "")),
        )
        for row in list(material.checkpoints)[::-1][:ROWS_SHOWN]
    ]
    columns = (
        Column("step", True),
        Column("made"),
        Column("size", True),
        Column("tensor x pipeline x data"),
        Column("tokens", True),
        Column("state"),
    )
    lines = tuple(_copies(material, zone))
    return ReportSection("checkpoints", title, lines, table=table(columns, rows), empty="none yet")


def _copies(material: ReportMaterial, zone: tzinfo) -> Iterator[str]:
    for name, copy in (
        ("verified copy elsewhere", material.snapshot.operation.backup),
        ("sync to the hub", material.snapshot.operation.sync),
    ):
        if isinstance(copy, Unknown):
            yield f"Last {name}: unknown ({copy.why})."
        elif copy is not None:
            if copy.step is None:
                step = ""
            else:
                step = f", step {copy.step:,}"
            fault = ""
            if copy.message:
                fault = f" Since then: {copy.message}."
            yield f"Last {name}: {clock(copy.time, zone)}{step}.{fault}"
    missing = material.status.copies_missing
    if missing:
        yield f"Not copied yet: {missing} of the copies that the card wants."
    if isinstance(material.snapshot.operation.backup, CopyStatus):
        backup = material.snapshot.operation.backup
        yield from (f"Damaged: {line}." for line in backup.damaged)
        yield from (f"Not sound: {line}." for line in backup.not_finite)
