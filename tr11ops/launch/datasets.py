"""A light look at an indexed dataset, with the standard library alone: is it there, and is it whole?

Format: spec of the `.bin`/`.idx` pair (magic, version, dtype, counts, lengths, offsets, document starts). Only the
header and the last entries are read, so a terabyte costs what a kilobyte costs.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2}


@dataclass(frozen=True)
class DatasetFacts:
    """What was seen of one prefix. `fault` is empty when it is whole; `unreadable` when that could not be found out."""

    prefix: str
    documents: int = 0
    tokens: int = 0
    fault: str = ""
    unreadable: str = ""


def look_at(prefix: str) -> DatasetFacts:
    """Open a dataset's index, and compare its counts with the sizes of both files. Never raises."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        for path in (index, tokens):
            if not path.is_file():
                return DatasetFacts(prefix, fault=f"{path} {'is not a file' if path.exists() else 'does not exist'}")
        with index.open("rb") as stream:
            head = stream.read(HEADER_BYTES)
            fault, counts = _header(head, index)
            if counts is None:
                return DatasetFacts(prefix, fault=fault)
            code, sequences, entries = counts
            expected = HEADER_BYTES + 12 * sequences + 8 * entries
            size = os.fstat(stream.fileno()).st_size
            if size != expected:
                return DatasetFacts(
                    prefix, fault=f"{index} has {size} bytes, its header needs {expected}{_cut(size, expected)}"
                )
            last_length = struct.unpack("<i", _at(stream.fileno(), HEADER_BYTES + 4 * (sequences - 1), 4))[0]
            last_offset = struct.unpack("<q", _at(stream.fileno(), HEADER_BYTES + 12 * sequences - 8, 8))[0]
            first_document = struct.unpack("<q", _at(stream.fileno(), HEADER_BYTES + 12 * sequences, 8))[0]
            last_document = struct.unpack("<q", _at(stream.fileno(), expected - 8, 8))[0]
        if first_document != 0 or last_document != sequences:
            return DatasetFacts(
                prefix, fault=f"{index} names documents {first_document} to {last_document}, expected 0 to {sequences}"
            )
        needed = last_offset + last_length * ITEM_BYTES[code]
        held = tokens.stat().st_size
    except (OSError, ValueError, struct.error) as error:
        return DatasetFacts(prefix, unreadable=f"{index}: {getattr(error, 'strerror', None) or error}")
    if held != needed:
        return DatasetFacts(prefix, fault=f"{tokens} has {held} bytes, its index needs {needed}{_cut(held, needed)}")
    return DatasetFacts(prefix, documents=entries - 1, tokens=held // ITEM_BYTES[code])


def _header(head: bytes, index: Path) -> tuple[str, tuple[int, int, int] | None]:
    """The fault of an index header, or its dtype code, number of sequences and of document entries."""
    if head.startswith(OLD_MAGIC):
        return f"{index} is of the older, lazy kind", None
    if not head.startswith(MAGIC):
        return f"{index} is not an index of a dataset (its first bytes are wrong)", None
    if len(head) < HEADER_BYTES:
        return f"{index} is cut off inside its header", None
    version, code, sequences, entries = struct.unpack_from("<QBQQ", head, len(MAGIC))
    if version != 1:
        return f"{index} is of version {version}, expected 1", None
    if code not in ITEM_BYTES:
        return f"{index} holds dtype code {code}, expected 1 to 8", None
    if sequences == 0 or entries < 2:
        return f"{index} holds no document", None
    return "", (code, sequences, entries)


def _at(descriptor: int, offset: int, length: int) -> bytes:
    return os.pread(descriptor, length, offset)


def _cut(size: int, expected: int) -> str:
    return " (it was cut off)" if size < expected else ""
