"""Files of an archive that is a folder: writing one that is whole or not there, and what the
system's errors mean.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tr11ops.backup.base import is_unfinished
from tr11ops.base.errors import ArchiveError, ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from tr11ops.rundir.links import sync_folder
from trainer.contract.sharing import share_folder

WRITEBACK_BYTES = 16 << 20  # the disk starts on these while the rest is still being read
_MOST_NAME_BYTES = 255
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EFBIG,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EINVAL,
    errno.ENOENT,
}


class FolderUpload:
    """A file on its way into a folder: `part` beside its `place`. Bytes are written at their own
    offsets, so that two copiers of the same file do each other no harm.
    """

    def __init__(self, place: Path, part: Path, size: int) -> None:
        self._place, self._part, self._size = place, part, size
        with translated(place):
            self._descriptor = _open_part(part)
            self._is_open = True
            there = os.fstat(self._descriptor).st_size
            if there > size:
                os.ftruncate(self._descriptor, 0)
                there = 0
        self.offset = self._position = there
        self._flushed = there

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        with translated(self._place):
            while view:
                written = os.pwrite(self._descriptor, view, self._position)
                view = view[written:]
                self._position += written
            if self._position - self._flushed >= WRITEBACK_BYTES:
                # of pages that are not yet on disk, this makes the system begin to write them,
                # without waiting
                let_go(self._descriptor, self._flushed, self._position - self._flushed)
                self._flushed = self._position

    def finish(self) -> None:
        with translated(self._place):
            if self._position != self._size:
                raise ArchivePermanentError(
                    f"{self._place} has {self._position} bytes instead of {self._size}"
                )
            os.fsync(self._descriptor)
            self.leave()
            try:
                self._part.replace(self._place)
            except FileNotFoundError:
                # another copier of the same file was faster
                if not self._place.is_file() or self._place.stat().st_size != self._size:
                    raise
            # else `move` does it, for all files at once
            if not any(map(is_unfinished, self._place.parts)):
                sync_folder(self._place.parent)

    def leave(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


def part_path(place: Path, identity: str) -> Path:
    """Where a file is written before it is whole."""
    mark = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f".{place.name}.{mark}.part"
    if len(os.fsencode(name)) > _MOST_NAME_BYTES:
        name = f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()}.{mark}.part"
    return place.with_name(name)


def make_folders(home: Path, folder: Path) -> None:
    """Make the folders from `home` down to `folder`, for the whole group. Never `home` itself.
    Raises OSError.
    """
    if folder == home or folder.is_dir():
        return
    make_folders(home, folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    share_folder(folder)
    sync_folder(folder.parent)


def _open_part(part: Path) -> int:
    """Open an unfinished file, and make it where there is none, for the whole group to go on with."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(part, flags, 0o664)
    except PermissionError:
        part.unlink()  # another user's who keeps it for himself: begin again
        descriptor = os.open(part, flags, 0o664)
    with suppress(PermissionError):  # another user's
        os.fchmod(descriptor, 0o664)
    return descriptor


def let_go(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Ask the system to drop its cache of a file, so that a reading after this one comes from the
    disk.
    """
    with suppress(OSError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def newest_time(folder: Path) -> float:
    """When anything below a folder was last changed (epoch seconds)."""
    times = [folder.lstat().st_mtime]
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(FileNotFoundError):
                times.append(Path(root, name).lstat().st_mtime)
    return max(times)


def raise_unless_missing(error: OSError) -> None:
    """For os.walk: what is not there, or is a file, holds no files; anything else is said."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def translated(place: Path) -> Generator[None]:
    """What the file system says, as one of the archive's errors."""
    try:
        yield
    except ArchiveError:
        raise
    except OSError as error:
        what = f"{error.filename or place}: {error.strerror or error}"
        if error.errno in _FULL:
            raise ArchiveFull(
                f"{what}; make room or have the quota raised, the copy then goes on"
            ) from error
        if error.errno in _REFUSED:
            raise ArchivePermanentError(what) from error
        raise ArchiveUnavailable(what) from error
