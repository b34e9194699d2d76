"""A log on the hub, read by range requests: what is new and no more, whatever the network does.

A piece is asked for with a few bytes before it that are known already: a log that was cut or written anew shows by them
and by its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import IO

from tr11ops.hub.address import host_of
from tr11ops.logs.asking import TIMEOUT_SECONDS, Patience, RemoteAway, RemoteRefused, ask
from tr11ops.logs.reader import LONGEST_LINE_BYTES
from tr11ops.logs.show import Beginning, Query
from tr11ops.logs.sieve import Sieve

__all__ = ["Patience", "Piece", "RemoteAway", "RemoteFollower", "RemoteLog", "RemoteRefused"]

PIECE_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
CHUNKS = 64  # that are kept
AHEAD = 16  # fetched at once where one is read after another
OVERLAP_BYTES = 256
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")


@dataclass(frozen=True)
class Piece:
    """Bytes of the log from `offset` on, and the size of the whole log at that time."""

    offset: int
    data: bytes
    total: int


class RemoteLog:
    """One file below one address. A `Reader`, through a small cache.

    Every request raises RemoteRefused, and RemoteAway when patience is at its end.
    """

    def __init__(self, address: str, token: str | None, patience: Patience, timeout: float = TIMEOUT_SECONDS) -> None:
        self._address = address
        self._token = token
        self._patience = patience
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
            self._load(chunk, AHEAD if {chunk - 1, chunk - 2, chunk - 3} <= self._chunks.keys() else 1)
            data = self._chunks[chunk]
        return data[within : within + length]

    def _load(self, chunk: int, count: int) -> None:
        """Keep `count` chunks from this one on; more than one where somebody reads on and on."""
        data = self.fetch(chunk * CHUNK_BYTES, count * CHUNK_BYTES).data
        for number in range(count):
            piece = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            if piece or number == 0:
                self._chunks.pop(chunk + number, None)
                self._chunks[chunk + number] = piece
        while len(self._chunks) > CHUNKS:
            del self._chunks[next(iter(self._chunks))]

    def fetch(self, offset: int, length: int) -> Piece:
        """One range, asked for until it is answered."""
        return self._patience.until_answered(lambda: self._ask(offset, length), host_of(self._address))

    def _ask(self, offset: int, length: int) -> Piece:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        return ask(
            self._address,
            self._token,
            lambda stream, status, answered: _piece(stream, status, answered, offset, length),
            headers,
            self._timeout,
            also={416},
        )


def _piece(stream: IO[bytes], status: int, headers: Message, offset: int, length: int) -> Piece:
    found = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if status == 416:  # nothing there yet
        if found is None:
            raise RemoteAway("the answer (416) does not say how large the file is")
        return Piece(offset, b"", int(found[3]))
    if status == 206:
        if found is None or found[1] is None or int(found[1]) != offset:
            raise RemoteAway("the answer is not of the part that was asked for")
        return _whole(Piece(offset, stream.read(length), int(found[3])), length)
    size = headers.get("Content-Length", "")  # the whole file, from a server that knows no ranges
    if status != 200 or not size.isdecimal():
        raise RemoteAway(f"the answer ({status}) does not say how large the file is")
    left = min(offset, int(size))
    while left and (passed := stream.read(min(left, CHUNK_BYTES))):
        left -= len(passed)
    return _whole(Piece(offset, stream.read(length), int(size)), length)


def _whole(piece: Piece, length: int) -> Piece:
    """Raises RemoteAway when the connection ended inside the piece."""
    if len(piece.data) < min(length, piece.total - piece.offset):
        raise RemoteAway("the answer was cut")
    return piece


# ----------------------------------------------------------------------------- following it
@dataclass
class RemoteFollower:
    """Gives the lines of a remote log that a query asks for. `say` tells the person that the log was written anew."""

    log: RemoteLog
    query: Query
    say: Callable[[str], None]
    _offset: int = field(default=0, init=False)
    _known: bytes = field(default=b"", init=False, repr=False)  # the last bytes before the offset
    _rest: bytes = field(default=b"", init=False, repr=False)
    _sieve: Sieve = field(init=False)

    def __post_init__(self) -> None:
        self._sieve = Sieve(self.query.wanted)

    def begin(self) -> Iterator[str]:
        """What is there now. Raises RemoteRefused, RemoteAway and NoSuchAttempt."""
        self.log.forget()
        size = self.log.size()
        beginning = Beginning(self.log, size, self.query, Sieve(self.query.wanted))
        yield from beginning.lines()
        self._offset, self._rest, self._sieve = size, beginning.rest, beginning.sieve
        start = max(0, size - OVERLAP_BYTES)
        self._known = self.log.fetch(start, size - start).data if size else b""

    def more(self) -> Iterator[str]:
        """Lines that came since. A log that was cut or written anew is shown as at the beginning."""
        while True:
            known = self._known
            piece = self.log.fetch(self._offset - len(known), len(known) + PIECE_BYTES)
            if piece.total < self._offset or not piece.data.startswith(known):
                self.say("the remote log was written anew: its end again")
                yield from self.unfinished()
                yield from self.begin()
                return
            fresh = piece.data[len(known) :]
            self._offset += len(fresh)
            self._known = piece.data[-OVERLAP_BYTES:]
            yield from self._feed(fresh)
            if not fresh or self._offset >= piece.total:
                return

    def unfinished(self) -> Iterator[str]:
        """A last line that has no end yet; it is given once."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._sieve.feed(rest.decode("utf-8", "replace"))

    def _feed(self, data: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from self._sieve.feed(line.decode("utf-8", "replace"))
        if len(self._rest) > LONGEST_LINE_BYTES:
            yield from self.unfinished()
