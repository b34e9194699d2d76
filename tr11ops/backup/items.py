"""One file of an archive on its way: sent, read back, and sent again if it came back changed.

A file of the archive is one file of the checkpoint, or a tar of all of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tr11ops.backup.base import Archive
from tr11ops.backup.checking import Checker, PartRange, stretches_of
from tr11ops.backup.retried import SharedTransfer
from tr11ops.backup.source import CopySource, SourceFile
from tr11ops.backup.tar_layout import Filler
from tr11ops.backup.transfer import ByteCounter, Transfer
from tr11ops.base.errors import ArchiveFull, CheckpointChanged, CopyDiffers, CopyError, SourceDamaged
from tr11ops.base.units import size
from trainer.contract.record import Record


class Item(Record):
    """One file of the archive, `path` below the copy's place ("" where the copy is one file).

    `identity` tells its content from any other's, so that what was left of another is not taken for a part of it.
    """

    path: str
    parts: tuple[Filler | SourceFile, ...]
    identity: str

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def far_path(self, place: str) -> str:
        """Where it is when the copy is at `place`."""
        return f"{place}/{self.path}" if self.path else place


class Carrier(SharedTransfer):
    """Carries items of one checkpoint to one archive."""

    def __init__(self, archive: Archive, source: CopySource, transfer: Transfer) -> None:
        super().__init__(archive, transfer, "copied")
        self._source = source
        self._digests = {file.path: file.digest for file in source.all_files if file.digest is not None}

    def digest(self, path: str) -> str:
        """The SHA-256 of a file of the checkpoint that was carried."""
        return self._digests[path]

    def carry(self, item: Item, far: str) -> None:
        """Send an item to `far` unless it is there, and read it back.

        Raises CopyDiffers when it never comes back as it was sent, the errors of the source, CopyStopped, ArchiveError.
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
        raise CopyDiffers(f"{fault}, although it was sent {self.transfer.resends + 1} times; nothing was published")

    # ------------------------------------------------------------------ there
    def _send(self, item: Item, far: str, sent: ByteCounter) -> None:
        def send() -> None:
            upload = self.archive.upload(far, item.bytes, item.identity)
            position = upload.offset
            sent.reach(position)
            try:
                check_room(self.archive.address, self.archive.free_bytes(), item.bytes - position)
                for piece in self._pieces(item, position):
                    self.transfer.sending.take(len(piece))
                    upload.write(piece)
                    position += len(piece)
                    sent.reach(position)
                upload.finish()
            except BaseException:
                upload.leave()
                raise

        self.archive.retry(send, lambda: sent.reached)

    def _learn(self, item: Item, sent: ByteCounter) -> None:
        """Make sure that the digests of an item that was sent before are known."""
        for _ in self._pieces(item, item.bytes):
            pass
        sent.reach(item.bytes)

    def _pieces(self, item: Item, start: int) -> Iterator[bytes]:
        """The item's bytes from `start` on, from the source; an error, when they are not those of the manifest.

        Files whose beginning was sent by an earlier try are not read again for their digest, if the manifest says it:
        what is read back is compared with that, and if it differs all is sent from the beginning.
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
        """One file of the checkpoint, from a byte on. Raises CheckpointChanged or SourceDamaged after its last byte."""
        path = self._source.folder / file.path
        is_whole = not skipped or file.path not in self._digests
        digest, position = hashlib.sha256(), 0 if is_whole else skipped
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                before = os.fstat(descriptor)
                os.lseek(descriptor, position, os.SEEK_SET)
                while piece := os.read(descriptor, min(file.bytes - position, self.transfer.piece_bytes)):
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
            raise CopyError(f"{path} cannot be read: {error.strerror or error}; nothing was published") from error
        changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if position != file.bytes or after.st_size != file.bytes:
            # a file without a digest was promised by no manifest: another size is a change, no damage
            what = f"it has {after.st_size} bytes instead of {file.bytes}"
            raise self._fault(file, what, changed or file.digest is None)
        if is_whole and self._digests.setdefault(file.path, digest.hexdigest()) != digest.hexdigest():
            raise self._fault(file, "its digest differs from the manifest's", changed)

    def _fault(self, file: SourceFile, what: str, changed: bool) -> CopyError:
        path = self._source.folder / file.path
        if changed or not self._source.is_unchanged():
            return CheckpointChanged(f"{path} was changed while it was copied: {what}; nothing was published")
        text = f"{path}: {what}; nothing was published. Restore it from another copy, or: tr11 checkpoints remove"
        return SourceDamaged(f"{text} {self._source.step}", file.path, what)

    # ------------------------------------------------------------------ and back
    def _differs(self, item: Item, far: str, is_counted: bool) -> str | None:
        """What is wrong with an item as the archive gives it back; None when every byte is right.

        A tar is read in several places at once.
        """
        stretches = stretches_of(item.parts, self.transfer.parallel)
        if len(stretches) == 1:
            faults = [self._stretch_differs(far, stretches[0], True, is_counted)]
        else:
            with ThreadPoolExecutor(len(stretches), thread_name_prefix="backup-read") as threads:
                begun = [
                    threads.submit(self._stretch_differs, far, stretch, stretch is stretches[-1], is_counted)
                    for stretch in stretches
                ]
                faults = [future.result() for future in begun]
        faults = [fault for fault in faults if fault is not None]
        return f"{self.archive.address}/{far} did not come back as it was sent: {faults[0]}" if faults else None

    def _stretch_differs(self, far: str, stretch: PartRange, is_last: bool, is_counted: bool) -> str | None:
        checker, read = Checker(stretch, self._digests), ByteCounter(self.count if is_counted else None)
        for piece in self.archive.read(far, stretch.offset, None if is_last else stretch.bytes):
            self.check()
            self.transfer.reading.take(len(piece))
            fault = checker.feed(piece)
            if fault is not None:
                return fault
            read.reach(checker.position)
        return checker.end()


def check_room(address: str, free: int | None, needed: int) -> None:
    """Raise ArchiveFull when so many bytes will not fit."""
    if free is not None and needed > free:
        raise ArchiveFull(f"{address} has no room: {size(free)} are free, {size(needed)} are still to come")
