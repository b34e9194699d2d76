"""Which checkpoint to resume from: the one that `latest` names, else the newest that is resumable, never none.

Standard library and the contract only, so that tools without torch can ask the same question.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Literal

from trainer.checkpoint.resumable import (
    Fault,
    FaultsOf,
    ResumeNeed,
    Search,
    lack_of,
    model_fault,
    one_line,
    read_whole,
    search,
    size_faults,
)
from trainer.contract import (
    LATEST_FILE,
    FileEntry,
    Manifest,
    checkpoint_name,
    checkpoint_steps,
    manifest_faults,
    read_latest,
)

Verify = Literal["digests", "sizes"]
Report = Callable[[str], None]

_PARTIAL = re.compile(r"\.(global_step\d+)\.partial-.+")
_HALF_WRITTEN = re.compile(rf"\.{LATEST_FILE}\..+")  # what write_atomically had not yet renamed
_REPLACED = re.compile(r"\.(global_step\d+)\.replaced-.+")


SET_ASIDE_SUFFIX = ".set-aside"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or loaded: one line with what, where, the rule and the fix."""


def partial_path(folder: Path, step: int, nonce: str) -> Path:
    """Where a checkpoint is written before it is complete: a hidden sibling of its final place."""
    return folder / f".{checkpoint_name(step)}.partial-{nonce}"


def replaced_path(folder: Path, step: int, nonce: str) -> Path:
    """Where an older checkpoint of the same step waits while the new one takes its place."""
    return folder / f".{checkpoint_name(step)}.replaced-{nonce}"


def free_name(folder: Path, name: str) -> Path:
    """A path below `folder` where nothing lies yet: `name`, or `name-2`, `name-3`, ..."""
    number, path = 1, folder / name
    while os.path.lexists(path):
        number, path = number + 1, folder / f"{name}-{number + 1}"
    return path


def take_place(folder: Path, partial: Path, manifest: Manifest, report: Report) -> Path | None:
    """Give a fully written folder the name of its step; returns an older one of that name, to be removed, if any.

    Only a checkpoint of the same training is replaced. Anything else that bears the name (of a newer tr11, of another
    model, weights alone, without a manifest, a link) is set aside under a visible name and stays. Raises OSError; the
    old folder then has its name.
    """
    home = folder / checkpoint_name(manifest.step)
    if not os.path.lexists(home):
        partial.rename(home)
        return None
    is_ours = is_replaceable(folder, manifest)
    if is_ours:
        aside = replaced_path(folder, manifest.step, uuid.uuid4().hex[:12])
    else:
        aside = free_name(folder, f"{home.name}{SET_ASIDE_SUFFIX}")
    home.rename(aside)
    try:
        partial.rename(home)
    except OSError:
        aside.rename(home)
        raise
    if is_ours:
        return aside
    report(f"tr11: WARNING: {home.name} was another checkpoint: it was not replaced, and is now {aside}")
    return None


def is_replaceable(folder: Path, manifest: Manifest) -> bool:
    """Whether what lies below `folder` under the name of the manifest's step is a checkpoint of the same training."""
    if (folder / checkpoint_name(manifest.step)).is_symlink():
        return False
    old = read_whole(folder, manifest.step)
    if isinstance(old, Fault) or old.is_rehearsed != manifest.is_rehearsed:
        return False
    same_parts = (lack_of(old, ResumeNeed()) is None) == (lack_of(manifest, ResumeNeed()) is None)
    return same_parts and model_fault(old.model, manifest.model) is None


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
    found = read_whole(folder, step)
    if isinstance(found, Fault):
        raise CheckpointError(found.text)
    return found


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
    folder: Path,
    verify: Verify,
    expect_resume: bool,
    report: Report,
    faults_of: FaultsOf | None = None,
    need: ResumeNeed | None = None,
) -> int | None:
    """The step to resume from, or None when this is the run's first start.

    `folder`: checkpoints/VARIANT. `verify`: "digests" reads every byte, "sizes" does not. `expect_resume`: None is
    not an acceptable answer. `report`: told, one line at a time, what was found wrong and what was taken instead.
    `faults_of`: replaces the check of one checkpoint's files (see `trainer.checkpoint.store.find_resumable`, which
    spreads it over all ranks). `need`: what makes one resumable (see `trainer.checkpoint.resumable`).

    `latest` decides, so a person may point it to an older step. If what it names is not resumable, the newest
    checkpoint before it that is gets taken, and one after it only when there is no other. Puts a half-replaced
    checkpoint back, so only the owner of the run calls it.

    Raises CheckpointError when there are checkpoints but none is resumable, when one that is not this run's to judge
    (of a newer tr11, of another model) is newer than the one that is, when `latest` exists but no checkpoint does, when
    none is there and `expect_resume` says that one must be, or when the folder cannot be read.
    """
    if faults_of is None:
        faults_of = size_faults if verify == "sizes" else bind(manifest_faults, read_digests=True)
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

    def tell(step: int, fault: Fault) -> None:
        report(f"{checkpoint_name(step)} is not usable: {fault.text}")

    found = search(folder, steps, latest, need or ResumeNeed(), faults_of, tell)
    problem = refusal(folder, steps, found)
    if problem:
        raise CheckpointError(problem)
    if found.step != latest:
        assert found.step is not None
        report(f"resuming from {checkpoint_name(found.step)}, the newest resumable checkpoint")
    return found.step


def refusal(folder: Path, steps: Sequence[int], found: Search) -> str:
    """Why nothing may be resumed although there are checkpoints; empty when something may. One line, with the fix."""
    if found.step is None:
        step, fault = found.passed[0]
        listed = ", ".join(checkpoint_name(step) for step in steps[-3:])
        return (
            f"{folder} holds {len(steps)} checkpoint(s) ({listed}) but none is resumable ({checkpoint_name(step)}: "
            f"{fault.text}); restore one from a backup, or move them away to start from random weights"
        )
    if found.barrier is None:
        return ""
    step, fault = found.barrier
    older, newer = checkpoint_name(found.step), checkpoint_name(step)
    return (
        f"{newer} is newer than {older} and not for this run to judge: {fault.text}; use the tr11 and the run card "
        f"that wrote it, or write {older} into {folder / LATEST_FILE} to go on from there ({newer} is then set aside)"
    )


def _latest(folder: Path, steps: list[int], report: Report) -> int | None:
    """The step that `latest` names, whether or not it exists; None, after a report, when there is no usable file."""
    try:
        latest = read_latest(folder)
    except (ValueError, IsADirectoryError) as error:
        report(one_line(error))
        return None
    if latest is None and steps:
        report(f"{folder / LATEST_FILE} is missing")
    if latest is not None and latest not in steps:
        report(f"{folder / LATEST_FILE} names {checkpoint_name(latest)}, which does not exist")
    newer = [step for step in steps if latest is not None and step > latest]
    if newer and latest in steps:
        report(f"{checkpoint_name(newer[-1])} is newer than {checkpoint_name(latest)}, which {LATEST_FILE} names")
    return latest


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
