"""A log on the hub, read by range requests: what is new and no more, whatever the network does.

A piece is asked for with a few bytes before it that are known already: a log that was cut or written anew shows by them
and by its size. The token goes to the hub alone, never to where the hub redirects to, and into no message.
"""

from __future__ import annotations

import itertools
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from typing import IO
from urllib.parse import urlsplit

from tr11ops.logs.reader import LONGEST_LINE_BYTES
from tr11ops.logs.show import Beginning, Query
from tr11ops.logs.sieve import Sieve

TIMEOUT_SECONDS = 30.0
PIECE_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
CHUNKS = 64  # that are kept
AHEAD = 16  # fetched at once where one is read after another
OVERLAP_BYTES = 256
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 3600.0
TRIES = 4  # of a request without --follow
_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")


class RemoteRefused(Exception):
    """The hub will not give this file: it is not there, or not for us. The text is one line."""


class RemoteAway(Exception):
    """The hub gave no answer, or a temporary one; `wait` is what it asked for, in seconds. The text is one line."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


@dataclass(frozen=True)
class Piece:
    """Bytes of the log from `offset` on, and the size of the whole log at that time."""

    offset: int
    data: bytes
    total: int


@dataclass(frozen=True)
class Patience:
    """What happens when the network fails: the waits double up to `longest` seconds, after `tries` (None: never) it is
    given up. `say` tells the person, once for each kind of failure.
    """

    sleep: Callable[[float], None]
    say: Callable[[str], None]
    tries: int | None = TRIES
    longest: float = 300.0


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
        said, wait = "", FIRST_WAIT_SECONDS
        for attempt in itertools.count(1):
            try:
                piece = self._ask(offset, length)
            except RemoteAway as failure:
                if attempt == self._patience.tries:
                    raise
                delay = max(min(wait, self._patience.longest), min(failure.wait, LONGEST_WAIT_SECONDS))
                if str(failure) != said:
                    said = str(failure)
                    self._patience.say(f"{said}: trying again in {delay:.0f} s")
                self._patience.sleep(delay)
                wait *= 2
            else:
                if said:
                    self._patience.say(f"{self._host} answers again")
                return piece
        raise AssertionError("unreachable")

    def _ask(self, offset: int, length: int) -> Piece:
        request = urllib.request.Request(self._address, headers={"Range": f"bytes={offset}-{offset + length - 1}"})
        request.add_header("User-Agent", "tr11")
        if self._token:  # not repeated to where the hub redirects
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return _piece(answer, answer.status, answer.headers, offset, length)
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error, offset)
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            words = getattr(reason, "strerror", None) or type(reason).__name__
            raise RemoteAway(f"{self._host} gives no answer ({words})") from None

    @property
    def _host(self) -> str:
        return urlsplit(self._address).hostname or "the hub"

    def _refused(self, error: urllib.error.HTTPError, offset: int) -> Piece:
        if error.code == 416:
            found = _RANGE.fullmatch(error.headers.get("Content-Range", ""))
            if found is not None:
                return Piece(offset, b"", int(found[3]))
        if error.code in {408, 425, 429} or error.code >= 500:
            raise RemoteAway(f"{self._host} answers {error.code}", _seconds(error.headers.get("Retry-After")))
        if error.code in {401, 403}:
            raise RemoteRefused(f"{self._host} answers {error.code}: the repository is private; log in: hf auth login")
        if error.code == 404:
            raise RemoteRefused(f"{self._host} answers 404: there is no such file, or your token may not see it")
        raise RemoteRefused(f"{self._host} answers {error.code}")


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 7 else 0.0


def _piece(stream: IO[bytes], status: int, headers: Message, offset: int, length: int) -> Piece:
    if status == 206:
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
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
