"""Which checkpoint to resume from: the one that `latest` names, else the newest that is resumable,
never none.

Standard library and the contract only, so that tools without torch can ask the same question.
"""

from __future__ import annotations

import errno
import re
import shutil
import uuid
from collections.abc import Sequence
from functools import partial as bind
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    hidden_name,
    read_latest,
    set_apart,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.lease import Lease, refusal as kept_out
from trainer.contract.manifest import FileEntry, Manifest, manifest_faults
from trainer.contract.paths import RunPaths
from trainer.contract.replacing import Report, settle_replaced
from trainer.contract.resumable import (
    NEW_VARIANT,
    FaultsOf,
    ResumeFault,
    ResumeNeed,
    ResumeSearch,
    one_line,
    read_whole,
    search,
    size_faults,
)

Verify = Literal["digests", "sizes"]

# What a file system refuses whoever asks: there is no room.
_EVERYONES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG})
# What a node meets whose way to the file system is broken, whatever file it asks for.

_HALF_WRITTEN = re.compile(rf"\.{LATEST_FILE}\..+")  # what write_atomically had not yet renamed


def refusal_code(error: BaseException) -> int | None:
    """The operating system's error, where one node alone may meet it; None for another fault, or
    for want of room.
    """
    refused = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(refused, OSError) or refused.errno in _EVERYONES:
        return None
    return refused.errno


def partial_path(folder: Path, step: int, nonce: str) -> Path:
    """Where a checkpoint is written before it is complete: a hidden sibling of its final place."""
    return folder / hidden_name(checkpoint_name(step), "partial", nonce)


def remove_leftovers(folder: Path) -> list[str]:
    """Delete what killed saves left behind; returns the names. Only the run's own trainer may call
    it.
    """
    folders, files = _half_written(folder)
    for entry in folders:
        shutil.rmtree(entry)
    for entry in files:
        entry.unlink(missing_ok=True)
    return [entry.name for entry in (*folders, *files)]


def take_run(lease: Lease | None, paths: RunPaths) -> str:
    """Make sure that no other trainer works on this run, and that one that is frozen publishes no
    more; rank 0 only.

    Why a living trainer keeps this one out, in one line; "" where none does.
    """
    assert lease is not None, "rank 0 has the lease"
    holder = lease.take()
    if holder is not None:
        return kept_out(holder, paths)
    fence_off(paths.checkpoints)
    return ""


def fence_off(folder: Path) -> list[str]:
    """Take away what a superseded trainer could still publish, one rename each; returns the names.

    Called by the new holder of the run's lease before it reads anything: the other's next rename
    then fails. Folders are removed as far as that goes (its writers may still fill them); the next
    save removes the rest.
    """
    folders, files = _half_written(folder)
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


def _half_written(folder: Path) -> tuple[list[Path], list[Path]]:
    """Folders of checkpoints, and files that were to become `latest`."""
    if not folder.is_dir():
        return [], []
    files = sorted(path for path in folder.iterdir() if _HALF_WRITTEN.fullmatch(path.name))
    return [path for path, _ in set_apart(folder, "partial")], files


def read_checkpoint(folder: Path, step: int) -> Manifest:
    """The manifest of one step's checkpoint. Raises CheckpointError when there is none, or a
    damaged or foreign one.
    """
    found = read_whole(folder, step)
    if isinstance(found, ResumeFault):
        raise CheckpointError(found.text)
    return found


def verify_share(folder: Path, manifest: Manifest, rank: int, world: int) -> list[str]:
    """Faults in this rank's share of a checkpoint's files, sizes and digests; the shares of all
    ranks cover all files.

    `folder` is the checkpoint's own. Files are dealt so that every rank reads about as many bytes.
    """
    return manifest_faults(
        folder, replace(manifest, files=_share(manifest.files, rank, world)), True
    )


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

    `folder`: checkpoints/VARIANT. `verify`: "digests" reads every byte, "sizes" does not.
    `expect_resume`: None is not an acceptable answer. `report`: told, one line at a time, what was
    found wrong and what was taken instead. `faults_of`: replaces the check of one checkpoint's
    files (see `trainer.checkpoint.store.find_resumable`, which spreads it over all ranks). `need`:
    what makes one resumable (see `trainer.contract.resumable`).

    `latest` decides, so a person may point it to an older step. If what it names is not resumable,
    the newest checkpoint before it that is gets taken, and one after it only when there is no
    other. Puts a half-replaced checkpoint back, so only the owner of the run calls it.

    Raises CheckpointError when there are checkpoints but none is resumable, when one that is not
    this run's to judge (of a newer tr11, of another model) is newer than the one that is, when
    `latest` exists but no checkpoint does, when none is there and `expect_resume` says that one
    must be, or when the folder cannot be read.
    """
    if faults_of is None:
        if verify == "sizes":
            faults_of = size_faults
        else:
            faults_of = bind(manifest_faults, read_digests=True)
    try:
        for line in settle_replaced(folder):
            report(line)
        steps = checkpoint_steps(folder)
        latest = _latest(folder, steps, report)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror or error}); repair that first"
        ) from None
    if not steps:
        _check_first_start(folder, expect_resume)
        return None

    def tell(step: int, fault: ResumeFault) -> None:
        report(f"{checkpoint_name(step)} is not usable: {fault.text}")

    found = search(
        folder, steps, latest=latest, need=need or ResumeNeed(), faults_of=faults_of, report=tell
    )
    problem = refusal(folder, steps, found)
    if problem:
        raise CheckpointError("; ".join(problem))
    if found.step != latest:
        assert found.step is not None
        report(f"resuming from {checkpoint_name(found.step)}, the newest resumable checkpoint")
    return found.step


def refusal(folder: Path, steps: Sequence[int], found: ResumeSearch) -> tuple[str, ...]:
    """Why nothing may be resumed although there are checkpoints, and the fix; empty when something
    may.
    """
    if found.step is None:
        step, fault = found.passed[0]
        listed = ", ".join(checkpoint_name(step) for step in steps[-3:])
        why = f"{checkpoint_name(step)}: {fault.text}"
        rule = f"{folder} holds {len(steps)} checkpoint(s) ({listed}) but none is resumable ({why})"
        return rule, f"restore one from a backup; {NEW_VARIANT}"
    if found.barrier is None:
        return ()
    step, fault = found.barrier
    older, newer = checkpoint_name(found.step), checkpoint_name(step)
    rule = f"{newer} is newer than {older} and not for this run to judge: {fault.text}"
    back = (
        f"write {older} into {folder / LATEST_FILE} to go on from there ({newer} is then set aside)"
    )
    return rule, f"use the tr11 and the run card that wrote it, or {back}"


def _latest(folder: Path, steps: list[int], report: Report) -> int | None:
    """The step that `latest` names, whether or not it exists; None, after a report, when there is
    no usable file.
    """
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
        report(
            f"{checkpoint_name(newer[-1])} is newer than {checkpoint_name(latest)}, which {LATEST_FILE} names"
        )
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
