"""Reads copies back from the destination against their receipts, and keeps when each file was last
found right.

    state/backup/reread/ARCHIVE/FOLDER-global_stepN.json     {path: when it was read again}, since the record's `reread`

A file that is missing or has other bytes is damage, and put on record at once. A destination that
does not answer, or does not let us read, says nothing about the bytes: that is an error of the
round, and nothing is concluded.
"""

from __future__ import annotations

import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.backup.base import Archive
from tr11ops.backup.checking import BLOCK, differs, placed, tar_layout
from tr11ops.backup.due import StoredFile
from tr11ops.backup.source import SourceFile
from tr11ops.backup.survey import file_path
from tr11ops.backup.transfer import Transfer, in_threads, retried
from tr11ops.base.observed import replace_json
from tr11ops.rundir.copies import CopyRecord, Receipt, latest_record, write_copy
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import record_of
from trainer.contract.record import Finite
from trainer.contract.state_file import read_json

# by file: where, and what must be there
Gaps: TypeAlias = Mapping[str, Sequence[tuple[int, SourceFile]]]
SCHEMA = 1
KEEP_SECONDS = 20.0  # between two writes of what was read


# ----------------------------------------------------------------------------- reading
def fault_of(
    archive: Archive, stored: StoredFile, transfer: Transfer, gaps: Gaps | None = None
) -> str:
    """Read one file back; what is wrong with it, "" when it is what was copied. Of a tar, with what
    lies around it.

    Raises ArchiveError when that could not be found out, CopyStopped.
    """
    file, is_tar = stored.file, stored.receipt.format == "tar"
    path = file_path(stored.receipt, file)
    parts = [(file.offset or 0, SourceFile("", file.bytes, file.digest))]
    parts += (gaps or {}).get(file.path, ())
    for number, (offset, part) in enumerate(parts):
        fault = fault_of_part(archive, path, part, transfer, offset=offset, is_alone=not is_tar)
        if fault:
            if number:
                return f"its header in the tar: {fault}"
            return fault
    return ""


def gaps_of(archive: Archive, receipt: Receipt, transfer: Transfer) -> Gaps:
    """The bytes of a tar that are of no file, by the file after them; the end's by the last one.

    They follow from the receipt and from one time, which the first header says. None for a copy in
    files. Raises ArchiveError, CopyStopped.
    """
    if receipt.format != "tar" or not receipt.files:
        return {}
    begin = max(0, (receipt.files[0].offset or 0) - BLOCK)
    archive = retried(archive, transfer)
    if archive.look(receipt.location):
        block = b"".join(archive.read(receipt.location, begin, BLOCK))
    else:
        block = b""
    try:
        created = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").mtime
    except tarfile.HeaderError:
        created = 0  # then no header is as it should be, and that is told
    sources = tuple(SourceFile(file.path, file.bytes, file.digest) for file in receipt.files)
    found: dict[str, list[tuple[int, SourceFile]]] = {}
    waiting: list[tuple[int, SourceFile]] = []
    for position, part in placed(tar_layout(checkpoint_name(receipt.step), sources, created)):
        if part.path:
            found[part.path], waiting = waiting, []
        else:
            waiting.append((position, part))
    found[sources[-1].path] += waiting
    return found


def fault_of_part(
    archive: Archive,
    path: str,
    part: SourceFile,
    transfer: Transfer,
    *,
    offset: int = 0,
    is_alone: bool = True,
) -> str:
    """In what a file of the archive, or a part of one, is not what it should be; "" when it is.
    `is_alone`: the file has nothing else in it.

    Raises ArchiveError, CopyStopped.
    """
    transfer.check_stop()
    archive = retried(archive, transfer)
    found = archive.look(path)
    if found is None:
        return "missing"
    end = offset + part.bytes
    if found.bytes < end or (found.bytes != end and is_alone):
        return f"{found.bytes} bytes, {end} were copied"
    told = 0

    def tell(count: int) -> None:
        nonlocal told
        transfer.check_stop()
        transfer.reading.take(count)
        transfer.on_bytes(count)
        told += count

    try:
        return differs(archive.read(path, offset, part.bytes), part.bytes, part.digest or "", tell)
    except BaseException:
        transfer.on_bytes(-told)
        raise


def read_files(
    archive: Archive,
    files: Sequence[StoredFile],
    transfer: Transfer,
    tell: Callable[[StoredFile, str], None],
) -> None:
    """Read all of them, some at a time; `tell` hears of each that was read, one at a time.

    Raises ArchiveError, CopyStopped; what was read until then has been told.
    """
    lock = threading.Lock()
    gone = threading.Event()
    copies = {stored.receipt.location: stored.receipt for stored in files}
    gaps = {place: gaps_of(archive, receipt, transfer) for place, receipt in copies.items()}

    def read(stored: StoredFile) -> None:
        if gone.is_set():
            return
        around = gaps[stored.receipt.location]
        fault = fault_of(archive, stored, transfer, around)
        if fault:  # the way back may have changed it: damage is what is read twice
            fault = fault_of(archive, stored, transfer, around)
        with lock:
            tell(stored, fault)

    with in_threads(max(1, min(transfer.parallel, len(files))), "reread", gone.set) as begin:
        for stored in files:
            begin(read, stored)


# ----------------------------------------------------------------------------- what is on record
class ReadHistory:
    """When each file of one archive's copies was last found right. The process whose turn it is
    writes it, no other.

    A record's `reread` is the time of the file that waits longest; the history keeps what was read
    since. Raises OSError.
    """

    def __init__(
        self, directory: RunDirectory, archive: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._folder = directory.paths.state / "backup" / "reread" / archive
        self._clock = clock
        self._times: dict[str, dict[str, float]] = {}
        self._faults: dict[str, dict[str, str]] = {}
        self._changed: set[str] = set()
        self._sound: dict[str, set[str]] = {}  # found right since this history was opened
        self._kept = time.monotonic()

    def last_read(self, record: CopyRecord, path: str) -> float:
        """When a file was last read back, at the latest when it was copied."""
        return self._of(record.location).get(path) or record.reread or record.verified

    def stored(self, record: CopyRecord, receipt: Receipt) -> Iterator[StoredFile]:
        """A copy's files as the rotation sees them."""
        for file in receipt.files:
            yield StoredFile(receipt, file, self.last_read(record, file.path))

    def note(self, stored: StoredFile, fault: str) -> None:
        """A file was read just now."""
        location, path = stored.place
        if fault:
            self._faults.setdefault(location, {})[path] = fault
            self._of(location).pop(path, None)
            self._sound.get(location, set()).discard(path)
        else:
            self._of(location)[path] = self._clock()
            self._sound.setdefault(location, set()).add(path)
        self._changed.add(location)

    def is_old(self) -> bool:
        """Whether it is time to keep what was noted."""
        return time.monotonic() - self._kept >= KEEP_SECONDS

    def keep(
        self, records: MutableMapping[str, CopyRecord], receipts: Mapping[str, Receipt]
    ) -> tuple[tuple[CopyRecord, Mapping[str, str]], ...]:
        """Write what was noted, in `records` too.

        Returns the records that changed their soundness, with what is newly wrong in each.
        """
        self._kept = time.monotonic()
        changed = []
        for location in sorted(self._changed):
            known, receipt = records.get(location), receipts.get(location)
            if known is None or receipt is None:
                continue
            before = latest_record(self._directory, known)
            after = self._judged(before, receipt)
            replace_json(
                self._file(location),
                {"schema": SCHEMA, "read": self._after(location, after)},
                SCHEMA,
            )
            if after != before:
                write_copy(self._directory, after)
                records[location] = after
            if after.damaged != before.damaged:
                new = self._faults.get(location, {})
                changed.append((after, {path: new[path] for path in after.damaged if path in new}))
        self._changed.clear()
        self._faults.clear()
        return tuple(changed)

    def _judged(self, record: CopyRecord, receipt: Receipt) -> CopyRecord:
        sound, faults = (
            self._sound.get(record.location, set()),
            self._faults.get(record.location, {}),
        )
        oldest = min(
            (self.last_read(record, file.path) for file in receipt.files), default=record.verified
        )
        still = set(record.damaged) - sound
        return replace(
            record,
            reread=oldest if oldest > record.verified else record.reread,
            damaged=tuple(sorted(still | faults.keys())),
        )

    def _after(self, location: str, record: CopyRecord) -> dict[str, float]:
        times = self._of(location)
        kept = {path: moment for path, moment in times.items() if moment > (record.reread or 0.0)}
        self._times[location] = kept
        return kept

    def _of(self, location: str) -> dict[str, float]:
        if location not in self._times:
            self._times[location] = _times(self._file(location))
        return self._times[location]

    def _file(self, location: str) -> Path:
        return self._folder / f"{location.replace('/', '-').removesuffix('.tar')}.json"


def _times(path: Path) -> dict[str, float]:
    """What a file says; garbage counts as nothing, since then the files are only read sooner."""
    try:
        return record_of(dict[str, Finite], (read_json(path) or {}).get("read", {}))
    except ValueError:
        return {}
