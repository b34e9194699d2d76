"""A log on the hub, read by range requests: what is new and no more, whatever the network does.

A piece is asked for with a few bytes before it that are known already: a log that was cut or
written again shows by them and by its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import IO

from tr11ops.base.errors import HubUnavailable
from tr11ops.base.retry import RetryPolicy
from tr11ops.hub.address import host_of
from tr11ops.hub.asking import TIMEOUT_SECONDS, ask, until_answered
from tr11ops.logs.line_filter import LineFeed, LineFilter
from tr11ops.logs.show import Beginning, Query
from trainer.contract.record import Record

PIECE_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
CHUNKS = 64  # that are kept
AHEAD = 16  # fetched at once where one is read after another
OVERLAP_BYTES = 256
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")


class LogChunk(Record):
    """Bytes of the log from `offset` on, and the size of the whole log at that time."""

    offset: int
    data: bytes
    total: int


class RemoteLog:
    """One file below one address. A `Reader`, through a small cache.

    Every request raises HubPermanentError, and HubUnavailable when it is given up.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        retries: RetryPolicy,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._address = address
        self._token = token
        self._retries = retries
        self._timeout = timeout
        self._chunks: dict[int, bytes] = {}

    def size(self) -> int:
        """Bytes of the log now."""
        return self.fetch(0, 1).total

    def forget(self) -> None:
        """Forget what was read: the log may be another one."""
        self._chunks.clear()

    def read(self, offset: int, length: int) -> bytes:
        chunk, within = divmod(offset, CHUNK_BYTES)
        data = self._chunks.get(chunk, b"")
        if len(data) <= within or (len(data) < CHUNK_BYTES and len(data) < within + length):
            self._load(
                chunk, AHEAD if {chunk - 1, chunk - 2, chunk - 3} <= self._chunks.keys() else 1
            )
            data = self._chunks[chunk]
        return data[within : within + length]

    def _load(self, chunk: int, count: int) -> None:
        """Keep `count` chunks from this one on; more than one where someone reads on and on."""
        data = self.fetch(chunk * CHUNK_BYTES, count * CHUNK_BYTES).data
        for number in range(count):
            piece = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            if piece or number == 0:
                self._chunks.pop(chunk + number, None)
                self._chunks[chunk + number] = piece
        while len(self._chunks) > CHUNKS:
            del self._chunks[next(iter(self._chunks))]

    def fetch(self, offset: int, length: int) -> LogChunk:
        """One range, asked for until it is answered."""
        return until_answered(
            lambda: self._ask(offset, length), self._retries, host_of(self._address)
        )

    def _ask(self, offset: int, length: int) -> LogChunk:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        return ask(
            self._address,
            self._token,
            lambda stream, status, answered: _piece(stream, status, answered, offset, length),
            headers,
            self._timeout,
            also={416},
        )


def _piece(stream: IO[bytes], status: int, headers: Message, offset: int, length: int) -> LogChunk:
    found = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if status == 416:  # nothing there yet
        if found is None:
            raise HubUnavailable("the answer (416) does not say how large the file is")
        return LogChunk(offset, b"", int(found[3]))
    if status == 206:
        if found is None or found[1] is None or int(found[1]) != offset:
            raise HubUnavailable("the answer is not of the part that was asked for")
        return _whole(LogChunk(offset, stream.read(length), int(found[3])), length)
    size = headers.get("Content-Length", "")  # the whole file, from a server that knows no ranges
    if status != 200 or not size.isdecimal():
        raise HubUnavailable(f"the answer ({status}) does not say how large the file is")
    left = min(offset, int(size))
    while left and (passed := stream.read(min(left, CHUNK_BYTES))):
        left -= len(passed)
    return _whole(LogChunk(offset, stream.read(length), int(size)), length)


def _whole(piece: LogChunk, length: int) -> LogChunk:
    """Raises HubUnavailable when the connection ended inside the piece."""
    if len(piece.data) < min(length, piece.total - piece.offset):
        raise HubUnavailable("the answer was cut")
    return piece


# ----------------------------------------------------------------------------- following it
@dataclass
class RemoteFollower:
    """Gives the lines of a remote log that a query asks for. `say` tells the person that the log
    was written again.
    """

    log: RemoteLog
    query: Query
    say: Callable[[str], None]
    _offset: int = field(default=0, init=False)
    _known: bytes = field(default=b"", init=False, repr=False)  # the last bytes before the offset
    _feed: LineFeed = field(init=False)

    def __post_init__(self) -> None:
        self._feed = LineFeed(LineFilter(self.query.wanted))

    def begin(self) -> Iterator[str]:
        """What is there now. Raises HubPermanentError, HubUnavailable and NoSuchAttempt."""
        self.log.forget()
        size = self.log.size()
        beginning = Beginning(self.log, size, self.query, LineFilter(self.query.wanted))
        yield from beginning.lines()
        self._offset, self._feed = size, LineFeed(beginning.line_filter, beginning.rest)
        start = max(0, size - OVERLAP_BYTES)
        self._known = self.log.fetch(start, size - start).data if size else b""

    def more(self) -> Iterator[str]:
        """Lines that came since. A log that was cut or written again is shown as at the beginning."""
        while True:
            known = self._known
            piece = self.log.fetch(self._offset - len(known), len(known) + PIECE_BYTES)
            if piece.total < self._offset or not piece.data.startswith(known):
                self.say("the remote log was written again: its end again")
                yield from self.unfinished()
                yield from self.begin()
                return
            fresh = piece.data[len(known) :]
            self._offset += len(fresh)
            self._known = piece.data[-OVERLAP_BYTES:]
            yield from self._feed.take(fresh)
            if not fresh or self._offset >= piece.total:
                return

    def unfinished(self) -> Iterator[str]:
        """A last line that has no end yet; it is given once."""
        return self._feed.unfinished()
