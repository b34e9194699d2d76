"""Comparing what an archive gives back with what was sent, without holding either; the layout of a
copy that is one tar.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping

from tr11ops.backup.source import SourceFile
from trainer.contract.record import Record

# One checkpoint as one POSIX tar, of which every byte is known beforehand but the files' own
# contents.
#
# Sizes come from the manifest, headers hold nothing of this machine or moment: so a copy that was cut
# off goes on at any byte, and the place of every file is known without reading the tar.

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


class PartRange(Record):
    """Parts of an item that follow one another, from a byte of it on."""

    offset: int
    parts: tuple[Filler | SourceFile, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def stretches_of(parts: tuple[Filler | SourceFile, ...], most: int) -> list[PartRange]:
    """The parts cut into at most so many stretches of about the same length, in order."""
    share = sum(part.bytes for part in parts) / most
    found: list[PartRange] = []
    group: list[Filler | SourceFile] = []
    begin = position = 0
    for part in parts:
        group.append(part)
        position += part.bytes
        if position - begin >= share and len(found) < most - 1:
            found.append(PartRange(begin, tuple(group)))
            begin, group = position, []
    if group or not found:
        return [*found, PartRange(begin, tuple(group))]
    return found


class Checker:
    """Compares what comes back, in pieces of any length, with what a stretch shall be."""

    def __init__(self, stretch: PartRange, digests: Mapping[str, str]) -> None:
        self._parts = [part for part in stretch.parts if part.bytes]
        self._digests = digests
        self._stretch = stretch
        self._size = stretch.bytes
        self._number = 0
        self._within = 0  # bytes of the current part that came already
        self._digest = hashlib.sha256()
        self.position = 0

    def feed(self, piece: bytes) -> str | None:
        """Take the next bytes; says what is wrong, as soon as that is known."""
        view = memoryview(piece)
        while view:
            if self._number == len(self._parts):
                return f"it has more than {self._stretch.offset + self._size} bytes"
            part = self._parts[self._number]
            taken = view[: part.bytes - self._within]
            view = view[len(taken) :]
            if part.content is not None:
                if taken != part.content[self._within : self._within + len(taken)]:
                    return f"a byte after {self._stretch.offset + self.position} was changed"
            else:
                self._digest.update(taken)
            self._within += len(taken)
            self.position += len(taken)
            if self._within == part.bytes:
                fault = self._end_part(part)
                if fault is not None:
                    return fault
        return None

    def end(self) -> str | None:
        """After the last byte."""
        if self.position == self._size:
            return None
        return f"it ends after {self._stretch.offset + self.position} bytes"

    def _end_part(self, part: Filler | SourceFile) -> str | None:
        digest, self._digest = self._digest.hexdigest(), hashlib.sha256()
        self._number, self._within = self._number + 1, 0
        if (
            isinstance(part, SourceFile)
            and part.content is None
            and digest != self._digests[part.path]
        ):
            return f"the digest of {part.path} is another one"
        return None
