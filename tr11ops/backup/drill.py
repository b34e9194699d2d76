"""A restore that is tried before it is needed: the newest whole copy, into a fresh folder, looked
into, removed.

    ROOT/backup-drill/global_stepN      while it lasts; a drill that was killed is gone on with by the next

What came of it goes on record with its date: a copy that no one ever restored is a hope.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tr11ops.backup.archive_round import summarise
from tr11ops.backup.base import Archive
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.round_values import BackupContext
from tr11ops.backup.service import note_record
from tr11ops.backup.survey import read_receipt, receipt_path
from tr11ops.base.errors import ArchiveError, CopyDamaged, CopyError, CopyStopped
from tr11ops.base.installed import EXTRA, READING_CHECKPOINTS, missing
from tr11ops.base.observed import cause
from tr11ops.base.units import duration
from tr11ops.cron.runner import child_environment
from tr11ops.rundir.checkpoint_digests import note_numbers
from tr11ops.rundir.claims import CopyLock
from tr11ops.rundir.copies import CopyRecord, DrillRecord, write_drill
from trainer.contract.manifest import Manifest
from trainer.contract.record import JsonObject, Record

FOLDER = "backup-drill"
CLAIM = "drill"
LOAD_SECONDS = 6 * 3600.0
NAMED = 3  # tensors that a drill names


class LoadResult(Record):
    """Whether what was restored can be loaded, and what was said of it. `not_finite`: tensors with
    NaN or infinity; None where no one could look at its numbers.
    """

    passed: bool
    text: str
    not_finite: tuple[str, ...] | None = None


def choose_copy(copies: Iterable[CopyRecord], archive: str | None = None) -> CopyRecord | None:
    """The newest sound whole copy, of one archive if it is named; the one read last among equals.
    Pure.
    """
    sound = [
        copy
        for copy in copies
        if copy.is_sound and copy.kind == "full" and archive in (None, copy.archive)
    ]
    return max(
        sound,
        key=lambda copy: (copy.step, copy.reread or copy.verified, copy.archive),
        default=None,
    )


def inspect(folder: Path) -> LoadResult:
    """Read the manifest, every digest and every number with the trainer's own reader; none may be
    NaN or infinite.

    The restore has compared its digests: that is all where nothing can read its tensors.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return LoadResult(False, cause(error))
    why = why_unread(manifest)
    if why:
        return LoadResult(True, f"every digest agrees; {why}")
    try:
        checked = _read_by_trainer(
            {
                "command": "inspect",
                "place": str(folder),
                "tensors": None,
                "verify": True,
                "as_json": False,
            }
        )
        if checked.returncode:
            return LoadResult(False, _last_line(checked.stdout + checked.stderr))
        return _numbers_in(
            _read_by_trainer({"command": "values", "places": [str(folder)], "as_json": True})
        )
    except subprocess.TimeoutExpired:
        return LoadResult(False, f"it could not be read within {duration(LOAD_SECONDS)}")


def why_unread(manifest: Manifest | None) -> str:
    """Why no one need try to read the numbers: there are none, or nothing here reads them. "" where
    one may.
    """
    if manifest is not None and manifest.is_rehearsed:
        return "it is a rehearsal's checkpoint, without tensors"
    absent = missing(READING_CHECKPOINTS)
    if absent:
        return f"its numbers were not looked at: {', '.join(absent)} not installed here ({EXTRA})"
    return ""


def _read_by_trainer(request: JsonObject) -> subprocess.CompletedProcess[str]:
    """What the trainer's reader says of a checkpoint. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "trainer.checkpoint", json.dumps(request)],
        check=False,
        capture_output=True,
        text=True,
        timeout=LOAD_SECONDS,
        stdin=subprocess.DEVNULL,
        env=child_environment(os.environ),
    )


def _numbers_in(looked: subprocess.CompletedProcess[str]) -> LoadResult:
    """What its look at every number came to."""
    try:
        (found,) = json.loads(looked.stdout)["checkpoints"]
        bad = [(str(part), str(name)) for part, name in found["not_finite"]]
        fault = str(found["fault"])
    except (ValueError, KeyError, TypeError):  # it ended without an answer
        return LoadResult(False, _last_line(looked.stdout + looked.stderr))
    if fault:
        return LoadResult(False, fault)
    names = tuple(f"{part}/{name}" for part, name in bad)
    if names:
        named = ", ".join(f"{name} ({part})" for part, name in bad[:NAMED])
        return LoadResult(False, f"NaN or infinity in {named}", names)
    return LoadResult(True, "and read by the trainer, every number finite", ())


def _last_line(said: str) -> str:
    lines = said.strip().splitlines()
    if lines:
        return lines[-1]
    return ""


def run_drill(
    context: BackupContext,
    archive: Archive,
    copy: CopyRecord,
    into: Path | None = None,
    look: Callable[[Path], LoadResult] = inspect,
) -> DrillRecord:
    """Restore `copy` into a fresh folder, look into it, put it on record, and remove the folder.

    Raises ClaimTaken when another drill is at it, CopyStopped, OSError.
    """
    folder = (into or context.directory.root) / FOLDER
    began = time.monotonic()
    with CopyLock(context.directory, CLAIM, context.stop, context.clock):
        try:
            passed, message = _try(context, archive, copy=copy, folder=folder, look=look)
        except CopyStopped:
            raise  # the next drill goes on from there
        except BaseException:
            _remove(folder)
            raise
        _remove(folder)
        drill = DrillRecord(
            context.clock(),
            archive.name,
            step=copy.step,
            passed=passed,
            message=message,
            bytes=copy.bytes,
            seconds=time.monotonic() - began,
        )
        write_drill(context.directory, drill)
        said = {"archive": archive.name, "step": copy.step, "bytes": copy.bytes, "passed": passed}
        context.journal.write("backup-drill", message, said, when=context.clock())
    return drill


def _try(
    context: BackupContext,
    archive: Archive,
    copy: CopyRecord,
    folder: Path,
    look: Callable[[Path], LoadResult],
) -> tuple[bool, str]:
    try:
        receipt = read_receipt(archive, copy.location)
        if receipt is None:
            fault = f"{archive.address}/{copy.location} has no receipt any more"
            name = receipt_path(copy.location).rpartition("/")[2]
            note_record(
                context.directory, context.journal, copy=copy, faults={name: fault}, why="drill"
            )
            return False, fault
        with context.watch(f"drill {copy.step}", receipt.bytes) as progress:
            restored = restore_checkpoint(archive, receipt, folder, context.transfer(progress))
    except CopyStopped:
        raise
    except (ArchiveError, CopyError, ValueError) as error:
        if isinstance(error, CopyDamaged):
            note_record(
                context.directory,
                context.journal,
                copy=copy,
                faults={error.path: error.fault},
                why="drill",
            )
        return False, cause(error)
    found = look(restored)
    if found.not_finite is not None:
        note_numbers(
            context.directory,
            copy.step,
            copy.identity,
            not_finite=found.not_finite,
            why="found by a drill",
        )
        summarise(context.directory)
    return found.passed, f"restored, {'' if found.passed else 'but: '}{found.text}"


def _remove(folder: Path) -> None:
    """The folder is of drills alone."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
