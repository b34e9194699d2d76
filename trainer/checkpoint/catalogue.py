"""Which checkpoint to resume from: the one that `latest` names if it is whole, else the newest whole one, never none.

Standard library and the contract only, so that tools without torch can ask the same question.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trainer.contract import (
    LATEST_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    checkpoint_name,
    checkpoint_steps,
    manifest_faults,
    read_latest,
)

Verify = Literal["digests", "sizes"]
Report = Callable[[str], None]
FaultsOf = Callable[[Path, Manifest], list[str]]

_PARTIAL = re.compile(r"\.(global_step\d+)\.partial-.+")
_HALF_WRITTEN = re.compile(rf"\.{LATEST_FILE}\..+")  # what write_atomically had not yet renamed
_REPLACED = re.compile(r"\.(global_step\d+)\.replaced-.+")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or loaded: one line with what, where, the rule and the fix."""


def partial_path(folder: Path, step: int, nonce: str) -> Path:
    """Where a checkpoint is written before it is complete: a hidden sibling of its final place."""
    return folder / f".{checkpoint_name(step)}.partial-{nonce}"


def replaced_path(folder: Path, step: int, nonce: str) -> Path:
    """Where an older checkpoint of the same step waits while the new one takes its place."""
    return folder / f".{checkpoint_name(step)}.replaced-{nonce}"


def remove_leftovers(folder: Path) -> list[str]:
    """Delete what killed saves left behind; returns the names. Only the run's own trainer may call it."""
    folders, files = _hidden(folder, _PARTIAL), _hidden(folder, _HALF_WRITTEN)
    for entry in folders:
        shutil.rmtree(entry)
    for entry in files:
        entry.unlink(missing_ok=True)
    return [entry.name for entry in (*folders, *files)]


def fence_off(folder: Path) -> list[str]:
    """Take away what a superseded trainer could still publish, one rename each; returns the names.

    Called by the new holder of the run's lease before it reads anything: the other's next rename then fails. Folders
    are removed as far as that goes (its writers may still fill them); the next save removes the rest.
    """
    folders, files = _hidden(folder, _PARTIAL), _hidden(folder, _HALF_WRITTEN)
    for file in files:
        file.unlink(missing_ok=True)
    for entry in folders:
        away = entry.with_name(f"{entry.name}-{uuid.uuid4().hex[:8]}")
        try:
            entry.rename(away)
        except FileNotFoundError:
            continue  # its trainer was faster: it is complete, and found as such
        shutil.rmtree(away, ignore_errors=True)
    return [entry.name for entry in (*folders, *files)]


def settle_replaced(folder: Path) -> list[str]:
    """Finish or undo a replacement that was killed half-way; returns one line for each. Only for the run's trainer.

    A save over an existing step moves the old folder aside, the new one in, then deletes the old. Killed between the
    first two, the step has no folder: the old one is moved back.
    """
    lines = []
    for aside in _hidden(folder, _REPLACED):
        match = _REPLACED.fullmatch(aside.name)
        assert match is not None
        home = folder / match.group(1)
        if home.exists():
            shutil.rmtree(aside)
            lines.append(f"removed {aside.name}, which {home.name} has replaced")
        else:
            aside.rename(home)
            lines.append(f"put {home.name} back: the save that was to replace it did not end")
    return lines


def _hidden(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if pattern.fullmatch(entry.name))


def read_checkpoint(folder: Path, step: int) -> Manifest:
    """The manifest of one step's checkpoint. Raises CheckpointError when there is none, or a damaged or foreign one."""
    place = folder / checkpoint_name(step)
    try:
        manifest = Manifest.read(place)
    except ValueError as error:
        raise CheckpointError(_one_line(error)) from None
    if manifest is None:
        what = f"has no {MANIFEST_FILE}, so it is not complete" if place.is_dir() else "does not exist"
        raise CheckpointError(f"{place} {what}; use another step")
    if manifest.step != step:
        raise CheckpointError(f"{place} holds the manifest of step {manifest.step}: it was renamed; give its name back")
    return manifest


def verify_share(folder: Path, manifest: Manifest, rank: int, world: int) -> list[str]:
    """Faults in this rank's share of a checkpoint's files, sizes and digests; the shares of all ranks cover all files.

    `folder` is the checkpoint's own. Files are dealt so that every rank reads about as many bytes.
    """
    return manifest_faults(folder, dataclasses.replace(manifest, files=_share(manifest.files, rank, world)), True)


def _share(files: tuple[FileEntry, ...], rank: int, world: int) -> tuple[FileEntry, ...]:
    loads, mine = [0] * world, []
    for entry in sorted(files, key=lambda entry: (-entry.bytes, entry.path)):
        lightest = loads.index(min(loads))
        loads[lightest] += entry.bytes + 4096  # the fixed cost of a small file
        if lightest == rank:
            mine.append(entry)
    return tuple(mine)


def find_resumable(
    folder: Path, verify: Verify, expect_resume: bool, report: Report, faults_of: FaultsOf | None = None
) -> int | None:
    """The step to resume from, or None when this is the run's first start.

    `folder`: checkpoints/VARIANT. `verify`: "digests" reads every byte, "sizes" does not. `expect_resume`: None is
    not an acceptable answer. `report`: told, one line at a time, what was found wrong and what was taken instead.
    `faults_of`: replaces the check of one checkpoint's files (see `trainer.checkpoint.store.find_resumable`, which
    spreads it over all ranks).

    `latest` decides, so a person may point it to an older step. If what it names is broken, the newest complete
    checkpoint before it is taken, and one after it only when there is no other. Puts a half-replaced checkpoint
    back, so only the owner of the run calls it.

    Raises CheckpointError when there are checkpoints but none is complete, when `latest` exists but no checkpoint
    does, when none is there and `expect_resume` says that one must be, or when the folder cannot be read.
    """
    faults_of = faults_of or (lambda place, manifest: manifest_faults(place, manifest, verify == "digests"))
    try:
        for line in settle_replaced(folder):
            report(line)
        steps = checkpoint_steps(folder)
        latest = _latest(folder, steps, report)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror or error}); mend that first") from None
    if not steps:
        _check_first_start(folder, expect_resume)
        return None
    first_fault = ""
    for step in _preferred(steps, latest):
        faults = _faults(folder, step, faults_of)
        if not faults:
            if step != latest:
                report(f"resuming from {checkpoint_name(step)}, the newest complete checkpoint")
            return step
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        report(f"{checkpoint_name(step)} is not usable: {faults[0]}{more}")
        first_fault = first_fault or f"{checkpoint_name(step)}: {faults[0]}"
    listed = ", ".join(checkpoint_name(step) for step in steps[-3:])
    raise CheckpointError(
        f"{folder} holds {len(steps)} checkpoint(s) ({listed}) but none is complete "
        f"({first_fault}); restore one from a backup, or move them away to start from random weights"
    )


def _latest(folder: Path, steps: list[int], report: Report) -> int | None:
    """The step that `latest` names, whether or not it exists; None, after a report, when there is no usable file."""
    try:
        latest = read_latest(folder)
    except (ValueError, IsADirectoryError) as error:
        report(_one_line(error))
        return None
    if latest is None and steps:
        report(f"{folder / LATEST_FILE} is missing")
    if latest is not None and latest not in steps:
        report(f"{folder / LATEST_FILE} names {checkpoint_name(latest)}, which does not exist")
    newer = [step for step in steps if latest is not None and step > latest]
    if newer and latest in steps:
        report(f"{checkpoint_name(newer[-1])} is newer than {checkpoint_name(latest)}, which {LATEST_FILE} names")
    return latest


def _preferred(steps: list[int], latest: int | None) -> list[int]:
    """Steps in the order in which they are tried."""
    if latest is None:
        return sorted(steps, reverse=True)
    return sorted(steps, key=lambda step: (step > latest, -step))


def _check_first_start(folder: Path, expect_resume: bool) -> None:
    if (folder / LATEST_FILE).exists():
        raise CheckpointError(
            f"{folder / LATEST_FILE} exists but {folder} holds no checkpoint; restore one, or remove {LATEST_FILE} "
            "to start from random weights"
        )
    if expect_resume:
        raise CheckpointError(
            f"{folder} holds no checkpoint, and run.expect_resume = true refuses random weights; check run.directory "
            "and run.variant, or set run.expect_resume = false"
        )


def _faults(folder: Path, step: int, faults_of: FaultsOf) -> list[str]:
    try:
        return faults_of(folder / checkpoint_name(step), read_checkpoint(folder, step))
    except (CheckpointError, OSError) as error:
        return [_one_line(error)]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
