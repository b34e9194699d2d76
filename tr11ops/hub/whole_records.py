"""How much of a growing file is whole: text up to its last newline, TensorBoard events up to the
last whole record.

A record of an event file (TFRecord) is an 8-byte little-endian length, the masked CRC-32C of these
8 bytes, the data, and the masked CRC-32C of the data. Both functions go on from where an earlier
look ended, and read in pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

from trainer.contract.record import Record

PIECE_BYTES = 1 << 20
HEADER = struct.Struct("<QI")  # of a record: its length and checksum
FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8  # of TFRecord's masked CRC: rotated by 15 bits, plus this

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives up to so many bytes from an offset on; fewer only at the end of the file."""


class Whole(Record):
    """`end` is the offset after the last whole line or record; `is_sound` is false where what
    follows is none.
    """

    end: int
    is_sound: bool = True


def whole_lines(read: Read, start: int, size: int) -> Whole:
    """The end of the last line of text between `start` and `size`; `start` where there is none.

    It stops before a NUL byte: a shared file system shows a hole where another host's write has not
    arrived yet.
    """
    position = end = start
    while position < size:
        piece = read(position, min(PIECE_BYTES, size - position))
        if not piece:
            break
        hole = piece.find(b"\0")
        newline = piece.rfind(b"\n", 0, len(piece) if hole < 0 else hole)
        if newline >= 0:
            end = position + newline + 1
        if hole >= 0:
            return Whole(end, is_sound=False)
        position += len(piece)
    return Whole(end)


def whole_events(read: Read, start: int, size: int) -> Whole:
    """The end of the last whole record between `start`, itself the end of one, and `size`.

    A record whose data do not fit their checksum counts once a good one follows it: the length was
    right, and what is wrong is old. At the end it may be a write that has not arrived yet.
    """
    source = RecordWindow(read, size)
    position = end = start
    while position + HEADER.size <= size:
        header = source.bytes(position, HEADER.size)
        if len(header) < HEADER.size:
            break
        length, checksum = HEADER.unpack(header)
        if masked_crc(header[:8]) != checksum:
            return Whole(end, is_sound=False)
        data = position + HEADER.size
        following = data + length + FOOTER.size
        if following > size:
            break
        crc = 0
        for offset in range(data, data + length, PIECE_BYTES):
            crc = _extend(crc, source.bytes(offset, min(PIECE_BYTES, data + length - offset)))
        footer = source.bytes(data + length, FOOTER.size)
        if len(footer) < FOOTER.size:
            break
        if _masked(crc) == FOOTER.unpack(footer)[0]:
            end = following
        position = following
    return Whole(end)


def masked_crc(data: bytes) -> int:
    """TFRecord's masked CRC-32C."""
    return _masked(_extend(0, data))


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _extend(crc: int, data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.extend(crc, data))


class RecordWindow:
    """Small reads one after another out of large ones."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._start = 0
        self._data = b""

    def bytes(self, offset: int, length: int) -> bytes:
        within = offset - self._start
        if within < 0 or within + length > len(self._data):
            wanted = min(max(length, PIECE_BYTES), self._size - offset)
            self._start, self._data, within = offset, self._read(offset, wanted), 0
        return self._data[within : within + length]
