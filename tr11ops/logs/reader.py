"""Bytes of a log by position, wherever the log lies: what the searches read through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

BLOCK_BYTES = 64 << 10
LARGE_BLOCK_BYTES = 512 << 10  # where much is read one after another
LONGEST_LINE_BYTES = 1 << 20  # a line that is longer is passed on in pieces


class LogReader(Protocol):
    """Read access by offset."""

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on; empty only at the end. Raises OSError."""
        ...


class FileReader:
    """A file that is open for reading."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def tail_offset(reader: LogReader, size: int, count: int) -> int:
    """Where the last `count` lines of the first `size` bytes begin; an unfinished last line counts
    as one.

    Reads blocks from the end, so the time depends on what is shown and not on the size of the log.
    """
    if count <= 0:
        return size
    position = size
    found = 0
    while position > 0:
        start = max(0, position - BLOCK_BYTES)
        block = reader.read(start, position - start)
        end = len(block)
        if position == size and block.endswith(b"\n"):
            end -= 1
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == count:
                return start + end + 1
        position = start
    return 0


def line_start(reader: LogReader, offset: int) -> int:
    """The beginning of the first line at or after `offset`; `offset` itself where a line begins
    there.
    """
    if offset <= 0:
        return 0
    position = offset - 1
    while block := reader.read(position, BLOCK_BYTES):
        at = block.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(block)
    return position


def whole_blocks(reader: LogReader, start: int, end: int) -> Iterator[bytes]:
    """[start, end) in blocks that end with a line, but for the last one. A line of more than 1 MiB
    comes in pieces.
    """
    position = start
    rest = b""
    while position < end and (
        block := reader.read(position, min(LARGE_BLOCK_BYTES, end - position))
    ):
        position += len(block)
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
        if len(rest) > LONGEST_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def whole_lines(reader: LogReader, start: int, end: int) -> Iterator[bytes]:
    """The lines of [start, end), without their line ends; also a last one that has none."""
    for block in whole_blocks(reader, start, end):
        lines = block.split(b"\n")
        yield from lines if lines[-1] else lines[:-1]
