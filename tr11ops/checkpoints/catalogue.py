"""Everything that is known of a run's checkpoints, side by side: files, digests, copies, pins, use.
Reads only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown, known, observed
from tr11ops.checkpoints.quarantine import QuarantinedCheckpoint, list_quarantined, superseded_names
from tr11ops.rundir.checkpoint_digests import read_digest, read_not_finite
from tr11ops.rundir.checkpoint_pins import Pin, read_pins
from tr11ops.rundir.checkpoint_scan import NO_CARD, SavedCheckpoint, list_rows, read_row
from tr11ops.rundir.claims import COPY_CLAIMS, Claim, ClaimFolder, Clocks
from tr11ops.rundir.copies import CopyRecord, read_copies
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import PhaseRecord, parse_phase
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    read_latest,
)
from trainer.contract.lease import living_claim
from trainer.contract.origin import BranchOrigin
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import Record
from trainer.contract.recovery import RecoveryRecord, read_recovery
from trainer.contract.resumable import ResumeNeed, resume_order

# Who needs a checkpoint now: a restart, a living attempt, a roll-back, a copy that is being made.
# Reads only.
#
# The trainer takes the lease first, then says `loading`, then looks for a checkpoint; a copier
# makes its claim first, then looks for its source. So anyone who hides a checkpoint and only then
# looks here sees everyone who may have found it.
#
# Life is judged so that one wrong clock cannot end it.

# a holder shows life every second; one that was silent for so long loads nothing any more
LEASE_SECONDS = 600.0
LOADING = frozenset({"starting", "loading"})


class Uses(Record):
    """Who uses which step, in words; `loading` names an attempt that may be reading any of them, ""
    for none.
    """

    by_step: Mapping[int, tuple[str, ...]] = {}
    loading: str = ""
    recovery: RecoveryRecord = RecoveryRecord()


def read_uses(directory: RunDirectory, clocks: Clocks, load: str | None) -> Uses:
    """Everyone but a restart (see `restart_uses`). `load`: the card's checkpoint.load.

    Raises OSError or ValueError where one of the records cannot be read: then nothing may be
    concluded.
    """
    found: dict[int, list[str]] = {}
    recovery = read_recovery(directory.paths)
    if recovery.events:
        found.setdefault(recovery.events[-1].to_step, []).append(
            "the last roll-back went back to it"
        )
    named = _named_by_load(directory.paths, load)
    if named is not None:
        found.setdefault(named, []).append("checkpoint.load of the card names it")
    loading = _living_attempt(directory.paths, clocks, found)
    for thing, claim in _living_copies(directory, clocks):
        if not claim.token:
            raise ValueError(
                f"the claim of {thing} cannot be read: which step it copies is not known"
            )
        if claim.step is not None:
            found.setdefault(claim.step, []).append(f"it is being copied by {claim}")
    return Uses({step: tuple(whys) for step, whys in found.items()}, loading, recovery)


def restart_uses(resumable: Iterable[int], latest: int | None) -> dict[int, str]:
    """What the next start would take of the resumable checkpoints, and what it would fall back to;
    pure.

    The order is the trainer's.
    """
    order = resume_order(resumable, latest)
    words = ("a restart takes it", "a restart takes it if the other fails")
    found = dict(zip(order, words, strict=False))
    if latest is not None:
        found[latest] = "latest names it"
    return found


# ----------------------------------------------------------------------------- the card
def _named_by_load(paths: RunPaths, load: str | None) -> int | None:
    """The step of this very folder that checkpoint.load names, if it names one by itself."""
    if load is None:
        return None
    place = os.path.realpath(load)
    inside = os.path.dirname(place) == os.path.realpath(paths.checkpoints)  # noqa: PTH120  of text
    if inside:
        return checkpoint_step(Path(place).name)
    return None


# ----------------------------------------------------------------------------- the living attempt
def _living_attempt(paths: RunPaths, clocks: Clocks, found: dict[int, list[str]]) -> str:
    """Note what the holder of the lease resumed from; returns who may be loading now, "" for no
    one.
    """
    claim = living_claim(paths, *clocks.both, seconds=LEASE_SECONDS)
    if claim is None:
        return ""
    if not claim.token:
        return "an attempt whose lease cannot be read"
    last, resumed = _phases(paths.phases(claim.job_id))
    attempt = f"attempt {read_attempt_label(paths, claim.job_id)}"
    if resumed is not None:
        found.setdefault(resumed, []).append(f"{attempt} resumed from it")
    if last is None:
        return f"{attempt}, which does not say what it does"
    if last.phase in LOADING:
        return attempt
    return ""


def _phases(path: Path) -> tuple[PhaseRecord | None, int | None]:
    """The last phase, and the step that was loaded last: where the first phase after a loading
    stood.

    Of a long file, only the lines around a loading are parsed.
    """
    tail: deque[bytes] = deque(maxlen=4)  # the last line may be cut
    resumed, was_loading = None, False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            for line in stream:
                tail.append(line)
                if not was_loading and b'"loading"' not in line:
                    continue
                record = parse_phase(line)
                if record is None:
                    continue
                if was_loading and record.phase not in LOADING:
                    resumed = record.iteration
                was_loading = record.phase == "loading"
    except FileNotFoundError:
        return None, None
    return next(
        (record for line in reversed(tail) if (record := parse_phase(line)) is not None), None
    ), resumed


# ----------------------------------------------------------------------------- copies that are
# being made
def _living_copies(directory: RunDirectory, clocks: Clocks) -> Iterator[tuple[str, Claim]]:
    claims = ClaimFolder(directory, COPY_CLAIMS).path.parent
    try:
        names = sorted(
            entry.name for entry in os.scandir(claims) if entry.name.startswith(COPY_CLAIMS)
        )
    except FileNotFoundError:
        return
    for name in names:
        claim = ClaimFolder(directory, name).possible_holder(clocks)
        if claim is not None:
            yield name, claim


T = TypeVar("T")


class Catalogue(Record):
    """All checkpoints of one variant, oldest first. `fault`: what is wrong with what a restart
    would take.

    `read_errors`: what could not be read; while there is one, nothing may be removed. `copies` are
    all on record, also of checkpoints that are here no more. `loading` names an attempt that may be
    reading any checkpoint. `superseded`: of a step that was saved again since with another content;
    no training takes them, and `quarantined` names them too. `origin`: the checkpoint of another
    run that this one began with.
    """

    folder: Path
    latest: int | None
    fault: str | None
    checkpoints: tuple[SavedCheckpoint, ...]
    quarantined: tuple[QuarantinedCheckpoint, ...] = ()
    copies: tuple[CopyRecord, ...] = ()
    pins: tuple[Pin, ...] = ()
    uses: Uses = Uses()
    read_errors: tuple[str, ...] = ()
    superseded: tuple[SavedCheckpoint, ...] = ()
    origin: Observed[BranchOrigin | None] = None

    def at(self, step: int) -> SavedCheckpoint | None:
        """The checkpoint of a step."""
        return next((entry for entry in self.checkpoints if entry.step == step), None)


def read_catalogue(
    directory: RunDirectory,
    clocks: Clocks,
    load: str | None = None,
    rows: Iterable[SavedCheckpoint] | None = None,
    need: ResumeNeed = NO_CARD,
) -> Catalogue:
    """Look at everything. `load`: the card's checkpoint.load; `rows`: what was scanned already,
    superseded ones too.

    `need`: what the card's run needs of a checkpoint that it resumes from.

    Raises OSError when the folder of checkpoints cannot be read.
    """
    folder = directory.paths.checkpoints
    read_errors: list[str] = []
    latest = _read(read_errors, "latest", lambda: read_latest(folder), None)
    if rows is None:
        scanned = [*list_rows(folder, latest, need), *_superseded_rows(folder, need)]
    else:
        scanned = list(rows)
    living = [_marked(row, latest) for row in scanned if not row.is_superseded]
    older = [row for row in scanned if row.is_superseded]
    no_copies: tuple[CopyRecord, ...] = ()
    copies = _read(read_errors, "copies on record", lambda: read_copies(directory), no_copies)
    no_pins: tuple[Pin, ...] = ()
    pins = _read(read_errors, "pins", lambda: read_pins(directory), no_pins)
    uses = _read(read_errors, "who uses what", lambda: read_uses(directory, clocks, load), Uses())
    if uses.recovery.pending is not None:
        read_errors.append(
            "a roll-back was cut off: the next start of the training finishes it, or `tr11 rollback`"
        )
    fault = next(
        (read_error for read_error in read_errors if read_error.startswith("latest: ")), None
    )
    known_of = bind(
        _known_of, directory, _by_identity(copies), {pin.step: pin for pin in pins}, uses
    )
    checkpoints = _joined(known_of, living, latest, uses)
    return Catalogue(
        folder=folder,
        latest=latest,
        fault=fault.removeprefix("latest: ")
        if fault
        else _standing_fault(folder, checkpoints, latest),
        checkpoints=checkpoints,
        quarantined=tuple(list_quarantined(folder)) if rows is None else (),
        copies=copies,
        pins=pins,
        uses=uses,
        read_errors=tuple(read_errors),
        superseded=tuple(known_of(row) for row in older),
        origin=observed(BranchOrigin.read, directory.paths),
    )


def _standing_fault(
    folder: Path, checkpoints: Sequence[SavedCheckpoint], latest: int | None
) -> str | None:
    """What is wrong with what a restart would take, `latest` being what the file of that name says;
    None if nothing.
    """
    if latest is None:
        if checkpoints:
            return f"{folder / LATEST_FILE} is missing: a restart takes the newest resumable one"
        return None
    named = next((entry for entry in checkpoints if entry.is_latest), None)
    if named is None:
        return f"{folder / LATEST_FILE} names {checkpoint_name(latest)}, which does not exist"
    if named.no_resume:
        return f"{LATEST_FILE} names {checkpoint_name(latest)}, from which no restart goes on: {named.no_resume}"
    return None


def _read(read_errors: list[str], what: str, read: Callable[[], T], otherwise: T) -> T:
    found = observed(read)
    if isinstance(found, Unknown):
        read_errors.append(f"{what}: {found.why}")
    return known(found, otherwise)


def _marked(row: SavedCheckpoint, latest: int | None) -> SavedCheckpoint:
    if row.is_latest == (row.step == latest):
        return row
    return replace(row, is_latest=row.step == latest)


def _superseded_rows(folder: Path, need: ResumeNeed) -> list[SavedCheckpoint]:
    rows = (read_row(folder / name, step, False, need) for name, step in superseded_names(folder))
    return [row for row in rows if row is not None]


def _by_identity(copies: Iterable[CopyRecord]) -> dict[str, list[CopyRecord]]:
    found: dict[str, list[CopyRecord]] = {}
    for copy in copies:
        found.setdefault(copy.identity, []).append(copy)
    return found


def _known_of(
    directory: RunDirectory,
    copied: Mapping[str, Sequence[CopyRecord]],
    pinned: Mapping[int, Pin],
    uses: Uses,
    row: SavedCheckpoint,
) -> SavedCheckpoint:
    """A row with what is on record of it; a pin, a use and a reading are known by the step."""
    return replace(
        row,
        digests=observed(read_digest, directory, row.step, row.identity),
        numbers=observed(bind(read_not_finite, directory, row.step, row.identity)),
        copies=tuple(
            copy for copy in copied.get(row.identity, ()) if row.identity and copy.step == row.step
        ),
        pin=pinned.get(row.step),
        used_by=uses.by_step.get(row.step, ()),
    )


def _joined(
    known_of: Callable[[SavedCheckpoint], SavedCheckpoint],
    rows: Sequence[SavedCheckpoint],
    latest: int | None,
    uses: Uses,
) -> tuple[SavedCheckpoint, ...]:
    """The checkpoints that a training may resume from, with what a restart would take of them."""
    kept = frozenset(uses.recovery.usable(row.step for row in rows))
    found = [replace(known_of(row), is_discarded=row.step not in kept) for row in rows]
    restart = restart_uses((entry.step for entry in found if entry.is_sound), latest)
    return tuple(replace(entry, used_by=_users(entry.step, restart, uses)) for entry in found)


def _users(step: int, restart: Mapping[int, str], uses: Uses) -> tuple[str, ...]:
    first = (restart[step],) if step in restart else ()
    return (*first, *uses.by_step.get(step, ()))
