"""`state/recovery.json`: the roll-backs of a run, so that no restart forgets what was skipped or
discarded.

Written before the trainer goes back, so a fault in between repeats the roll-back and loses nothing.
The ranges are data; skipping itself is `trainer.schedule.path`'s, a pure function of the iteration.
What a person's roll-back (or its undo) renames is written here first too, then done rename by
rename; a kill in between leaves a record that the next start of a training, or the next `tr11
rollback`, finishes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import (
    DISCARDED_SUFFIX,
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.documents import document, record_of, refuse_newer
from trainer.contract.errors import DamagedFile
from trainer.contract.files import append_line, now, write_atomically, write_json
from trainer.contract.paths import RunPaths
from trainer.contract.record import IterationRange, JsonObject, Record
from trainer.contract.replacing import free_name
from trainer.contract.state_file import read_json

SpikeKind = Literal["gradient norm", "loss", "not finite"]


class Spike(Record):
    """What a detector saw at `iteration`. `first_sign` is the earliest step that was out of the
    ordinary.

    `median` is NaN when too few steps were seen. `lasting` is False for a single non-finite step
    whose update was dropped: the weights are clean.
    """

    iteration: int
    kind: SpikeKind
    value: float
    median: float
    first_sign: int
    lasting: bool = True

    @property
    def line(self) -> str:
        """One line for the log."""
        if self.kind == "not finite":
            found = f"loss or gradient norm {self.value}" + (
                "" if self.lasting else ", its update was dropped"
            )
        else:
            found = f"{self.kind} {self.value:.4g}, its median is {self.median:.4g}"
        return f"tr11: SPIKE at iteration {self.iteration}: {found}"


class RollBack(Record):
    """Go back to the checkpoint of `to_step`, train again up to the skipped range, pass over it,
    and train on.
    """

    spike: Spike
    to_step: int
    skip: IterationRange

    @property
    def line(self) -> str:
        skipped = f"iterations {self.skip.first} to {self.skip.last} skipped"
        return f"{self.spike.line}; back to step {self.to_step}, {skipped}"


SCHEMA = 1
RECOVERY_FILE = "recovery.json"
BY_HAND = "by hand"  # the kind of a roll-back that a person asked for

# (name before, name after) in the folder of checkpoints, in the order of renaming
Moves = tuple[tuple[str, str], ...]


class RecoveryEvent(Record):
    """One roll-back: what was seen where, the step gone back to, and the iterations skipped since.
    `time`: epoch.

    `moved` are the checkpoints that it set aside. Of a roll-back by hand: `latest` is what that
    file named before, `who` asked for it; an empty range (`skip_last` before `skip_first`) skips
    nothing.
    """

    kind: str
    value: float
    median: float
    iteration: int
    first_sign: int
    to_step: int
    skip_first: int
    skip_last: int
    time: float
    moved: Moves = ()
    latest: str = ""
    who: str = ""

    def __post_init__(self) -> None:
        _check_moves(self.moved)

    @property
    def skip(self) -> IterationRange:
        return IterationRange(self.skip_first, self.skip_last)

    @property
    def skips_nothing(self) -> bool:
        return self.skip_last < self.skip_first


class PendingMoves(Record):
    """Renames that were decided and may not be done yet. `latest`: what that file names then, "" to
    leave it.

    `note`: the record of another kind that `metrics.jsonl` gets when all is done, for those who
    read its steps.
    """

    moves: Moves
    latest: str = ""
    note: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        _check_moves(self.moves)


class RecoveryRecord(Record):
    """All roll-backs of one variant of a run, in the order they were made. `pending`: what is not
    finished of them.
    """

    events: tuple[RecoveryEvent, ...] = ()
    pending: PendingMoves | None = None

    @property
    def ranges(self) -> tuple[IterationRange, ...]:
        """What `trainer.schedule.path.SkipPlan.of` adds to the card's ranges."""
        return tuple(event.skip for event in self.events if not event.skips_nothing)

    @property
    def automatic(self) -> int:
        """How many of them the trainer decided; `recovery.roll_backs` limits these alone."""
        return sum(event.kind != BY_HAND for event in self.events)

    def usable(self, steps: Iterable[int]) -> list[int]:
        """`steps` without the checkpoints that a roll-back discarded: those from a first sign to
        its range's end.

        No later training saves there but at the very end of the range, as soon as it has passed
        over it: such a checkpoint counts. The old one of that step is one of the `moves` of the
        roll-back.
        """
        if self.pending is not None:
            leaving = {checkpoint_step(name) for name, _ in self.pending.moves}
        else:
            leaving = set()
        return [
            step
            for step in steps
            if step not in leaving
            and not any(event.first_sign <= step < event.skip_last for event in self.events)
        ]

    def with_roll_back(self, roll_back: RollBack, time: float, moves: Moves = ()) -> RecoveryRecord:
        """The record with one more roll-back of the trainer's own. `moves`: checkpoints that it is
        to set aside.
        """
        spike, skip = roll_back.spike, roll_back.skip
        event = RecoveryEvent(
            kind=spike.kind,
            value=spike.value,
            median=spike.median,
            iteration=spike.iteration,
            first_sign=spike.first_sign,
            to_step=roll_back.to_step,
            skip_first=skip.first,
            skip_last=skip.last,
            time=time,
            moved=moves,
        )
        return RecoveryRecord(
            (*self.events, event), PendingMoves(moves, checkpoint_name(roll_back.to_step))
        )


def recovery_path(paths: RunPaths) -> Path:
    """Where the file lies; all variants of a run share it."""
    return paths.state / RECOVERY_FILE


def read_recovery(paths: RunPaths) -> RecoveryRecord:
    """The variant's roll-backs; none when there is no file. Raises ValueError when it is damaged or
    of a newer tr11.
    """
    variants, pending = tables_in(recovery_path(paths))
    try:
        events = tuple(_event(entry) for entry in variants.get(paths.variant, []))
        unfinished = pending.get(paths.variant)
        return RecoveryRecord(
            events, None if unfinished is None else record_of(PendingMoves, unfinished)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{recovery_path(paths)} is damaged ({error}): restore it, or note its ranges in the card's "
            "data.skip_ranges and move it away"
        ) from None


def write_recovery(paths: RunPaths, record: RecoveryRecord) -> None:
    """Replace the variant's roll-backs, atomically. Raises OSError as the disk does, ValueError for
    a damaged file.
    """
    path = recovery_path(paths)
    variants, pending = tables_in(path)
    variants[paths.variant] = [_entry(event) for event in record.events]
    pending.pop(paths.variant, None)
    if record.pending is not None:
        pending[paths.variant] = document(record.pending)
    write_json(
        path, {"schema": SCHEMA, "variants": variants, **({"pending": pending} if pending else {})}
    )


def tables_in(path: Path) -> tuple[JsonObject, JsonObject]:
    """The file's events and its unfinished renames, both by variant. Raises ValueError."""
    try:
        value = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if value is None:
        return {}, {}
    if not isinstance(value.get("schema"), int) or not isinstance(value.get("variants"), dict):
        raise DamagedFile(path, "is not a record of roll-backs")
    refuse_newer(path, value, SCHEMA)
    return dict(value["variants"]), dict(value.get("pending") or {})


def _entry(event: RecoveryEvent) -> JsonObject:
    """As JSON, which has no NaN: numbers that are not finite are written as text."""
    return {
        key: item if not isinstance(item, float) or math.isfinite(item) else str(item)
        for key, item in document(event).items()
    }


def _event(entry: JsonObject) -> RecoveryEvent:
    numbers = {name: float(entry[name]) for name in ("value", "median")}
    return record_of(RecoveryEvent, {**entry, **numbers})


def _check_moves(moves: Moves) -> None:
    """Raises ValueError for what leads out of the folder of checkpoints."""
    for name in (name for move in moves for name in move):
        if not name or "/" in name or name.startswith(".."):
            raise ValueError(f"{name!r} is not the name of a checkpoint's folder")


# ---------------------------------------------------------------- what it does to the folder
# Checkpoints are set aside, and `latest` names another one. Each step looks at what is there: doing
# it twice, or two at once, changes nothing.


def settle(paths: RunPaths, record: RecoveryRecord) -> RecoveryRecord:
    """Finish what a roll-back that was cut off began; returns the record as it is then. Raises
    OSError.

    Only for who holds the run's lease: a training that starts.
    """
    finished = finish(paths, record)
    set_aside(paths.checkpoints, finished)
    return finished


def finish(
    paths: RunPaths, record: RecoveryRecord, fence: Callable[[], None] = lambda: None
) -> RecoveryRecord:
    """Do the renames of a record that are not done, and strike them off it. `fence` is asked before
    each; it raises.

    Raises OSError as the file system does: the record then still says what is left.
    """
    pending = record.pending
    if pending is None:
        return record
    folder = paths.checkpoints
    # before the first rename, so that `latest` never names what has gone
    _point(folder, pending.latest)
    for source, target in pending.moves:
        fence()
        _rename(folder / source, folder / target)
    _point(folder, pending.latest)
    fence()
    with suppress(OSError):  # it is for readers alone
        if pending.note:
            append_line(paths.metrics, json.dumps({**pending.note, "time": now(), "job_id": ""}))
    done = replace(record, pending=None)
    write_recovery(paths, done)
    return done


def set_aside(folder: Path, record: RecoveryRecord) -> list[str]:
    """Rename checkpoints that roll-backs discarded to NAME.discarded, and let `latest` name the
    newest kept one.

    They are kept for anyone who studies the spike. Returns their new names. Raises OSError.
    """
    steps = checkpoint_steps(folder)
    kept = record.usable(steps)
    moved = []
    for step in sorted(set(steps) - set(kept)):
        target = quarantine_name(folder, step)
        (folder / checkpoint_name(step)).rename(folder / target)
        moved.append(target)
    usable = [step for step in kept if (folder / checkpoint_name(step) / MANIFEST_FILE).is_file()]
    if moved and usable and read_latest(folder) not in usable:
        write_atomically(folder / LATEST_FILE, checkpoint_name(max(usable)))
    return moved


def moves_of(folder: Path, first: int, last: int | None = None) -> Moves:
    """The renames that set the checkpoints from `first` to `last` aside (None: to the end); the
    newest goes first.
    """
    steps = [
        step
        for step in checkpoint_steps(folder)
        if step >= first and (last is None or step <= last)
    ]
    return tuple(
        (checkpoint_name(step), quarantine_name(folder, step))
        for step in sorted(steps, reverse=True)
    )


def complete_steps(folder: Path) -> list[int]:
    """Steps below `folder` that have a manifest."""
    return [
        step
        for step in checkpoint_steps(folder)
        if (folder / checkpoint_name(step) / MANIFEST_FILE).is_file()
    ]


def quarantine_name(folder: Path, step: int) -> str:
    """A free name for the checkpoint of a step that is set aside: global_stepN.discarded, or with a
    number behind.
    """
    return free_name(folder, f"{checkpoint_name(step)}{DISCARDED_SUFFIX}").name


def _rename(source: Path, target: Path) -> None:
    """Rename once: nothing happens where the source has gone, or the target is there."""
    if os.path.lexists(target):  # an empty folder there would be replaced
        return
    with suppress(FileNotFoundError):  # it was done before, or someone else has just done it
        source.rename(target)


def _point(folder: Path, name: str) -> None:
    """Let `latest` name a checkpoint, if that is there."""
    if name and (folder / name).is_dir():
        write_atomically(folder / LATEST_FILE, name)
