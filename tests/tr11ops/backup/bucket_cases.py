"""Files that tests send to a bucket and read back."""

from __future__ import annotations

import random

from tr11ops.backup.base import Archive
from tr11ops.base.errors import ArchiveUnavailable

QUANTUM = 256 << 10
# goes through a session of 9 requests; what fits in one request needs none
LARGE = 8 * QUANTUM + 17


def some_bytes(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


def send(
    archive: Archive, path: str, content: bytes, identity: str = "i", piece: int = 1 << 20
) -> int:
    """Send a file until it is there; returns from where on the last try went."""
    for _ in range(20):
        upload = None
        try:
            upload = archive.upload(path, len(content), identity)
            for start in range(upload.offset, len(content), piece):
                upload.write(content[start : start + piece])
            upload.finish()
        except ArchiveUnavailable:
            if upload is not None:
                upload.leave()
        else:
            return upload.offset
    raise AssertionError("twenty tries")


def get(archive: Archive, path: str, offset: int = 0, length: int | None = None) -> bytes:
    return b"".join(archive.read(path, offset, length))
