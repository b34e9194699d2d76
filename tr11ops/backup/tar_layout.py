"""One checkpoint as one POSIX tar, of which every byte is known beforehand but the files' own
contents.

Sizes come from the manifest, headers hold nothing of this machine or moment: so a copy that was cut
off goes on at any byte, and the place of every file is known without reading the tar.
"""

from __future__ import annotations

import tarfile

from tr11ops.backup.source import SourceFile
from trainer.contract.record import Record

BLOCK = tarfile.BLOCKSIZE
RECORD = tarfile.RECORDSIZE


class Filler(Record):
    """Bytes between files: headers, padding, the end."""

    content: bytes

    @property
    def bytes(self) -> int:
        return len(self.content)


def tar_layout(
    top: str, files: tuple[SourceFile, ...], created: float
) -> tuple[Filler | SourceFile, ...]:
    """The parts of the tar in order; `top` is the folder that it unpacks to, `created` the time of
    all files.
    """
    parts: list[Filler | SourceFile] = []
    filler, position = b"", 0
    for file in files:
        filler += header(f"{top}/{file.path}", file.bytes, created)
        parts += [Filler(filler), file]
        position += len(filler) + file.bytes
        filler = bytes(-file.bytes % BLOCK)
    filler += bytes(2 * BLOCK)
    filler += bytes(-(position + len(filler)) % RECORD)
    return (*parts, Filler(filler))


def header(name: str, size: int, created: float) -> bytes:
    """The header of one file, with POSIX extensions where the name or the size needs them."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, int(created), 0o664
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def offsets(parts: tuple[Filler | SourceFile, ...]) -> dict[str, int]:
    """Where the first byte of each file is."""
    found, position = {}, 0
    for part in parts:
        if isinstance(part, SourceFile):
            found[part.path] = position
        position += part.bytes
    return found
