"""What lies at the destination now, by its receipts and its list of files; and the run's own
records brought in line.

The receipts are the truth: a copy that has one is put on record here no matter who made it, and a
record whose receipt is gone is of no copy. Files that are missing or cut off show in the list,
without a byte being read.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import get_args

from msgspec import field
from msgspec.structs import replace

from tr11ops.backup.base import Archive
from tr11ops.backup.folder import MARKER_FILE
from tr11ops.backup.ledger import drill_file, read_drill
from tr11ops.backup.receipts import read_receipt, receipt_path
from tr11ops.base.errors import ArchiveError
from tr11ops.rundir.copies import (
    FOLDERS,
    RECEIPT_SUFFIX,
    CopyRecord,
    Kind,
    Receipt,
    read_copies,
    read_copy,
    write_copy,
)
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record


class Survey(Record):
    """One look at an archive: receipts by the place of their copy, and all files' sizes.

    `unreadable`: receipts that hold no receipt, which is damage. `unread`: paths that could not be
    looked at: nothing is concluded of what lies there, but such a copy was not seen.
    """

    receipts: Mapping[str, Receipt]
    unreadable: Mapping[str, str]
    sizes: Mapping[str, int]
    unread: Mapping[str, str] = field(default_factory=dict)

    def why_unread(self, location: str) -> str:
        """Why it is not known how a copy is; "" when it was looked at."""
        places = (location, receipt_path(location))
        found = [
            why for path, why in self.unread.items() if any(_is_at(place, path) for place in places)
        ]
        if found:
            return found[0]
        return ""

    def faults(self, receipt: Receipt) -> dict[str, str]:
        """Files of a copy that are missing or cut off, by the list alone."""
        if receipt.format == "tar":
            size = self.sizes.get(receipt.location)
            ends = {file.path: (file.offset or 0) + file.bytes for file in receipt.files}
            if size is None:
                why = "the tar is missing"
            else:
                why = f"cut off: the tar has {size} bytes"
            return {path: why for path, end in ends.items() if size is None or end > size}
        found = {}
        for file in receipt.files:
            size = self.sizes.get(f"{receipt.location}/{file.path}")
            if size != file.bytes:
                if size is None:
                    found[file.path] = "missing"
                else:
                    found[file.path] = f"{size} bytes, {file.bytes} were copied"
        return found


class RecordChange(Record):
    """A record that is not what it was, or is new; `faults` are newly found, by file."""

    record: CopyRecord
    faults: Mapping[str, str]


def survey(archive: Archive, run: str, variant: str, run_id: str = "") -> Survey:
    """Look at all copies of a run's variant, not at those of another run of that name.

    Raises ArchiveError when that is true of the archive as a whole.
    """
    receipts: dict[str, Receipt] = {}
    unreadable: dict[str, str] = {}
    unread: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for folder in (f"{FOLDERS[kind]}/{variant}" for kind in get_args(Kind)):
        for file in archive.list(folder, unread.__setitem__):
            sizes[file.path] = file.bytes
            name = file.path.removeprefix(f"{folder}/")
            if "/" in name or not name.endswith(RECEIPT_SUFFIX):
                continue
            try:
                receipt = read_receipt(archive, file.path.removesuffix(RECEIPT_SUFFIX))
            except (ValueError, RecursionError) as error:
                unreadable[file.path] = str(error)
                continue
            except ArchiveError as error:
                if not is_well(archive):
                    raise
                unread[file.path] = str(error)
                continue
            if receipt is None or (receipt.run, receipt.variant) != (run, variant):
                continue
            if receipt.run_id and run_id and receipt.run_id != run_id:
                continue
            if receipt_path(receipt.location) != file.path:
                unreadable[file.path] = (
                    f"{file.path} is the receipt of another place, {receipt.location[:200]!r}"
                )
                continue
            receipts[receipt.location] = receipt
    return Survey(receipts, unreadable, sizes, unread)


def is_well(archive: Archive) -> bool:
    """Whether an archive answers at all, when a thing in it could not be had: then only that thing
    is at fault.
    """
    try:
        if archive.look(MARKER_FILE) is not None:
            collections.deque(archive.read(MARKER_FILE), maxlen=0)
    except ArchiveError:
        return False
    return True


def _is_at(place: str, path: str) -> bool:
    """Whether `path` is a place, lies in it, or holds it."""
    return place == path or path.startswith(f"{place}/") or place.startswith(f"{path}/")


def records_of(
    directory: RunDirectory, archive: Archive, every_variant: bool = False
) -> dict[str, CopyRecord]:
    """The records of an archive's copies by their place; those of another one behind the same key
    do not count.

    Raises OSError, ValueError.
    """
    return {
        copy.location: copy
        for copy in read_copies(directory, every_variant)
        if copy.archive == archive.name and copy.address == archive.address
    }


def forget_unreadable(directory: RunDirectory) -> None:
    """Remove records that hold no record. Raises OSError.

    Those of copies are made again from the receipts, that of a drill by the next drill.
    """
    try:
        read_drill(directory)
    except ValueError:
        drill_file(directory).unlink()
    for path in sorted((directory.paths.state / "backup" / "copies").glob("*/*.json")):
        try:
            read_copy(path)
        except ValueError:
            path.unlink()


def bring_in_line(
    directory: RunDirectory, archive: Archive, seen: Survey
) -> tuple[RecordChange, ...]:
    """Write the records that differ from what was seen; returns them. Raises OSError, ValueError."""
    changes = tuple(_changes(records_of(directory, archive), archive, seen))
    for change in changes:
        write_copy(directory, change.record)
    return changes


def _changes(
    records: Mapping[str, CopyRecord], archive: Archive, seen: Survey
) -> Iterator[RecordChange]:
    for location, receipt in seen.receipts.items():
        if seen.why_unread(location):
            faults = {}
        else:
            faults = seen.faults(receipt)
        before = records.get(location)
        base = before
        if base is None or (base.identity, base.copied) != (receipt.identity, receipt.copied):
            base = CopyRecord.of(receipt, archive.name, archive.address)
        receipt_name = _receipt_name(location)
        rest = {path for path in base.damaged if path != receipt_name}
        after = replace(base, damaged=tuple(sorted(rest | faults.keys())))
        if after != before:
            new = faults.keys() - (set() if before is None else set(before.damaged))
            yield RecordChange(after, {path: faults[path] for path in sorted(new)})
    for location, before in records.items():
        if location in seen.receipts or seen.why_unread(location):
            continue
        name, path = _receipt_name(location), receipt_path(location)
        why = seen.unreadable.get(path, "the receipt is missing")
        if name not in before.damaged:
            after = replace(before, damaged=tuple(sorted({*before.damaged, name})))
            yield RecordChange(after, {name: why})


def _receipt_name(location: str) -> str:
    return receipt_path(location).rpartition("/")[2]
