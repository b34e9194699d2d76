"""The logs and TensorBoard events in an archive: each file as long as it ever was, whatever becomes
of it here.

    ARCHIVE/NAME-logs/...                      as in the run directory, without .git and what is hidden
    state/backup/logs/ARCHIVE.json             what was copied: {path: [bytes, time in ns]}

A file that is longer than its copy takes its place, whole and read back. One that is shorter, or
has another beginning, is another file: it gets a place beside, with its digest in the name. Nothing
is removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tr11ops.backup.base import Archive
from tr11ops.backup.reread import fault_of_part
from tr11ops.backup.source import SourceFile
from tr11ops.backup.survey import is_well
from tr11ops.backup.transfer import Transfer, retried
from tr11ops.base.errors import ArchivePermanentError
from tr11ops.base.observed import cause, replace_json
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import record_of
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

SCHEMA = 1
ATTEMPTS = 3  # to get back what was sent


class CopiedLog(Record):
    """One file as it was when it was looked at: what is appended later goes with the next round."""

    path: str  # relative to the folder of logs
    bytes: int
    changed: int  # nanoseconds


def log_files(folder: Path) -> tuple[CopiedLog, ...]:
    """All logs and events of a run. What goes away meanwhile is left out. Raises OSError."""
    return tuple(sorted(_walk(folder, ""), key=lambda file: file.path))


def _walk(folder: Path, prefix: str) -> Iterator[CopiedLog]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith("."):  # .git, and files that are being written
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield CopiedLog(prefix + entry.name, facts.st_size, facts.st_mtime_ns)


def copy_logs(
    directory: RunDirectory, archive: Archive, transfer: Transfer
) -> tuple[int, list[str]]:
    """Copy what changed; returns how many files were sent, and why some could not be read here.

    Raises ArchiveError, CopyStopped, OSError; what was copied until then is on record.
    """
    folder = directory.paths.published
    record = directory.paths.state / "backup" / "logs" / f"{archive.name}.json"
    known = _known(record, archive.address)
    count = 0
    faults = []
    for file in log_files(folder):
        if known.get(shown(file.path)) == (file.bytes, file.changed):
            continue
        transfer.check_stop()
        try:
            was_sent = _copy(
                archive,
                folder,
                far=f"{folder.name}/{shown(file.path)}",
                file=file,
                transfer=transfer,
            )
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            faults.append(f"{folder}/{shown(file.path)}: {cause(error)}")
            continue
        except ArchivePermanentError as error:
            if not is_well(archive):
                raise
            faults.append(f"{folder}/{shown(file.path)}: {error}")
            continue
        known[shown(file.path)] = (file.bytes, file.changed)
        count += was_sent
        replace_json(record, {"schema": SCHEMA, "address": archive.address, "files": known}, SCHEMA)
    return count, faults


def shown(path: str) -> str:
    """A path as text: bytes that are no UTF-8 as %XX, since neither a bucket nor JSON can hold
    them.
    """
    return "".join(f"%{ord(c) & 0xFF:02X}" if "\udc80" <= c <= "\udcff" else c for c in path)


def _known(record: Path, address: str) -> dict[str, tuple[int, int]]:
    """What is on record; without it, or with garbage, all is compared by being sent again."""
    try:
        value = read_json(record) or {}
        files = record_of(dict[str, tuple[int, int]], value.get("files", {}))
    except ValueError:
        return {}
    if value.get("address") == address:
        return files
    return {}


def _copy(archive: Archive, folder: Path, far: str, file: CopiedLog, transfer: Transfer) -> bool:
    """Have the file there; returns whether it had to be sent."""
    content = folder / file.path
    whole = _beginning(content, file.bytes)
    archive = retried(archive, transfer)
    there = archive.look(far)
    if there is not None:
        begins_alike = there.bytes <= file.bytes and not fault_of_part(
            archive, far, _beginning(content, there.bytes), transfer
        )
        if begins_alike and there.bytes == file.bytes:
            return False
        if not begins_alike:
            far = f"{far}.{whole.digest:.8}"

    def pieces(offset: int) -> Iterator[bytes]:
        for piece in _pieces(content, offset, file.bytes, transfer.piece_bytes):
            transfer.check_stop()
            transfer.sending.take(len(piece))
            yield piece

    for attempt in range(ATTEMPTS):
        archive.upload(far, file.bytes, f"{far} {file.bytes} {file.changed}", pieces)
        fault = fault_of_part(archive, far, whole, transfer)
        if not fault:
            return True
        transfer.say(f"{far}: {fault}" + ("; sending it again" if attempt < ATTEMPTS - 1 else ""))
    raise OSError(f"the archive gives back other bytes than were sent, {ATTEMPTS} times")


def _beginning(path: Path, length: int) -> SourceFile:
    """A file's first bytes, by their digest. Raises FileNotFoundError when it has less."""
    digest = hashlib.sha256()
    for piece in _pieces(path, 0, length, 1 << 20):
        digest.update(piece)
    return SourceFile(path.name, length, digest.hexdigest())


def _pieces(path: Path, start: int, end: int, most: int) -> Iterator[bytes]:
    """A file's bytes from `start` to `end`, at most so many at once. Raises FileNotFoundError when
    it has less.
    """
    with path.open("rb") as stream:
        stream.seek(start)
        while start < end:
            piece = stream.read(min(end - start, most))
            if not piece:
                raise FileNotFoundError(f"{path} was cut while it was read")
            start += len(piece)
            yield piece
