"""One checkpoint from its folder to an archive: sent, read back, compared, and only then a copy.

The order is the promise: every file but the manifest, each sent and read back (beside the sending
of others); the manifest; the name, where the archive renames; the receipt. What has a receipt was
wholly read back. A kill at any point leaves what the next copy of the same checkpoint goes on with.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tr11ops.backup.base import Archive, hidden_place
from tr11ops.backup.checking import differs, offsets, placed, tar_layout
from tr11ops.backup.source import CopySource, SourceFile
from tr11ops.backup.survey import TAR_SUFFIX, read_receipt, write_receipt
from tr11ops.backup.transfer import ByteCounter, SharedTransfer, Transfer, in_threads
from tr11ops.base.errors import (
    ArchiveFull,
    ArchivePermanentError,
    CheckpointChanged,
    CopyError,
    SourceDamaged,
)
from tr11ops.base.units import size
from tr11ops.rundir.copies import CopiedFile, Kind, Receipt
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import host_name, now
from trainer.contract.record import Record

# One file of an archive on its way: sent, read back, and sent again if it came back changed.
#
# A file of the archive is one file of the checkpoint, or a tar of all of them.


class Item(Record):
    """One file of the archive, `path` below the copy's place ("" where the copy is one file).

    `identity` tells its content from any other's, so that what was left of another is not taken for
    a part of it.
    """

    path: str
    parts: tuple[SourceFile, ...]
    identity: str

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def far_path(self, place: str) -> str:
        """Where it is when the copy is at `place`."""
        if self.path:
            return f"{place}/{self.path}"
        return place


class Carrier(SharedTransfer):
    """Carries items of one checkpoint to one archive."""

    def __init__(self, archive: Archive, source: CopySource, transfer: Transfer) -> None:
        super().__init__(archive, transfer, "copied")
        self.source = source
        self._digests = {
            file.path: file.digest for file in source.all_files if file.digest is not None
        }

    def digest(self, path: str) -> str:
        """The SHA-256 of a file of the checkpoint that was carried."""
        return self._digests[path]

    def carry(self, item: Item, far: str) -> None:
        """Send an item to `far` unless it is there, and read it back.

        Raises CopyError when it never comes back as it was sent, the errors of the source,
        CopyStopped, ArchiveError.
        """
        found = self.archive.look(far)
        is_there = found is not None and found.bytes == item.bytes
        fault = None
        for attempt in range(self.transfer.resends + 1):
            sent = ByteCounter(None if attempt else self.count)
            if is_there:
                self._learn(item, sent)
            else:
                self._send(item, far, sent)
            fault = self._differs(item, far, is_counted=not attempt)
            if fault is None:
                return
            is_there = False
            self.transfer.say(fault)
        raise CopyError(
            f"{fault}, although it was sent {self.transfer.resends + 1} times; nothing was published"
        )

    # ------------------------------------------------------------------ there
    def _send(self, item: Item, far: str, sent: ByteCounter) -> None:
        def pieces(position: int) -> Iterator[bytes]:
            sent.reach(position)
            check_room(self.archive.address, self.archive.free_bytes(), item.bytes - position)
            for piece in self._pieces(item, position):
                self.transfer.sending.take(len(piece))
                yield piece
                position += len(piece)
                sent.reach(position)

        self.archive.upload(far, item.bytes, item.identity, pieces)

    def _learn(self, item: Item, sent: ByteCounter) -> None:
        """Make sure that the digests of an item that was sent before are known."""
        for _ in self._pieces(item, item.bytes):
            pass
        sent.reach(item.bytes)

    def _pieces(self, item: Item, start: int) -> Iterator[bytes]:
        """The item's bytes from `start` on, from the source; an error, when they are not those of
        the manifest.

        Files whose beginning was sent by an earlier try are not read again for their digest, if the
        manifest says it: what is read back is compared with that, and if it differs all is sent
        from the beginning.
        """
        for part in item.parts:
            skipped, start = min(part.bytes, start), max(0, start - part.bytes)
            if part.content is not None:
                self.check()
                if skipped < part.bytes:
                    yield part.content[skipped:]
            elif skipped < part.bytes or not part.bytes or part.path not in self._digests:
                yield from self._read(part, skipped)

    def _read(self, file: SourceFile, skipped: int) -> Iterator[bytes]:
        """One file of the checkpoint, from a byte on. Raises CheckpointChanged or SourceDamaged
        after its last byte.
        """
        path = self.source.folder / file.path
        is_whole = not skipped or file.path not in self._digests
        digest, position = hashlib.sha256(), 0 if is_whole else skipped
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                before = os.fstat(descriptor)
                os.lseek(descriptor, position, os.SEEK_SET)
                while piece := os.read(
                    descriptor, min(file.bytes - position, self.transfer.piece_bytes)
                ):
                    self.check()
                    if is_whole:
                        digest.update(piece)
                    new = max(0, skipped - position)
                    position += len(piece)
                    if new < len(piece):
                        yield piece[new:]
                after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise self._fault(file, "it is gone", file.digest is None) from None
        except OSError as error:
            if error.errno == errno.EIO:
                raise self._fault(file, "it cannot be read: Input/output error", False) from error
            raise CopyError(
                f"{path} cannot be read: {error.strerror or error}; nothing was published"
            ) from error
        changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if position != file.bytes or after.st_size != file.bytes:
            # a file without a digest was promised by no manifest: another size is a change, no
            # damage
            what = f"it has {after.st_size} bytes instead of {file.bytes}"
            raise self._fault(file, what, changed or file.digest is None)
        if (
            is_whole
            and self._digests.setdefault(file.path, digest.hexdigest()) != digest.hexdigest()
        ):
            raise self._fault(file, "its digest differs from the manifest's", changed)

    def _fault(self, file: SourceFile, what: str, changed: bool) -> CopyError:
        path = self.source.folder / file.path
        if changed or not self.source.is_unchanged():
            return CheckpointChanged(
                f"{path} was changed while it was copied: {what}; nothing was published"
            )
        text = f"{path}: {what}; nothing was published. Restore it from another copy, or: tr11 checkpoints remove"
        return SourceDamaged(f"{text} {self.source.step}", file.path, what)

    # ------------------------------------------------------------------ and back
    def _differs(self, item: Item, far: str, is_counted: bool) -> str | None:
        """What is wrong with an item as the archive gives it back; None when every byte is right.

        A tar is read in several places at once.
        """

        def tell(count: int) -> None:
            self.check()
            self.transfer.reading.take(count)
            if is_counted:
                self.count(count)

        def fault_of(place: tuple[int, SourceFile]) -> str:
            position, part = place
            length = None  # to the end: there may be more than was sent
            if part is not item.parts[-1]:
                length = part.bytes
            pieces = self.archive.read(far, position, length)
            return differs(pieces, part.bytes, part.digest or self._digests[part.path], tell)

        most = min(self.transfer.parallel, len(item.parts))
        with ThreadPoolExecutor(most, thread_name_prefix="backup-read") as threads:
            faults = [fault for fault in threads.map(fault_of, placed(item.parts)) if fault]
        if faults:
            return f"{self.archive.address}/{far} did not come back as it was sent: {faults[0]}"
        return None


def check_room(address: str, free: int | None, needed: int) -> None:
    """Raise ArchiveFull when so many bytes will not fit."""
    if free is not None and needed > free:
        raise ArchiveFull(
            f"{address} has no room: {size(free)} are free, {size(needed)} are still to come"
        )


Format: TypeAlias = Literal["files", "tar"]


class _Destination(Record):
    """Where a copy goes. `work`: where its files are put together, `location` or a hidden name
    beside it.

    `receipt`: of the same checkpoint's copy that is there already.
    """

    location: str
    work: str
    receipt: Receipt | None = None


def copy_source(
    archive: Archive,
    source: CopySource,
    kind: Kind,
    base: str,
    *,
    run: str,
    variant: str,
    transfer: Transfer,
    format: Format = "files",
    repair: bool = False,
    run_id: str = "",
    clock: Callable[[], float] = now,
) -> Receipt:
    """Copy what `source` holds to the place `base`, or beside it where that is taken; returns the
    receipt of the copy, every byte of it read back. Of a checkpoint, `source` is `read_source` and
    `base` is `location_of`.

    A copy of the same source that is there already is not made again; with `repair` it is read
    back, and what differs is sent again. A copy of another checkpoint of the same step stays, and
    this one gets a place beside it.

    Raises SourceDamaged, CheckpointChanged and CopyStopped (all CopyError), CopyError
    itself when a receipt at the destination is damaged, ArchiveError when the archive is
    unreachable longer than the retries last, refuses, or is full. In each case nothing new is
    visible as a copy, and what was sent is gone on with by the next call.
    """
    carrier = Carrier(archive, source, transfer)
    destination = _find_destination(carrier, kind, base, format)
    if destination.receipt is not None:
        if not repair:
            return destination.receipt
        format = destination.receipt.format
        carrier = Carrier(archive, _as_promised(source, destination.receipt), transfer)
    blank = Receipt(
        run=run,
        variant=variant,
        step=source.step,
        kind=kind,
        identity=source.identity,
        location=destination.location,
        format=format,
        files=(),
        copied=destination.receipt.copied if destination.receipt else 0.0,
        verified=0.0,
        host=host_name(),
        run_id=run_id,
    )
    try:
        return _copy(carrier, destination, blank, clock)
    except ArchivePermanentError:
        # another copier of the same checkpoint may have been faster, and its copy have its name
        # already
        found = _find_destination(carrier, kind, base, format).receipt
        if found is None or found == destination.receipt:
            raise
        return found


def _as_promised(source: CopySource, receipt: Receipt) -> CopySource:
    """Files of which no manifest says the digest have the receipt's: rot here does not replace a
    good copy.
    """
    promised = {file.path: (file.bytes, file.digest) for file in receipt.files}
    files = tuple(
        replace(file, digest=promised[file.path][1])
        if file.digest is None and promised.get(file.path, (None, ""))[0] == file.bytes
        else file
        for file in source.files
    )
    return replace(source, files=files)


def work_bytes(source: CopySource, format: Format = "files") -> int:
    """What `Transfer.on_bytes` will add up to in a copy: each byte sent and read back."""
    return 2 * sum(item.bytes for item in items_of(source, format))


def items_of(source: CopySource, format: Format) -> tuple[Item, ...]:
    """The files of the archive that make up a copy."""
    if format == "tar":
        parts = tar_layout(checkpoint_name(source.step), source.all_files, source.created)
        return (Item("", parts, f"{source.identity} tar"),)
    return tuple(
        Item(file.path, (file,), file.digest or f"{source.identity} {file.path}")
        for file in source.all_files
    )


def _find_destination(carrier: Carrier, kind: Kind, base: str, format: Format) -> _Destination:
    archive, source = carrier.archive, carrier.source
    suffix = TAR_SUFFIX if format == "tar" else ""
    for identity in ("", source.identity):
        location = (f"{base}.{identity[:8]}" if identity else base) + suffix
        try:
            receipt = read_receipt(archive, location)
        except ValueError as error:
            raise CopyError(
                f"{error}; give it another name, and what lies beside it is read and gets a new one"
            ) from None
        if receipt is not None:
            if receipt.identity == source.identity and receipt.kind == kind:
                return _Destination(receipt.location, receipt.location, receipt)
            continue
        left = _is_left_over(carrier, location, format)
        if left == "another":
            continue
        if archive.renames and left == "nothing":
            work = hidden_place(location, source.identity)
        else:
            work = location
        return _Destination(location, work)
    raise CopyError(
        f"{archive.address}/{location} is taken by something that is no copy of this checkpoint; move it"
    )


def _is_left_over(
    carrier: Carrier, location: str, format: Format
) -> Literal["nothing", "ours", "another"]:
    """What lies, without a receipt, where a copy shall go: its maker was killed before the receipt
    was written.

    An archive that renames shows whole copies alone. In another the files come one by one, the
    manifest last: before that, nothing says whose they are, and they are compared or replaced one
    by one.
    """
    archive, source = carrier.archive, carrier.source
    if format == "tar":
        return _left_over_tar(carrier, location)
    if source.manifest is not None:
        path = f"{location}/{source.manifest.path}"
        if archive.look(path) is not None:
            if b"".join(archive.read(path)) == source.manifest.content:
                return "ours"
            return "another"
    if archive.renames and any(True for _ in archive.list(location)):
        if source.manifest is not None:
            return "another"
        return "ours"
    return "nothing"


def _left_over_tar(carrier: Carrier, location: str) -> Literal["nothing", "ours", "another"]:
    archive, source = carrier.archive, carrier.source
    (item,) = items_of(source, "tar")
    found = archive.look(location)
    if found is None:
        return "nothing"
    if found.bytes != item.bytes:
        return "another"
    if source.manifest is None:
        return "ours"
    begin, length = offsets(item.parts)[source.manifest.path], source.manifest.bytes
    content = b"".join(archive.read(location, begin, length))
    if content == source.manifest.content:
        return "ours"
    return "another"


def _copy(
    carrier: Carrier, destination: _Destination, blank: Receipt, clock: Callable[[], float]
) -> Receipt:
    source = carrier.source
    items = items_of(source, blank.format)
    manifest = source.manifest.path if source.manifest is not None else None
    first = sorted((item for item in items if item.path != manifest), key=lambda item: -item.bytes)
    if destination.work != destination.location:
        _check_room(carrier, items, destination.work)
    _carry_all(carrier, first, destination.work)
    _carry_all(carrier, [item for item in items if item.path == manifest], destination.work)
    if manifest is None and not source.is_unchanged():
        raise CheckpointChanged(
            f"{source.folder} was changed while it was copied; nothing was published"
        )
    if destination.work != destination.location:
        _publish(carrier.archive, destination)
    moment = clock()
    receipt = replace(
        blank,
        files=_files(carrier, items, blank.format),
        copied=blank.copied or moment,
        verified=moment,
    )
    write_receipt(carrier.archive, receipt)
    return receipt


def _check_room(carrier: Carrier, items: tuple[Item, ...], work: str) -> None:
    """Refuse a copy that cannot end well before it takes the last room from others.

    Of an earlier try, files that are whole are seen; so many as are sent at once may be there in
    part, and are not counted: each is looked at as it is begun.
    """
    archive, parallel = carrier.archive, carrier.transfer.parallel
    free = archive.free_bytes()
    if free is None or len(items) <= parallel:
        return
    there = {file.path for file in archive.list(work)}
    left = sorted((item.bytes for item in items if item.far_path(work) not in there), reverse=True)
    check_room(archive.address, free, sum(left[parallel:]))


def _carry_all(carrier: Carrier, items: Iterable[Item], work: str) -> None:
    """Carry items beside one another; the first error ends the others and is raised."""
    with in_threads(carrier.transfer.parallel, "backup", carrier.abort.set) as begin:
        for item in items:
            begin(carrier.carry, item, item.far_path(work))


def _publish(archive: Archive, destination: _Destination) -> None:
    """Give a finished copy its name. Another copier of the same checkpoint may have been faster."""
    try:
        archive.move(destination.work, destination.location)
    except ArchivePermanentError:
        if not _is_published(archive, destination):
            raise


def _is_published(archive: Archive, destination: _Destination) -> bool:
    """Whether the copy has its name: the answer to a rename can be lost, and the next try finds
    nothing to rename.
    """
    return not _is_taken(archive, destination.work) and _is_taken(archive, destination.location)


def _is_taken(archive: Archive, path: str) -> bool:
    """Whether there is such a file, or a folder with any in it."""
    return archive.look(path) is not None or any(True for _ in archive.list(path))


def _files(carrier: Carrier, items: tuple[Item, ...], format: Format) -> tuple[CopiedFile, ...]:
    if format == "tar":
        places = offsets(items[0].parts)
    else:
        places = {}
    return tuple(
        CopiedFile(file.path, file.bytes, carrier.digest(file.path), places.get(file.path))
        for file in carrier.source.all_files
    )
