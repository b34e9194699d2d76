"""Reading logs from their end, or from where a query says, and following them across rotations,
cuts, new attempts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tr11ops.logs.line_filter import LineFeed, LineFilter
from tr11ops.logs.reader import BLOCK_BYTES, FileReader
from tr11ops.logs.show import Beginning, Query
from trainer.contract.record import Record
from trainer.contract.state_file import descriptor_of


class LogSource(Record):
    """One log to read. `label` goes before each line when several are read at once."""

    label: str
    path: Path


@dataclass
class Follower:
    """Gives the lines of one file that a query asks for, whatever happens to the file."""

    path: Path
    query: Query = field(default_factory=Query)
    _offset: int = field(default=0, init=False)
    _identity: tuple[int, int] | None = field(default=None, init=False)
    _feed: LineFeed = field(init=False)

    def __post_init__(self) -> None:
        self._feed = LineFeed(LineFilter(self.query.wanted))

    def begin(self) -> Iterator[str]:
        """What is there now. Nothing while there is no file. Raises NoSuchAttempt, and OSError as
        the file system.
        """
        try:
            descriptor = descriptor_of(self.path)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            self._identity, self._offset = (status.st_dev, status.st_ino), status.st_size
            beginning = Beginning(
                FileReader(descriptor), status.st_size, self.query, self._feed.line_filter
            )
            yield from beginning.lines()
            self._feed = LineFeed(beginning.line_filter, beginning.rest)
        finally:
            os.close(descriptor)

    def more(self) -> Iterator[str]:
        """Lines that came since. A file that was replaced or cut is read from its beginning."""
        try:
            descriptor = descriptor_of(self.path)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                yield from self.unfinished()
                self._identity, self._offset, self._feed = (
                    identity,
                    0,
                    LineFeed(LineFilter(self.query.wanted)),
                )
            while block := os.pread(descriptor, BLOCK_BYTES, self._offset):
                self._offset += len(block)
                yield from self._feed.take(block)
        finally:
            os.close(descriptor)

    def unfinished(self) -> Iterator[str]:
        """A last line that has no end yet; it is given once."""
        return self._feed.unfinished()


def follow(
    sources: Callable[[], Sequence[LogSource]], query: Query, pause: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """(label, line) of all sources: what the query says of each that is there now, then what comes.

    `sources` is asked again in each round: what is new is read from its beginning. Ends when
    `pause` returns False. Lines are decoded as UTF-8, with a sign in the place of what is not.
    Raises NoSuchAttempt.
    """
    followers = {source: Follower(source.path, query) for source in sources()}
    for source, follower in followers.items():
        for line in follower.begin():
            yield source.label, line
    while pause():
        for source in sources():
            follower = followers.setdefault(source, Follower(source.path, query))
            for line in follower.more():
                yield source.label, line
    for source, follower in followers.items():
        for line in follower.unfinished():
            yield source.label, line
