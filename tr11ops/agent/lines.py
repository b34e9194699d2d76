"""The lines of what runs, as they are passed on: whole, of bounded length, and of a bar that is drawn
again and again only one now and then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import IO

LONGEST_LINE = 64 << 10  # bytes; what is longer comes in several lines
REDRAW_SECONDS = 5.0  # between two states of a bar that are passed on
_CHUNK = 64 << 10
_BREAK = re.compile(rb"\r?\n|\r(?!\n)")
_RANK_PREFIX = re.compile(rb"^\[default\d+\]:")


def whole_lines(stream: IO[bytes], clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """Each line of the stream with its newline, until it ends.

    A carriage return ends a line too, that is drawn over: one of these in REDRAW_SECONDS is passed
    on, and the last one before any other line. It has the rank in front that its launcher wrote
    before the first of them.
    """
    shown = _Redraws(clock)
    prefix = rest = b""
    while chunk := _read(stream):
        rest += chunk
        at = 0
        for found in _BREAK.finditer(rest):
            if found[0] == b"\r" and found.end() == len(rest):
                break  # a newline may follow
            line = _with_rank(prefix, rest[at : found.start()])
            at = found.end()
            if found[0] == b"\r":
                prefix = _rank_of(line) or prefix
                yield from shown.redrawn(line)
            else:
                prefix = b""
                yield from shown.ended(line)
        rest = rest[at:]
        while len(rest) > LONGEST_LINE:
            line, rest = _with_rank(prefix, rest[:LONGEST_LINE]), rest[LONGEST_LINE:]
            prefix = _rank_of(line) or prefix
            yield from shown.ended(line)
    last = _with_rank(prefix, rest.removesuffix(b"\r"))
    if rest.endswith(b"\r"):
        yield from shown.redrawn(last)
    elif last:
        yield from shown.ended(last)
    yield from shown.held_back()


class _Redraws:
    """Which states of a bar are passed on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._passed_at: float | None = None
        self._held_back = b""

    def redrawn(self, line: bytes) -> Iterator[bytes]:
        """What is passed on where a line is to be drawn over."""
        if not line.removeprefix(_rank_of(line)).strip():
            return
        now = self._clock()
        if self._passed_at is not None and now - self._passed_at < REDRAW_SECONDS:
            self._held_back = line
            return
        self._passed_at, self._held_back = now, b""
        yield line + b"\n"

    def ended(self, line: bytes) -> Iterator[bytes]:
        """What is passed on where a line came to its end."""
        yield from self.held_back()
        yield line + b"\n"

    def held_back(self) -> Iterator[bytes]:
        """The last state that was not passed on."""
        line, self._held_back = self._held_back, b""
        if line:
            yield line + b"\n"


def _read(stream: IO[bytes]) -> bytes:
    """What there is now; nothing at the end."""
    data: bytes = stream.read1(_CHUNK)  # type: ignore[attr-defined]  # of every buffered reader
    return data


def _rank_of(line: bytes) -> bytes:
    found = _RANK_PREFIX.match(line)
    if found is None:
        return b""
    return found[0]


def _with_rank(prefix: bytes, line: bytes) -> bytes:
    if not line or _RANK_PREFIX.match(line):
        return line
    return prefix + line
