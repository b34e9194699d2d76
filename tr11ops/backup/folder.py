"""An archive that is a folder of another file system.

A file is written as `.NAME.IDENTITY.part` beside its place, flushed, and renamed; a copy is put
together under a hidden name and renamed as a whole. What is read back comes from the disk as far as
the system lets go of its cache.

The folder must be there: where a file system is not mounted, its empty mount point must not be
taken for the archive. `tr11-archive.json` in it names the run that it belongs to.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from tr11ops.backup.base import Pieces, RemoteFile, Unread, as_pieces, is_unfinished
from tr11ops.base.errors import ArchiveError, ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from trainer.contract.documents import document, read_record
from trainer.contract.files import link_unless_taken, share_folder, sync_folder
from trainer.contract.record import Record

# Files of an archive that is a folder: writing one that is whole or not there, and what the
# system's errors mean.

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


def write_file(place: Path, part: Path, size: int, pieces: Pieces) -> None:
    """Write a file as `part` beside its `place`, and give it its name. Bytes are written at their
    own offsets, so that two copiers of the same file do each other no harm.
    """
    with translated(place):
        descriptor = _open_part(part)
    try:
        with translated(place):
            position = os.fstat(descriptor).st_size
            if position > size:
                os.ftruncate(descriptor, 0)
                position = 0
        flushed = position
        for piece in pieces(position):
            with translated(place):
                position = write_at(descriptor, piece, position)
                if position - flushed >= WRITEBACK_BYTES:
                    # of pages that are not yet on disk, this makes the system begin to write them,
                    # without waiting
                    let_go(descriptor, flushed, position - flushed)
                    flushed = position
        with translated(place):
            if position != size:
                raise ArchivePermanentError(f"{place} has {position} bytes instead of {size}")
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with translated(place):
        try:
            part.replace(place)
        except FileNotFoundError:
            # another copier of the same file was faster
            if not place.is_file() or place.stat().st_size != size:
                raise
        # else `move` does it, for all files at once
        if not any(map(is_unfinished, place.parts)):
            sync_folder(place.parent)


def write_at(descriptor: int, piece: bytes | memoryview, position: int) -> int:
    """Write a piece at its place; returns where it ends."""
    view = memoryview(piece)
    while view:
        written = os.pwrite(descriptor, view, position)
        view = view[written:]
        position += written
    return position


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


MARKER_FILE = "tr11-archive.json"
MARKER_SCHEMA = 1
READ_BYTES = 1 << 20


class Owner(Record, omit_defaults=True):
    """The run that an archive names; `id` is "" in one that is older than ids and was not adopted."""

    run: str = ""
    id: str = ""


NO_ONE = Owner()


def marker_text(owner: Owner) -> str:
    """The content of the marker."""
    return json.dumps({"schema": MARKER_SCHEMA, **document(owner)}) + "\n"


class FolderArchive:
    """One folder as an `Archive`. `owner` is whose it is; `has_copies`: the run knows of
    copies in it.

    Raises ArchivePermanentError when the folder is not there, is another run's, or is empty
    although it holds copies.
    """

    renames = True

    def __init__(self, folder: Path, name: str, owner: Owner, *, has_copies: bool = False) -> None:
        self.name = name
        self.address = str(folder)
        self._folder = folder
        self._owner = owner
        self._is_marked = False
        self._inner: set[Path] = set()  # folders that no link leads out of, once looked at
        with translated(folder):
            if not folder.is_dir():
                raise ArchivePermanentError(
                    f"{folder} is not there: is its file system mounted? To begin an archive here: mkdir {folder}"
                )
            self._device = folder.stat().st_dev
            self._check_marker(has_copies)

    def look(self, path: str) -> RemoteFile | None:
        place = self._place(path)
        with translated(place):
            try:
                facts = place.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            if place.is_file():
                return RemoteFile(path, facts.st_size)
            return None

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        if folder:
            top = self._place(folder)
        else:
            top = self._folder

        def note(error: OSError) -> None:
            """What is not there, or is a file, holds no files; anything else is said."""
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                return
            if unread is None or error.filename is None or Path(error.filename) == top:
                raise error
            place = Path(error.filename).relative_to(self._folder).as_posix()
            unread(place, f"{error.filename}: {error.strerror or error}")

        with translated(top):
            for root, folders, names in os.walk(top, onerror=note):
                folders[:] = [name for name in folders if not is_unfinished(name)]
                for path in (Path(root, name) for name in names if not is_unfinished(name)):
                    try:
                        facts = path.stat()
                    except OSError as error:
                        note(error)
                        continue
                    if stat.S_ISREG(facts.st_mode):
                        yield RemoteFile(path.relative_to(self._folder).as_posix(), facts.st_size)

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        place = self._place(path)
        with translated(place):
            self._mark()
            make_folders(self._folder, place.parent)
        write_file(place, part_path(place, identity), size, pieces)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        place = self._place(path)
        with translated(place), place.open("rb", buffering=0) as stream:
            let_go(stream.fileno())
            stream.seek(offset)
            left = length if length is not None else place.stat().st_size
            while left and (piece := stream.read(min(left, READ_BYTES))):
                left -= len(piece)
                yield piece
            let_go(stream.fileno())

    def put(self, path: str, content: bytes) -> None:
        identity = hashlib.sha256(content).hexdigest()
        self.upload(path, len(content), identity, as_pieces(content))

    def move(self, path: str, to: str) -> None:
        place, goal = self._place(path), self._place(to)
        with translated(place):
            if not os.path.lexists(place):
                raise ArchivePermanentError(
                    f"{place} is not there, and cannot get the name {goal.name}"
                )
            if os.path.lexists(goal):
                raise ArchivePermanentError(f"{goal} is there already, and is not replaced")
            self._mark()
            make_folders(self._folder, goal.parent)
            for root, _, _ in os.walk(place):
                sync_folder(Path(root))
            place.rename(goal)
            sync_folder(goal.parent)

    def free_bytes(self) -> int | None:
        """What the file system says; a quota may leave less."""
        with translated(self._folder):
            facts = os.statvfs(self._folder)
            return facts.f_bavail * facts.f_frsize

    def sweep(self, older_than: float) -> int:
        count = 0
        with translated(self._folder):
            for root, folders, names in os.walk(self._folder):
                for name in [name for name in folders if is_unfinished(name)]:
                    folders.remove(name)
                    if newest_time(Path(root, name)) < older_than:
                        shutil.rmtree(Path(root, name))
                        count += 1
                for name in names:
                    path = Path(root, name)
                    if is_unfinished(name) and path.lstat().st_mtime < older_than:
                        path.unlink(missing_ok=True)
                        count += 1
        return count

    def close(self) -> None:
        """Nothing is held open."""

    def _place(self, path: str) -> Path:
        """Where a file of the archive lies. Raises ArchivePermanentError when the path leads out of
        the archive.
        """
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise ArchivePermanentError(f"{path!r} is no place in an archive")
        place = self._folder.joinpath(*parts)
        if place.parent not in self._inner:
            home = os.path.realpath(self._folder)
            if os.path.commonpath([home, os.path.realpath(place.parent)]) != home:
                raise ArchivePermanentError(
                    f"{place} leads out of the archive {self._folder} through a link"
                )
            self._inner.add(place.parent)
        return place

    def _check_marker(self, has_copies: bool) -> None:
        path = self._folder / MARKER_FILE
        try:
            marker = read_record(Owner, path, "the marker of an archive")
        except ValueError:
            raise ArchivePermanentError(
                f"{path} cannot be read; it names the run that the archive belongs to"
            ) from None
        if marker is None and has_copies:
            raise ArchivePermanentError(
                f"{self._folder} holds no {MARKER_FILE}, although copies were made there: is its file system mounted?"
            )
        if marker is not None and marker.run != self._owner.run:
            raise ArchivePermanentError(
                f"{self._folder} is the archive of {marker.run!r}, not of {self._owner.run!r}; name another folder in "
                "backup.store"
            )
        self._is_marked = marker is not None

    def _mark(self) -> None:
        """Name the run before the first byte comes. Of two runs that begin at once, one is refused."""
        if self._folder.stat().st_dev != self._device:
            raise ArchiveUnavailable(
                f"{self._folder} is on another file system than before: is it mounted?"
            )
        if self._is_marked:
            return
        text = marker_text(self._owner)
        draft = self._folder / f".{MARKER_FILE}.{secrets.token_hex(6)}.part"
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o664)
        try:
            link_unless_taken(draft, self._folder / MARKER_FILE)
        finally:
            draft.unlink(missing_ok=True)
        self._check_marker(has_copies=True)
