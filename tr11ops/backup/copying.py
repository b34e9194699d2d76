"""One checkpoint from its folder to an archive: sent, read back, compared, and only then a copy.

The order is the promise: every file but the manifest, each sent and read back (beside the sending of others); the
manifest; the name, where the archive renames; the receipt. What has a receipt was wholly read back. A kill at any point
leaves what the next copy of the same checkpoint goes on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tr11ops.backup.base import Archive, hidden_name
from tr11ops.backup.items import Carrier, Item, check_room
from tr11ops.backup.receipts import TAR_SUFFIX, read_receipt, write_receipt
from tr11ops.backup.source import CopySource, read_source
from tr11ops.backup.tar_layout import offsets, tar_layout
from tr11ops.backup.transfer import Transfer, in_threads
from tr11ops.base.errors import ArchivePermanentError, CheckpointChanged, CopyError
from tr11ops.rundir.copies import CopiedFile, Kind, Receipt
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import host_name, now
from trainer.contract.record import Record

Format: TypeAlias = Literal["files", "tar"]


class _Destination(Record):
    """Where a copy goes. `work`: where its files are put together, `location` or a hidden name beside it.

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
    """Copy what `source` holds to the place `base`, or beside it where that is taken; returns the receipt of the copy,
    every byte of it read back. Of a checkpoint, `source` is `read_source` and `base` is `location_of`.

    A copy of the same source that is there already is not made again; with `repair` it is read back, and what differs
    is sent again. A copy of another checkpoint of the same step stays, and this one gets a place beside it.

    Raises SourceDamaged, CheckpointChanged, CopyDiffers, CopyStopped (all CopyError), CopyError itself when a receipt
    at the destination is damaged, ArchiveError when the archive is unreachable longer than the retries last, refuses,
    or is full. In each case nothing new is visible as a copy, and what was sent is gone on with by the next call.
    """
    carrier = Carrier(archive, source, transfer)
    destination = _find_destination(carrier.archive, source, kind, base, format)
    if destination.receipt is not None:
        if not repair:
            return destination.receipt
        format = destination.receipt.format
        source = _as_promised(source, destination.receipt)
        carrier = Carrier(archive, source, transfer)
    blank = Receipt(
        run=run, variant=variant, step=source.step, kind=kind, identity=source.identity, location=destination.location,
        format=format, files=(), copied=destination.receipt.copied if destination.receipt else 0.0, verified=0.0,
        host=host_name(), run_id=run_id,
    )  # fmt: skip
    try:
        return _copy(source, carrier, destination, blank, transfer.parallel, clock)
    except ArchivePermanentError:
        # another copier of the same checkpoint may have been faster, and its copy have its name already
        found = _find_destination(carrier.archive, source, kind, base, format).receipt
        if found is None or found == destination.receipt:
            raise
        return found


def _as_promised(source: CopySource, receipt: Receipt) -> CopySource:
    """Files of which no manifest says the digest have the receipt's: rot here does not replace a good copy."""
    promised = {file.path: (file.bytes, file.digest) for file in receipt.files}
    files = tuple(
        replace(file, digest=promised[file.path][1])
        if file.digest is None and promised.get(file.path, (None, ""))[0] == file.bytes
        else file
        for file in source.files
    )
    return replace(source, files=files)


def work_bytes(folder: Path, step: int, kind: Kind, format: Format = "files") -> int:
    """What `Transfer.on_bytes` will add up to in a copy: each byte sent and read back. Raises CopyError."""
    return 2 * sum(item.bytes for item in items_of(read_source(folder, step, kind), format))


def items_of(source: CopySource, format: Format) -> tuple[Item, ...]:
    """The files of the archive that make up a copy."""
    if format == "tar":
        parts = tar_layout(checkpoint_name(source.step), source.all_files, source.created)
        return (Item("", parts, f"{source.identity} tar"),)
    return tuple(Item(file.path, (file,), file.digest or f"{source.identity} {file.path}") for file in source.all_files)


def _find_destination(archive: Archive, source: CopySource, kind: Kind, base: str, format: Format) -> _Destination:
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
        left = _is_left_over(archive, source, location, format)
        if left == "another":
            continue
        work = hidden_name(location, source.identity) if archive.renames and left == "nothing" else location
        return _Destination(location, work)
    raise CopyError(f"{archive.address}/{location} is taken by something that is no copy of this checkpoint; move it")


def _is_left_over(
    archive: Archive, source: CopySource, location: str, format: Format
) -> Literal["nothing", "ours", "another"]:
    """What lies, without a receipt, where a copy shall go: its maker was killed before the receipt was written.

    An archive that renames shows whole copies alone. In another the files come one by one, the manifest last: before
    that, nothing says whose they are, and they are compared or replaced one by one.
    """
    if format == "tar":
        (item,) = items_of(source, format)
        found = archive.look(location)
        if found is None:
            return "nothing"
        if found.bytes != item.bytes or source.manifest is None:
            return "ours" if found.bytes == item.bytes else "another"
        begin, length = offsets(item.parts)[source.manifest.path], source.manifest.bytes
        content = b"".join(archive.read(location, begin, length))
        return "ours" if content == source.manifest.content else "another"
    if source.manifest is not None:
        path = f"{location}/{source.manifest.path}"
        if archive.look(path) is not None:
            return "ours" if b"".join(archive.read(path)) == source.manifest.content else "another"
    if archive.renames and any(True for _ in archive.list(location)):
        return "another" if source.manifest is not None else "ours"
    return "nothing"


def _copy(
    source: CopySource,
    carrier: Carrier,
    destination: _Destination,
    blank: Receipt,
    parallel: int,
    clock: Callable[[], float],
) -> Receipt:
    items = items_of(source, blank.format)
    manifest = source.manifest.path if source.manifest is not None else None
    first = sorted((item for item in items if item.path != manifest), key=lambda item: -item.bytes)
    if destination.work != destination.location:
        _check_room(carrier.archive, items, destination.work, parallel)
    _carry_all(carrier, first, destination.work, parallel)
    _carry_all(carrier, [item for item in items if item.path == manifest], destination.work, parallel)
    if manifest is None and not source.is_unchanged():
        raise CheckpointChanged(f"{source.folder} was changed while it was copied; nothing was published")
    if destination.work != destination.location:
        _publish(carrier.archive, destination)
    moment = clock()
    receipt = replace(
        blank, files=_files(source, carrier, items, blank.format), copied=blank.copied or moment, verified=moment
    )
    write_receipt(carrier.archive, receipt)
    return receipt


def _check_room(archive: Archive, items: tuple[Item, ...], work: str, parallel: int) -> None:
    """Refuse a copy that cannot end well before it takes the last room from others.

    Of an earlier try, files that are whole are seen; so many as are sent at once may be there in part, and are not
    counted: each is looked at as it is begun.
    """
    free = archive.free_bytes()
    if free is None or len(items) <= parallel:
        return
    there = {file.path for file in archive.list(work)}
    left = sorted((item.bytes for item in items if item.far_path(work) not in there), reverse=True)
    check_room(archive.address, free, sum(left[parallel:]))


def _carry_all(carrier: Carrier, items: Iterable[Item], work: str, parallel: int) -> None:
    """Carry items beside one another; the first error ends the others and is raised."""
    with in_threads(parallel, "backup", carrier.abort.set) as begin:
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
    """Whether the copy has its name: the answer to a rename can be lost, and the next try finds nothing to rename."""
    return not _is_taken(archive, destination.work) and _is_taken(archive, destination.location)


def _is_taken(archive: Archive, path: str) -> bool:
    """Whether there is such a file, or a folder with any in it."""
    return archive.look(path) is not None or any(True for _ in archive.list(path))


def _files(source: CopySource, carrier: Carrier, items: tuple[Item, ...], format: Format) -> tuple[CopiedFile, ...]:
    places = offsets(items[0].parts) if format == "tar" else {}
    return tuple(
        CopiedFile(file.path, file.bytes, carrier.digest(file.path), places.get(file.path)) for file in source.all_files
    )
