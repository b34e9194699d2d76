"""The local side of a synchronisation: which files there are, and how much of each is whole and
new.

A file that only grew is hashed from where the last look of this process ended; everything else is
read once.
"""

from __future__ import annotations

import copy
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tr11ops.base.errors import FileChanged
from tr11ops.base.observed import cause
from tr11ops.hub.base import HubFile
from tr11ops.hub.masking import (
    Mask,
    Masks,
    MaskSearch,
    Read,
    Whole,
    before,
    whole_events,
    whole_lines,
)
from tr11ops.hub.sync_plan import LocalFile, MeasuredFile, Note, Stamp, is_wanted, objection
from trainer.contract.record import Record
from trainer.contract.units import printable

HEAD_BYTES = 64 << 10  # by which a shorter file is told to be the beginning of a longer one
_PIECE = 1 << 20


class Scan(Record):
    """What lies in the mirrored folder. `skipped` are wanted names that are never sent, `faults`
    could not be read.
    """

    files: tuple[LocalFile, ...]
    skipped: tuple[Note, ...] = ()
    faults: tuple[Note, ...] = ()


def scan(folder: Path, patterns: Collection[str], published: Collection[str] = ()) -> Scan:
    """Every file below `folder` that is wanted, by path. Raises OSError when the folder itself
    cannot be read.
    """
    root = os.path.realpath(folder)
    files: list[LocalFile] = []
    skipped: list[Note] = []
    faults: list[Note] = []
    folders = [""]
    while folders:
        below = folders.pop()
        try:
            entries = sorted(os.scandir(f"{root}/{below}"), key=lambda entry: entry.name)
        except OSError as error:
            if not below:
                raise
            if not isinstance(error, FileNotFoundError):
                faults.append(Note(_shown(below), f"cannot be read ({cause(error)})"))
            continue
        for entry in entries:
            if below:
                path = f"{below}/{entry.name}"
            else:
                path = entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
                continue
            found = _look(root, path, entry=entry, patterns=patterns, published=published)
            if isinstance(found, LocalFile):
                files.append(found)
            elif found is not None:
                skipped.append(found)
    return Scan(tuple(sorted(files, key=lambda file: file.path)), tuple(skipped), tuple(faults))


def _look(
    root: str,
    path: str,
    entry: os.DirEntry[str],
    patterns: Collection[str],
    published: Collection[str],
) -> LocalFile | Note | None:
    """What one name that is no folder stands for; None where it does not matter."""
    is_link, wanted = entry.is_symlink(), is_wanted(path, patterns)
    if is_link and (why := _wrong_link(root, Path(entry.path), wanted)):
        return Note(_shown(path), why)
    if not wanted:
        return None
    try:
        facts = Path(entry.path).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return Note(_shown(path), f"cannot be read ({cause(error)})")
    if is_link and stat.S_ISDIR(facts.st_mode):
        return None  # what it leads to is mirrored at its own place
    why = objection(path, facts.st_mode, published)
    if why:
        return Note(_shown(path), why)
    return LocalFile(path, Stamp(facts.st_size, facts.st_mtime_ns, facts.st_ino))


def _wrong_link(root: str, link: Path, wanted: bool) -> str:
    """Why a link is not followed; "" where it may be, or leads to nothing that is wanted."""
    target = os.path.realpath(link)
    if os.path.commonpath([root, target]) != root:
        if wanted or link.is_dir():
            return "is a link out of the folder"
        return ""
    if wanted and not link.exists():
        return "is a link to nothing"
    return ""


def _shown(path: str) -> str:
    """A name as it can be printed on any terminal, on one line."""
    return printable(path)[:200]


# ----------------------------------------------------------------------------- reading one file
class _Hashed(Record):
    """The first `length` bytes of a file: their last ones as they are here, their masks, and their
    masked digest.
    """

    inode: int
    length: int
    ending: bytes
    masks: tuple[Mask, ...]
    digest: Any
    search: MaskSearch


class RunningDigests:
    """How far each file has been hashed by this process, so that the next round reads only what is
    new.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Hashed] = {}

    def resume(self, file: LocalFile, remote: HubFile, read: Read) -> _Hashed | None:
        """What is known of exactly what the hub has, to go on with; None where the file is to be
        read from its start.

        The file must be the same one, and still end there as it did.
        """
        known = self._known.get(file.path)
        if (
            known is None
            or known.inode != file.stamp.inode
            or known.length != remote.bytes
            or remote.bytes > file.bytes
        ):
            return None
        if known.digest.hexdigest() != remote.sha256:
            return None
        if read(remote.bytes - len(known.ending), len(known.ending)) == known.ending:
            return known
        return None

    def keep(
        self,
        file: LocalFile,
        length: int,
        read: Read,
        masks: tuple[Mask, ...],
        digest: Any,
        search: MaskSearch,
    ) -> None:
        """Remember the digest of the first `length` bytes."""
        tail = min(length, HEAD_BYTES)
        ending = read(length - tail, tail)
        self._known[file.path] = _Hashed(
            file.stamp.inode,
            length,
            ending=ending,
            masks=masks,
            digest=digest.copy(),
            search=copy.copy(search),
        )


def measure(
    folder: Path,
    file: LocalFile,
    remote: HubFile | None,
    remote_head: Callable[[int], bytes],
    running: RunningDigests,
    now: float,
) -> MeasuredFile:
    """Read a file as far as it was when it was found: how much of it is whole, and whether it
    continues the hub's.

    `remote_head` gives the first so many bytes of the hub's file; it is asked only where the local
    one is shorter. Raises OSError, and FileChanged when the file is not the one that was found.
    """
    descriptor = os.open(folder / file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if (
            not stat.S_ISREG(facts.st_mode)
            or facts.st_ino != file.stamp.inode
            or facts.st_size < file.bytes
        ):
            raise FileChanged(f"{file.path}: changed while it was looked at")

        def read(offset: int, length: int) -> bytes:
            return os.pread(descriptor, length, offset)

        end = _whole_end(file, remote, read, now)
        if remote is not None and file.bytes < remote.bytes:
            return _of_shorter(file, remote_head, end, read)
        return _of_longer(file, remote, end=end, read=read, running=running)
    finally:
        os.close(descriptor)


def _whole_end(file: LocalFile, remote: HubFile | None, read: Read, now: float) -> int:
    """How much may be sent: all of it once no one writes any more."""
    if file.is_quiet(now):
        return file.bytes
    if file.form == "whole":
        return 0
    start = 0
    if remote is not None and remote.bytes <= file.bytes:
        start = remote.bytes
    find: Callable[[Read, int, int], Whole]
    if file.form == "lines":
        find = whole_lines
    else:
        find = whole_events
    found = find(read, start, file.bytes)
    # what the hub has does not end with a whole record
    if start and found.end == start and not found.is_sound:
        found = find(read, 0, file.bytes)
    return found.end


def _of_shorter(
    file: LocalFile, remote_head: Callable[[int], bytes], end: int, read: Read
) -> MeasuredFile:
    head = min(file.bytes, HEAD_BYTES)
    search = _search(file)
    marks = {mark: search.until(read, mark) for mark in sorted({head, end})}
    digest = _digest(file, read, end=end, masks=marks[end])
    continues = True
    if head:
        here, there = read(0, head), remote_head(head)
        continues = there in {here, Masks(marks[head]).over(here, 0)}
    return MeasuredFile(file, end, sha256=digest.hexdigest(), continues=continues, masks=marks[end])


def _of_longer(
    file: LocalFile, remote: HubFile | None, end: int, read: Read, running: RunningDigests
) -> MeasuredFile:
    """A file that is not shorter than the hub's, or that the hub has not."""
    if remote is None:
        known = None
    else:
        known = running.resume(file, remote, read)
    if known is not None and end >= known.length:
        search = copy.copy(known.search)
        masks = search.until(read, end)
        if before(masks, known.length) == known.masks:
            digest = _digest(
                file, read, digest=known.digest.copy(), start=known.length, end=end, masks=masks
            )
            running.keep(file, end, read, masks, digest, search)
            return MeasuredFile(file, end, sha256=digest.hexdigest(), continues=True, masks=masks)
    search, length = _search(file), 0 if remote is None else remote.bytes
    marks = {mark: search.until(read, mark) for mark in sorted({length, end})}
    masks = marks[end]
    if remote is None:
        continues, is_bare = None, False
        digest = _digest(file, read, end=end, masks=masks)
    else:
        is_masked, is_same, digest = _compared(file, remote, end=end, read=read, marks=marks)
        continues, is_bare = is_masked or is_same, is_same and not is_masked
    if end >= length:
        running.keep(file, end, read, masks, digest, search)
    return MeasuredFile(
        file, end, sha256=digest.hexdigest(), continues=continues, masks=masks, is_bare=is_bare
    )


def _compared(
    file: LocalFile, remote: HubFile, end: int, read: Read, marks: Mapping[int, tuple[Mask, ...]]
) -> tuple[bool, bool, Any]:
    """Whether the file begins with what the hub has: masked, or as it is here; and the digest of its first
    `end` bytes.
    """
    masks = marks[remote.bytes]
    if remote.sha256 is None:  # a small file in git itself
        here = b"".join(piece for _, piece in _pieces(file, read, 0, remote.bytes))
        digest = _digest(file, read, end=end, masks=marks[end])
        return (
            git_name(Masks(masks).over(here, 0)) == remote.oid,
            bool(masks) and git_name(here) == remote.oid,
            digest,
        )
    first = _digest(file, read, end=remote.bytes, masks=masks)
    if end >= remote.bytes and before(marks[end], remote.bytes) == masks:
        digest = _digest(
            file, read, digest=first.copy(), start=remote.bytes, end=end, masks=marks[end]
        )
    else:
        digest = _digest(file, read, end=end, masks=marks[end])
    is_masked = first.hexdigest() == remote.sha256
    is_same = (
        bool(masks)
        and not is_masked
        and _digest(file, read, end=remote.bytes, masks=()).hexdigest() == remote.sha256
    )
    return is_masked, is_same, digest


def _search(file: LocalFile) -> MaskSearch:
    return MaskSearch(is_events=file.form == "events")


def _digest(
    file: LocalFile, read: Read, end: int, masks: Sequence[Mask], digest: Any = None, start: int = 0
) -> Any:
    """The digest of the first `end` masked bytes; `digest` is that of the first `start`, and is
    changed.
    """
    digest, laid = digest or hashlib.sha256(), Masks(masks)
    for offset, piece in _pieces(file, read, start, end):
        digest.update(laid.over(piece, offset))
    return digest


def _pieces(file: LocalFile, read: Read, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    while start < end:
        piece = read(start, min(_PIECE, end - start))
        if not piece:
            raise FileChanged(f"{file.path}: became shorter while it was read")
        yield start, piece
        start += len(piece)


def git_name(content: bytes) -> str:
    """Git's name of a blob with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
