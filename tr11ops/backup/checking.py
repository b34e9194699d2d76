"""Comparing what an archive gives back with what was sent, without holding either; the layout of a
copy that is one tar.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from tr11ops.backup.source import SourceFile, made

# One checkpoint as one POSIX tar, of which every byte is known beforehand but the files' own
# contents.
#
# Sizes come from the manifest, headers hold nothing of this machine or moment: so a copy that was cut
# off goes on at any byte, and the place of every file is known without reading the tar.

BLOCK = tarfile.BLOCKSIZE
RECORD = tarfile.RECORDSIZE


def tar_layout(top: str, files: Iterable[SourceFile], created: float) -> tuple[SourceFile, ...]:
    """The parts of the tar in order; `top` is the folder that it unpacks to, `created` the time of
    all files. What lies between files (headers, padding, the end) has no path.
    """
    parts: list[SourceFile] = []
    filler, position = b"", 0
    for file in files:
        filler += header(f"{top}/{file.path}", file.bytes, created)
        parts += [made("", filler), file]
        position += len(filler) + file.bytes
        filler = bytes(-file.bytes % BLOCK)
    filler += bytes(2 * BLOCK)
    filler += bytes(-(position + len(filler)) % RECORD)
    return (*parts, made("", filler))


def header(name: str, size: int, created: float) -> bytes:
    """The header of one file, with POSIX extensions where the name or the size needs them."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(created), 0o664
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def placed(parts: Sequence[SourceFile]) -> Iterator[tuple[int, SourceFile]]:
    """Each part with where its first byte is."""
    position = 0
    for part in parts:
        yield position, part
        position += part.bytes


def offsets(parts: Sequence[SourceFile]) -> dict[str, int]:
    """Where the first byte of each file is."""
    return {part.path: position for position, part in placed(parts) if part.path}


def differs(pieces: Iterator[bytes], size: int, digest: str, tell: Callable[[int], object]) -> str:
    """In what bytes that come back are not those of a digest; "" when they are. `tell` hears of the
    bytes of each piece, and may raise: what was being read is closed then too, whoever keeps the
    error.
    """
    seen, count = hashlib.sha256(), 0
    try:
        for piece in pieces:
            tell(len(piece))
            seen.update(piece)
            count += len(piece)
    finally:
        if isinstance(pieces, Generator):
            pieces.close()
    if count != size:
        return f"{count} of {size} bytes can be read"
    if seen.hexdigest() != digest:
        return "other bytes than were copied"
    return ""
