"""A light look at an indexed dataset, with the standard library alone: is it there, and is it
whole?

Format: spec of the `.bin`/`.idx` pair (magic, version, dtype, counts, lengths, offsets, document
starts). Only the header and the last entries are read, so a terabyte costs what a kilobyte costs.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from trainer.config.card import DataSection
from trainer.config.data_rules import MULTIMODAL
from trainer.contract.record import Record

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2}


class DatasetFacts(Record):
    """What was seen of one prefix. `fault` is empty when it is whole; `unreadable` when that could
    not be found out.
    """

    prefix: str
    documents: int = 0
    tokens: int = 0
    fault: str = ""
    unreadable: str = ""


class _Fault(ValueError):
    """A dataset that is not whole."""


def prefixes_of(data: DataSection) -> tuple[str, ...]:
    """Every prefix that a card names, once: its own list, and the third field of each part of its
    groups.

    Groups that cannot be read as such give nothing here; the trainer says what is wrong with them.
    """
    groups = [data.train_group or "", *data.valid_groups, *data.test_groups]
    for file in (data.train_groups_file, data.valid_groups_file, data.test_groups_file):
        if file is not None and Path(file).is_file():
            groups += re.findall(
                r'"([^"]*)"', Path(file).read_text(encoding="utf-8", errors="replace")
            )
    parts = [part.split() for group in groups for part in group.partition(":")[2].split(",")]
    return tuple(
        dict.fromkeys([*data.prefixes, *(fields[2] for fields in parts if len(fields) == 3)])
    )


def look_at(prefix: str) -> DatasetFacts:
    """Open a dataset's index, and compare its counts with the sizes of both files. Never raises."""
    try:
        return _read(prefix, Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    except _Fault as fault:
        return DatasetFacts(prefix, fault=str(fault))
    except OSError as error:
        return DatasetFacts(
            prefix, unreadable=f"{error.filename or prefix}: {error.strerror or error}"
        )
    except struct.error:
        return DatasetFacts(prefix, unreadable=f"{prefix}.idx changed while it was read")
    except ValueError as error:
        return DatasetFacts(prefix, fault=f"{prefix!r} is not a path ({error})")


def _read(prefix: str, index: Path, tokens: Path) -> DatasetFacts:
    for path in (index, tokens):
        if not path.is_file():
            raise _Fault(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    with index.open("rb") as stream:
        descriptor = stream.fileno()
        code, sequences, entries = _header(stream.read(HEADER_BYTES), index)
        expected = HEADER_BYTES + 12 * sequences + 8 * entries
        size = os.fstat(descriptor).st_size
        if size == expected + sequences:
            raise _Fault(f"{index} {MULTIMODAL}")
        if size != expected:
            raise _Fault(
                f"{index} has {size} bytes, its header needs {expected}{_cut(size, expected)}"
            )
        last_length = _integer(descriptor, "<i", HEADER_BYTES + 4 * (sequences - 1))
        last_offset = _integer(descriptor, "<q", HEADER_BYTES + 12 * sequences - 8)
        first_document = _integer(descriptor, "<q", HEADER_BYTES + 12 * sequences)
        last_document = _integer(descriptor, "<q", expected - 8)
    if first_document != 0 or last_document != sequences:
        raise _Fault(
            f"{index} has documents from {first_document} to {last_document}, expected 0 to {sequences}"
        )
    needed = last_offset + last_length * ITEM_BYTES[code]
    held = tokens.stat().st_size
    if held != needed:
        raise _Fault(f"{tokens} has {held} bytes, its index needs {needed}{_cut(held, needed)}")
    return DatasetFacts(prefix, documents=entries - 1, tokens=held // ITEM_BYTES[code])


def _header(head: bytes, index: Path) -> tuple[int, int, int]:
    """Dtype code, number of sequences and of document entries. Raises _Fault when it is not a
    usable header.
    """
    if head.startswith(OLD_MAGIC):
        raise _Fault(f"{index} is of the older, lazy kind")
    if not head.startswith(MAGIC):
        raise _Fault(f"{index} is not an index of a dataset (its first bytes are wrong)")
    if len(head) < HEADER_BYTES:
        raise _Fault(f"{index} is cut off inside its header")
    version, code, sequences, entries = struct.unpack_from("<QBQQ", head, len(MAGIC))
    if version != 1:
        raise _Fault(f"{index} is of version {version}, expected 1")
    if code not in ITEM_BYTES:
        raise _Fault(f"{index} holds dtype code {code}, expected 1 to 8")
    if sequences == 0 or entries < 2:
        raise _Fault(f"{index} holds no document")
    return code, sequences, entries


def _integer(descriptor: int, layout: str, offset: int) -> int:
    return int(struct.unpack(layout, os.pread(descriptor, struct.calcsize(layout), offset))[0])


def _cut(size: int, expected: int) -> str:
    if size < expected:
        return " (it was cut off)"
    return ""
