"""Everything that is known of a run's checkpoints, side by side: files, digests, copies, pins, use. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tr11ops.backup.records import CopyRecord, read_copies
from tr11ops.checkpoints.asides import SetAside, list_asides
from tr11ops.checkpoints.digests import DigestRecord, read_digest
from tr11ops.checkpoints.pins import Pin, read_pins
from tr11ops.checkpoints.scan import CheckpointRow, list_rows, standing_fault
from tr11ops.checkpoints.use import Clocks, Uses, read_uses, restart_uses
from tr11ops.evidence import observed
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Unknown, known
from trainer.contract import read_latest

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint(CheckpointRow):
    """A checkpoint with what is known of it. `copies` are those of this very checkpoint, damaged ones too.

    `digests`: what was found when it was last read; None: never read. `is_discarded`: a roll-back passes over it.
    """

    digests: DigestRecord | Unknown | None = None
    copies: tuple[CopyRecord, ...] = ()
    pin: Pin | None = None
    used_by: tuple[str, ...] = ()
    is_discarded: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether a training can resume from it, as far as is known: whole by sizes, and no digest known to differ."""
        is_bad = isinstance(self.digests, Unknown) or (self.digests is not None and not self.digests.is_fine)
        return self.complete is True and not is_bad and not self.is_discarded

    def document(self) -> dict[str, Any]:
        """The checkpoint as JSON values; `digests` is null where it was never read."""
        return {**asdict(self), "complete": self.complete}


@dataclass(frozen=True)
class Catalogue:
    """All checkpoints of one variant, oldest first. `fault`: what is wrong with what a restart would take.

    `doubts`: what could not be read; while there is one, nothing may be removed. `copies` are all on record, also of
    checkpoints that are here no more. `loading` names an attempt that may be reading any checkpoint.
    """

    folder: Path
    latest: int | None
    fault: str | None
    checkpoints: tuple[Checkpoint, ...]
    aside: tuple[SetAside, ...] = ()
    copies: tuple[CopyRecord, ...] = ()
    pins: tuple[Pin, ...] = ()
    uses: Uses = field(default_factory=Uses)
    doubts: tuple[str, ...] = ()

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step."""
        return next((entry for entry in self.checkpoints if entry.step == step), None)


def read_catalogue(
    directory: RunDirectory, clocks: Clocks, load: str | None = None, rows: Iterable[CheckpointRow] | None = None
) -> Catalogue:
    """Look at everything. `load`: the card's checkpoint.load; `rows`: checkpoints that were scanned already.

    Raises OSError when the folder of checkpoints cannot be read.
    """
    folder = directory.paths.checkpoints
    doubts: list[str] = []
    latest = _read(doubts, "latest", lambda: read_latest(folder), None)
    scanned = list_rows(folder, latest) if rows is None else [_marked(row, latest) for row in rows]
    no_copies: tuple[CopyRecord, ...] = ()
    copies = _read(doubts, "copies on record", lambda: read_copies(directory), no_copies)
    no_pins: tuple[Pin, ...] = ()
    pins = _read(doubts, "pins", lambda: read_pins(directory), no_pins)
    uses = _read(doubts, "who uses what", lambda: read_uses(directory, clocks, load), Uses())
    fault = next((doubt for doubt in doubts if doubt.startswith("latest: ")), None)
    return Catalogue(
        folder=folder,
        latest=latest,
        fault=fault.removeprefix("latest: ") if fault else standing_fault(folder, scanned, latest),
        checkpoints=_joined(directory, scanned, latest, copies, pins, uses),
        aside=tuple(list_asides(folder)) if rows is None else (),
        copies=copies,
        pins=pins,
        uses=uses,
        doubts=tuple(doubts),
    )


def _read(doubts: list[str], what: str, read: Callable[[], T], otherwise: T) -> T:
    found = observed(read)
    if isinstance(found, Unknown):
        doubts.append(f"{what}: {found.why}")
    return known(found, otherwise)


def _marked(row: CheckpointRow, latest: int | None) -> CheckpointRow:
    return row if row.is_latest == (row.step == latest) else replace(row, is_latest=row.step == latest)


def _joined(
    directory: RunDirectory,
    rows: Iterable[CheckpointRow],
    latest: int | None,
    copies: Iterable[CopyRecord],
    pins: Iterable[Pin],
    uses: Uses,
) -> tuple[Checkpoint, ...]:
    copied: dict[str, list[CopyRecord]] = {}
    for copy in copies:
        copied.setdefault(copy.identity, []).append(copy)
    pinned = {pin.step: pin for pin in pins}
    listed = list(rows)
    kept = frozenset(uses.recovery.usable(row.step for row in listed))
    found = [
        Checkpoint(
            **_values(row),
            digests=observed(lambda row=row: read_digest(directory, row.step, row.identity)),  # type: ignore[misc]
            copies=tuple(copy for copy in copied.get(row.identity, ()) if row.identity and copy.step == row.step),
            pin=pinned.get(row.step),
            is_discarded=row.step not in kept,
        )
        for row in listed
    ]
    restart = restart_uses((entry.step for entry in found if entry.is_sound), latest)
    return tuple(replace(entry, used_by=_users(entry.step, restart, uses)) for entry in found)


def _users(step: int, restart: Mapping[int, str], uses: Uses) -> tuple[str, ...]:
    first = (restart[step],) if step in restart else ()
    return (*first, *uses.by_step.get(step, ()))


def _values(row: CheckpointRow) -> dict[str, Any]:
    return {entry.name: getattr(row, entry.name) for entry in fields(CheckpointRow)}
