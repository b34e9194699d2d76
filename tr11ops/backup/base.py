"""The edge to an archive: what a folder of another file system and a bucket have in common, and how
they fail.

Paths are relative to the archive's root, with slashes. A file that is being written is not seen by
`look` and `list` before it is whole. Every method may raise the three errors below, and nothing
else of the network or the file system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from tr11ops.base.retry import RetryPolicy
from trainer.contract.checkpoint_names import hidden_name
from trainer.contract.record import Record

# a path inside the archive, and why it could not be looked at
Unread: TypeAlias = Callable[[str, str], object]
# a file's bytes from a place in it on, in pieces of any length
Pieces: TypeAlias = Callable[[int], Iterator[bytes]]


ARCHIVE_RETRIES = RetryPolicy(tries=8, says_all=True)
_UNFINISHED = re.compile(r"\..+\.(part|partial-[0-9a-f]*)")


def is_unfinished(name: str) -> bool:
    """Whether a file or folder of this name is one that is being written or put together."""
    return _UNFINISHED.fullmatch(name) is not None


def hidden_place(location: str, identity: str) -> str:
    """Where a copy is put together before it gets its name `location`, in an archive that renames."""
    folder, _, name = location.rpartition("/")
    hidden = hidden_name(name, "partial", identity[:12])
    if folder:
        return f"{folder}/{hidden}"
    return hidden


class RemoteFile(Record):
    """One whole file of an archive."""

    path: str
    bytes: int


def as_pieces(content: bytes) -> Pieces:
    """A file that is at hand as what `upload` takes."""

    def pieces(offset: int) -> Iterator[bytes]:
        yield content[offset:]

    return pieces


class Archive(Protocol):
    """One destination. Its methods may be called by many threads at once."""

    name: str  # "store" or "url": the card's key
    address: str  # as it is shown; holds no credentials
    # `move` is one step and sends no byte: what is not whole yet can lie under a hidden name
    renames: bool

    def look(self, path: str) -> RemoteFile | None:
        """The file's facts; None when there is no such file."""

    def list(self, folder: str, unread: Unread | None = None) -> Iterator[RemoteFile]:
        """All whole files below a folder, at any depth, in no order; none when there is no such
        folder.

        What lies under a hidden name (see `hidden_place`) is left out, unless `folder` itself is
        such a name. `unread` hears of folders inside that could not be listed, and why; without it
        they are an error of the whole.
        """

    def upload(self, path: str, size: int, identity: str, pieces: Pieces) -> None:
        """Send a file of `size` bytes, or the rest of it where one of the same identity was left
        unfinished.

        `pieces` is asked once, for the bytes from there on, and to its end. Only then does the file
        become visible, flushed; an older one of that name is replaced. What `pieces` raises goes
        through, and what was sent until then is gone on with by the next `upload`.
        """

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes as they are at the destination now, in pieces of at most 16 MiB, past any cache
        if possible.
        """

    def put(self, path: str, content: bytes) -> None:
        """Write a small file, whole or not at all; an older one is replaced."""

    def move(self, path: str, to: str) -> None:
        """Give a file, or a folder with all files below it, another name; nothing may be there yet.

        Where that takes copying, the old ones go last. Raises ArchivePermanentError when `path` is
        not there, or `to` is.
        """

    def free_bytes(self) -> int | None:
        """What may still be written; None when the destination does not say."""

    def sweep(self, older_than: float) -> int:
        """Remove what uploads that were never finished left before this time (epoch seconds);
        returns how many.
        """

    def close(self) -> None:
        """Let go of connections."""
