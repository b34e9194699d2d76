"""Files that tests send to a bucket and read back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

from tr11ops.backup.base import Archive
from tr11ops.base.errors import ArchiveUnavailable

QUANTUM = 256 << 10
# goes through a session of 9 requests; what fits in one request needs none
LARGE = 8 * QUANTUM + 17


def some_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


class Cut(Exception):
    """The sender stops in mid-file."""


def send(
    archive: Archive, path: str, content: bytes, identity: str = "i", piece: int = 1 << 20
) -> int:
    """Send a file until it is there; returns from where on the last try went."""
    offsets = [0]

    def pieces(offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        for start in range(offset, len(content), piece):
            yield content[start : start + piece]

    for _ in range(20):
        try:
            archive.upload(path, len(content), identity, pieces)
        except ArchiveUnavailable:
            continue
        return offsets[-1]
    raise AssertionError("twenty tries")


def begin(archive: Archive, path: str, size: int, sent: bytes = b"", identity: str = "i") -> None:
    """Begin to send a file, and stop after these bytes of it, of which the last few may not go."""

    def pieces(offset: int) -> Iterator[bytes]:
        for start in range(offset, len(sent), 100):
            yield sent[start : start + 100]
        raise Cut

    with suppress(Cut):
        archive.upload(path, size, identity, pieces)


def get(archive: Archive, path: str, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join(archive.read(path, offset, length))
