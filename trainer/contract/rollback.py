"""Setting checkpoints aside, and naming another one in `latest`: what every roll-back does to the
folder. No torch.

A roll-back by a person is decided and recorded first (`RecoveryRecord.pending`), then done rename
by rename; a kill in between leaves a record that the next start of a training, or the next `tr11
rollback`, finishes. Each step looks at what is there: doing it twice, or two at once, changes
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.files import append_line, now, write_atomically
from trainer.contract.paths import MANIFEST_FILE, RunPaths
from trainer.contract.recovery import Moves, RecoveryRecord, write_recovery
from trainer.contract.replacing import free_name

DISCARDED_SUFFIX = ".discarded"


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
