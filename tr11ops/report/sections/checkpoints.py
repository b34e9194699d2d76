"""The checkpoints that are there, whether they are whole, and their copies. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING

from tr11ops.base.observed import Unknown
from tr11ops.base.units import quantity, size
from tr11ops.observe.observations import CopyStatus
from tr11ops.report.material import ReportMaterial
from tr11ops.report.page import Cell, Column, ReportSection, Table, table
from tr11ops.report.sections.formats import ROWS_SHOWN, clock, moment

if TYPE_CHECKING:
    from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
    from tr11ops.trainers.levels import TrainerStanding


def checkpoints(material: ReportMaterial, zone: tzinfo) -> ReportSection:
    """One row a checkpoint, the newest first. Of another trainer by its name, without what only tr11's
    own say of themselves.
    """
    title = "Checkpoints"
    standing = material.snapshot.run.standing
    if standing is not None and standing.holds_nothing:
        return ReportSection(
            "checkpoints",
            title,
            empty="not known: the job is only watched (level 0), and its checkpoints are not looked at; "
            "`tr11 watch --hold --folder DIR` holds them",
        )
    if isinstance(material.checkpoints, Unknown):
        return ReportSection(
            "checkpoints", title, empty=f"cannot be read: {material.checkpoints.why}"
        )
    shown = list(material.checkpoints)[::-1][:ROWS_SHOWN]
    if standing is None:
        found = _of_ours(shown, zone)
    else:
        found = _of_another_trainer(shown, standing, zone)
    lines = tuple(_copies(material, zone))
    return ReportSection("checkpoints", title, lines, table=found, empty="none yet")


def _of_ours(rows: Sequence[SavedCheckpoint], zone: tzinfo) -> Table | None:
    columns = (
        Column("step", True),
        Column("made"),
        Column("size", True),
        Column("tensor x pipeline x data"),
        Column("tokens", True),
        Column("state"),
    )
    cells = [
        (
            f"{row.step:,}",
            moment(row.created, zone),
            size(row.bytes),
            row.shape,
            "-" if row.consumed_tokens is None else quantity(row.consumed_tokens),
            _state(row),
        )
        for row in rows
    ]
    return table(columns, cells)


def _of_another_trainer(
    rows: Sequence[SavedCheckpoint], standing: TrainerStanding, zone: tzinfo
) -> Table | None:
    """By the trainer's own names; neither its shape nor its tokens are known."""
    columns = (Column("checkpoint"), Column("made"), Column("size", True), Column("state"))
    cells = [
        (standing.name_of(row.step), moment(row.created, zone), size(row.bytes), _state(row))
        for row in rows
    ]
    return table(columns, cells)


def _state(row: SavedCheckpoint) -> Cell:
    if row.faults:
        return Cell(row.state, "critical")
    return Cell(row.state + (", latest" if row.is_latest else ""))


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
