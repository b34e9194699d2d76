"""Reading logs from their end, and following them across rotations, truncations and new attempts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_BYTES = 64 << 10
LONGEST_LINE_BYTES = 1 << 20  # a line that is longer is passed on in pieces


@dataclass(frozen=True)
class Source:
    """One log to read. `label` goes before each line when several are read at once."""

    label: str
    path: Path


def tail_offset(descriptor: int, size: int, count: int) -> int:
    """Where the last `count` lines of the first `size` bytes begin; an unfinished last line counts as one.

    Reads blocks from the end, so the time depends on what is shown and not on the size of the file.
    """
    if count <= 0:
        return size
    position, found = size, 0
    while position > 0:
        start = max(0, position - BLOCK_BYTES)
        block = os.pread(descriptor, position - start, start)
        end = len(block)
        if position == size and block.endswith(b"\n"):
            end -= 1
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == count:
                return start + end + 1
        position = start
    return 0


@dataclass
class Follower:
    """Gives the new lines of one file, whatever happens to the file. `offset` is where reading goes on."""

    path: Path
    offset: int = 0
    identity: tuple[int, int] | None = None
    rest: bytes = field(default=b"", repr=False)

    def begin(self, count: int) -> Iterator[bytes]:
        """The last `count` lines; remembers what it read. Yields nothing while there is no file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            self.identity = (status.st_dev, status.st_ino)
            self.offset = tail_offset(descriptor, status.st_size, count)
            yield from self._read(descriptor)
        finally:
            os.close(descriptor)

    def more(self) -> Iterator[bytes]:
        """Lines that came since. A file that was replaced or cut is read from its beginning."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity != self.identity or status.st_size < self.offset:
                if self.rest:
                    yield self.rest
                self.identity, self.offset, self.rest = identity, 0, b""
            yield from self._read(descriptor)
        finally:
            os.close(descriptor)

    def unfinished(self) -> bytes:
        """A last line that has no end yet; it is given once."""
        rest, self.rest = self.rest, b""
        return rest

    def _read(self, descriptor: int) -> Iterator[bytes]:
        while block := os.pread(descriptor, BLOCK_BYTES, self.offset):
            self.offset += len(block)
            *lines, self.rest = (self.rest + block).split(b"\n")
            yield from lines
            if len(self.rest) > LONGEST_LINE_BYTES:
                yield self.unfinished()


def follow(sources: Callable[[], Sequence[Source]], count: int, pause: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """(label, line) of all sources: the last `count` lines of each that is there now, then what comes.

    `sources` is asked again in each round: what is new is read from its beginning. Ends when `pause` returns False.
    Lines are decoded as UTF-8, with a sign in the place of what is not.
    """
    followers = {source: Follower(source.path) for source in sources()}
    for source, follower in followers.items():
        for line in follower.begin(count):
            yield source.label, line.decode("utf-8", "replace")
    while pause():
        for source in sources():
            follower = followers.setdefault(source, Follower(source.path))
            for line in follower.more():
                yield source.label, line.decode("utf-8", "replace")
    for source, follower in followers.items():
        if rest := follower.unfinished():
            yield source.label, rest.decode("utf-8", "replace")
