"""A restore that is tried before it is needed: the newest whole copy, into a fresh folder, looked
into, removed.

    ROOT/backup-drill/global_stepN      while it lasts; a drill that was killed is gone on with by the next

What came of it goes on record with its date: a copy that no one ever restored is a hope.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tr11ops.backup.base import Archive
from tr11ops.backup.ledger import DrillRecord, write_drill
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.round_values import ArchiveLock, BackupContext
from tr11ops.backup.service import note_record
from tr11ops.backup.survey import read_receipt, receipt_path
from tr11ops.base.errors import ArchiveError, CopyDamaged, CopyError, CopyStopped
from tr11ops.base.observed import cause
from tr11ops.base.units import duration
from tr11ops.cron.runner import child_environment
from tr11ops.rundir.copies import CopyRecord
from trainer.contract.manifest import Manifest
from trainer.contract.record import Record

FOLDER = "backup-drill"
CLAIM = "drill"
LOAD_SECONDS = 6 * 3600.0


class LoadResult(Record):
    """Whether what was restored can be loaded, and what was said of it."""

    passed: bool
    text: str


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

    A rehearsal's checkpoint holds no tensors, and the restore has compared its digests.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return LoadResult(False, cause(error))
    if manifest is not None and manifest.is_rehearsed:
        return LoadResult(
            True, "every digest agrees; it is a rehearsal's checkpoint, without tensors to read"
        )
    for words in (["inspect", str(folder), "--verify"], ["values", str(folder)]):
        fault = _fault_of(words)
        if fault is not None:
            return LoadResult(False, fault)
    return LoadResult(True, "and read by the trainer, every number finite")


def _fault_of(words: list[str]) -> str | None:
    """What the trainer's reader has against a checkpoint, in its last line; None if nothing."""
    command = [sys.executable, "-P", "-m", "trainer.checkpoint", *words]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
            stdin=subprocess.DEVNULL,
            env=child_environment(os.environ),
        )
    except subprocess.TimeoutExpired:
        return f"it could not be read within {duration(LOAD_SECONDS)}"
    if done.returncode == 0:
        return None
    said = (done.stdout + done.stderr).strip().splitlines()
    if said:
        return said[-1]
    return ""


def run_drill(
    context: BackupContext,
    archive: Archive,
    copy: CopyRecord,
    into: Path | None = None,
    look: Callable[[Path], LoadResult] = inspect,
) -> DrillRecord:
    """Restore `copy` into a fresh folder, look into it, put it on record, and remove the folder.

    Raises ArchiveLocked when another drill is at it, CopyStopped, OSError.
    """
    folder = (into or context.directory.root) / FOLDER
    began = time.monotonic()
    with ArchiveLock(context.directory, CLAIM, context.stop, context.clock):
        try:
            passed, message = _try(context, archive, copy, folder, look)
        except CopyStopped:
            raise  # the next drill goes on from there
        except BaseException:
            _remove(folder)
            raise
        _remove(folder)
        drill = DrillRecord(
            context.clock(),
            archive.name,
            copy.step,
            passed,
            message,
            copy.bytes,
            time.monotonic() - began,
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
            note_record(context.directory, context.journal, copy, {name: fault}, "drill")
            return False, fault
        with context.watch(f"drill {copy.step}", receipt.bytes) as progress:
            restored = restore_checkpoint(archive, receipt, folder, context.transfer(progress))
    except CopyStopped:
        raise
    except (ArchiveError, CopyError, ValueError) as error:
        if isinstance(error, CopyDamaged):
            note_record(
                context.directory, context.journal, copy, {error.path: error.fault}, "drill"
            )
        return False, cause(error)
    found = look(restored)
    return found.passed, f"restored, {'' if found.passed else 'but: '}{found.text}"


def _remove(folder: Path) -> None:
    """The folder is of drills alone."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
