"""What lies at the destination now, by its receipts and its list of files; and the run's own
records brought in line.

The receipts are the truth: a copy that has one is put on record here no matter who made it, and a
record whose receipt is gone is of no copy. Files that are missing or cut off show in the list,
without a byte being read.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, get_args

from msgspec.structs import replace

from tr11ops.backup.archives import is_folder, open_archive
from tr11ops.backup.base import Archive
from tr11ops.backup.folder import MARKER_FILE
from tr11ops.backup.ledger import ArchiveState, last_state
from tr11ops.base.errors import ArchiveError, ArchivePermanentError
from tr11ops.base.units import duration
from tr11ops.rundir.claims import Clocks
from tr11ops.rundir.copies import (
    FOLDERS,
    RECEIPT_SUFFIX,
    SCHEMA,
    CopiedFile,
    CopyRecord,
    Kind,
    Receipt,
    read_copies,
    read_copy,
    read_drill,
    write_copy,
)
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of_text
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

# The receipt that lies beside each copy at the destination: written last, so what has none is no
# copy.

MOST_BYTES = 64 << 20  # 100,000 files with long names have 20 MB
TAR_SUFFIX = ".tar"


def receipt_path(location: str) -> str:
    """Where the receipt of the copy at `location` (a folder or a tar) lies."""
    return location.removesuffix(TAR_SUFFIX) + RECEIPT_SUFFIX


def file_path(receipt: Receipt, file: CopiedFile) -> str:
    """The file of the archive that holds a file of the copy: itself, or the tar."""
    if receipt.format == "tar":
        return receipt.location
    return f"{receipt.location}/{file.path}"


def read_receipt(archive: Archive, location: str) -> Receipt | None:
    """The receipt of one copy, or None when there is none. Raises ArchiveError; ValueError when it
    is damaged.
    """
    path = receipt_path(location)
    if archive.look(path) is None:
        return None
    return _read(archive, path)


def list_receipts(
    archive: Archive, variant: str, kinds: Sequence[Kind] = get_args(Kind)
) -> tuple[Receipt, ...]:
    """Receipts of all copies of these kinds, by step, but those that cannot be read. Raises
    ArchiveUnavailable.
    """
    found = []
    for kind in kinds:
        folder = f"{FOLDERS[kind]}/{variant}"
        for file in archive.list(folder):
            name = file.path.removeprefix(f"{folder}/")
            if "/" not in name and name.endswith(RECEIPT_SUFFIX):
                with suppress(ValueError, RecursionError, ArchivePermanentError):
                    found.append(_read(archive, file.path))
    return tuple(sorted(found, key=lambda receipt: (receipt.step, receipt.kind, receipt.location)))


def write_receipt(archive: Archive, receipt: Receipt) -> None:
    """Put the receipt beside its copy; from then on the copy counts. Raises ArchiveError."""
    archive.put(receipt_path(receipt.location), format_receipt(receipt))


def format_receipt(receipt: Receipt) -> bytes:
    """The receipt's file: JSON, one line for each file of the copy."""
    value = document(receipt)
    files = ",\n".join(f"  {json.dumps(file, sort_keys=True)}" for file in value.pop("files"))
    rest = json.dumps(value, sort_keys=True)
    return f'{rest[:-1]}, "files": [\n{files}\n]}}\n'.encode()


def parse_receipt(content: bytes, where: str) -> Receipt:
    """The receipt in these bytes. Raises ValueError, which names `where`, when they are none or of
    a newer tr11.
    """
    try:
        receipt = record_of_text(Receipt, content)
        if receipt.schema > SCHEMA:
            raise ValueError("written by a newer tr11")
    except ValueError as error:
        raise ValueError(
            f"{where} is not the receipt of a copy ({' '.join(str(error).split())})"
        ) from None
    return receipt


def _read(archive: Archive, path: str) -> Receipt:
    content = bytearray()
    for piece in archive.read(path):
        content += piece
        if len(content) > MOST_BYTES:
            raise ValueError(
                f"{path} is not the receipt of a copy (it has more than {MOST_BYTES} bytes)"
            )
    where = f"{archive.address}/{path}"
    receipt = parse_receipt(bytes(content), where)
    if receipt_path(receipt.location) != path:
        raise ValueError(
            f"{where} is the receipt of {receipt.location}: it was renamed; give its name back"
        )
    return receipt


class Survey(Record):
    """One look at an archive: receipts by the place of their copy, and all files' sizes.

    `unreadable`: receipts that hold no receipt, which is damage. `unread`: paths that could not be
    looked at: nothing is concluded of what lies there, but such a copy was not seen.
    """

    receipts: Mapping[str, Receipt]
    unreadable: Mapping[str, str]
    sizes: Mapping[str, int]
    unread: Mapping[str, str] = {}

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
        directory.drill.unlink()
    for path in sorted((directory.paths.state / "backup" / "copies").glob("*/*.json")):
        try:
            read_copy(path)
        except ValueError:
            path.unlink()


def bring_in_line(
    directory: RunDirectory, archive: Archive, seen: Survey
) -> tuple[tuple[CopyRecord, Mapping[str, str]], ...]:
    """Write the records that differ from what was seen; returns them, each with what is newly wrong
    in it, by file. Raises OSError, ValueError.
    """
    changes = tuple(_changes(records_of(directory, archive), archive, seen))
    for record, _ in changes:
        write_copy(directory, record)
    return changes


def _changes(
    records: Mapping[str, CopyRecord], archive: Archive, seen: Survey
) -> Iterator[tuple[CopyRecord, Mapping[str, str]]]:
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
            yield after, {path: faults[path] for path in sorted(new)}
    for location, before in records.items():
        if location in seen.receipts or seen.why_unread(location):
            continue
        name, path = _receipt_name(location), receipt_path(location)
        why = seen.unreadable.get(path, "the receipt is missing")
        if name not in before.damaged:
            after = replace(before, damaged=tuple(sorted({*before.damaged, name})))
            yield after, {name: why}


def _receipt_name(location: str) -> str:
    return receipt_path(location).rpartition("/")[2]


# Whether copies on record are still where they were made: asked before anything is removed on
# their strength.
#
# A folder is looked at now: receipt and sizes of each copy. What lies behind a network counts while a
# round has listed it within `backup.confirm_hours`. A copy that could not be looked at does not
# count.

CopyKey: TypeAlias = tuple[str, str]  # a copy's archive and its location there
Sight: TypeAlias = Callable[[Iterable[CopyRecord], Clocks], Mapping[CopyKey, str]]
THREADS = 8  # each look is some round trips on a shared file system
CLOCK_SECONDS = 600.0  # two machines' clocks may differ by so much


def look_at_copies(
    card: RunCard, directory: RunDirectory, copies: Iterable[CopyRecord], clocks: Clocks
) -> Mapping[CopyKey, str]:
    """Why copies of the card's archives do not count as things are; those that are well are left
    out.

    Raises OSError when the record of an archive cannot be read.
    """
    by_address: dict[tuple[str, str], list[CopyRecord]] = {}
    for copy in copies:
        by_address.setdefault((copy.archive, copy.address), []).append(copy)
    found: dict[CopyKey, str] = {}
    for (name, address), ours in by_address.items():
        if is_folder(address):
            whys = _look(name, card, ours)
        else:
            state = last_state(directory, name)
            whys = [too_old(copy, state, clocks, card.backup.confirm_hours * 3600) for copy in ours]
        found.update(
            {(name, copy.location): why for copy, why in zip(ours, whys, strict=True) if why}
        )
    return found


def _look(name: str, card: RunCard, copies: list[CopyRecord]) -> list[str]:
    try:
        archive = open_archive(name, card)
    except ArchiveError as error:
        return [str(error)] * len(copies)
    try:
        with ThreadPoolExecutor(min(THREADS, len(copies)), thread_name_prefix="look") as threads:
            return list(threads.map(lambda copy: missing(archive, copy), copies))
    finally:
        archive.close()


def missing(archive: Archive, copy: CopyRecord) -> str:
    """What of a copy is not at its archive now, by its receipt and the sizes of its files; "" when
    all is.
    """
    try:
        receipt = read_receipt(archive, copy.location)
        if receipt is None:
            return f"{archive.address}/{copy.location} has no receipt any more"
        if (receipt.identity, receipt.kind, receipt.step) != (copy.identity, copy.kind, copy.step):
            return f"{archive.address}/{copy.location} is a copy of another checkpoint now"
        faults = Survey({}, {}, _sizes(archive, receipt)).faults(receipt)
    except (ArchiveError, ValueError) as error:
        return str(error)
    first = next(iter(faults.items()), None)
    if first is None:
        return ""
    return f"{archive.address}/{copy.location}/{first[0]}: {first[1]}"


def _sizes(archive: Archive, receipt: Receipt) -> dict[str, int]:
    if receipt.format == "tar":
        found = archive.look(receipt.location)
        if found is None:
            return {}
        return {found.path: found.bytes}
    return {file.path: file.bytes for file in archive.list(receipt.location)}


def too_old(copy: CopyRecord, state: ArchiveState | None, clocks: Clocks, seconds: float) -> str:
    """Why the last sight of a copy behind a network is too long ago; "" when it is not. Pure.

    A sight in the future comes of a clock that was set wrong: it says nothing.
    """
    moments = [copy.verified, copy.reread or 0.0]
    if state is not None and state.address == copy.address and copy.location not in state.unseen:
        moments.append(state.listed or 0.0)
    past = [max(ages) for moment in moments if min(ages := clocks.ages(moment)) >= -CLOCK_SECONDS]
    if not past:
        return f"when the {copy.archive} was last listed is not known: a clock is wrong"
    if min(past) > seconds:
        return (
            f"it was last seen in the {copy.archive} {duration(min(past))} ago, and {duration(seconds)} are allowed "
            "(backup.confirm_hours): tr11 backup run looks again"
        )
    return ""
