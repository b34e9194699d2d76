"""A log on the hub, read by range requests, each asked again while it fails: what is new and no
more, whatever the network does.

A piece is asked for with a few bytes before it that are known already: a log that was cut or
written again shows by them and by its size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, TypeVar

from tr11ops.base.errors import HubPermanentError, HubUnavailable, NetworkError
from tr11ops.base.http import WebAnswer, get, may_pass, origin, wait_of
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.hub.base import host_of
from tr11ops.logs.line_filter import LineFeed, LineFilter
from tr11ops.logs.show import Beginning, Query
from trainer.contract.record import Record

# One question to a hub, asked again while it fails. Reading only.
#
# The token goes to the hub alone, never to another machine that the hub redirects to, and into no
# message.

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 3600.0
TRIES = 4  # of a question that is not part of following or watching
MISSING = 404
_FORBIDDEN = frozenset({401, 403})


def remote_retries(
    sleep: Callable[[float], object],
    say: Callable[[str], object],
    tries: int | None = TRIES,
    longest: float = 300.0,
    spread: float = 0.0,
    most: float = LONGEST_WAIT_SECONDS,
) -> RetryPolicy:
    """What happens when the network fails: waits of up to `longest` seconds; given up after `tries`
    (None: never).

    At once where the hub asks for a longer wait than `most` seconds, unless it is never given up.
    `spread` (0..1) is by how much a wait may be longer by chance, so that those who failed together
    do not ask again together.
    """
    return RetryPolicy(
        tries=tries,
        first_seconds=FIRST_WAIT_SECONDS,
        longest_seconds=longest,
        jitter=(1.0, 1.0 + spread),
        longest_asked_seconds=most,
        refuses_longer=tries is not None,
        sleep=sleep,
        say=say,
    )


def until_answered(question: Callable[[], T], retries: RetryPolicy, host: str) -> T:
    """What `question` returns once it does. Raises HubUnavailable when it is given up, and
    HubPermanentError.
    """
    return retry(question, retries, HubUnavailable, restored=f"{host} answers again")


Reading = Callable[[IO[bytes], int, Message], T]


def ask(
    address: str,
    token: str | None,
    read: Reading[T],
    headers: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    also: AbstractSet[int] = frozenset(),
) -> T:
    """Ask once, and give what `read(stream, status, headers)` makes of a good answer, or of a
    status in `also`.

    Raises HubPermanentError and HubUnavailable, `read`'s included.
    """
    host = host_of(address)
    try:
        with get(address, headers, token, timeout) as answer:
            if answer.status in also:
                return read(answer.stream, answer.status, answer.headers)
            if answer.status >= 400 and origin(answer.address) != origin(address):
                # a signed address may have ended; asking again gives a new one
                raise HubUnavailable(f"the storage of {host} answers {answer.status}")
            if answer.status >= 300:
                raise _failure(answer, host, has_token=bool(token))
            # such as a network that wants a login first
            if answer.headers.get_content_type() == "text/html":
                raise HubUnavailable(f"a web page answers instead of {host}")
            return read(answer.stream, answer.status, answer.headers)
    except NetworkError as error:
        raise HubUnavailable(f"{host} gives no answer ({error})") from None


def _failure(answer: WebAnswer, host: str, has_token: bool) -> HubPermanentError | HubUnavailable:
    """What an error's status means, in one line with the cure."""
    code = answer.status
    if may_pass(code):
        return HubUnavailable(f"{host} answers {code}", wait_of(answer.headers, time.time()))
    cure = ""
    if code < 400:
        cure = ": it sends us to an address that is no web address"
    elif code in _FORBIDDEN and has_token:
        cure = ": your token does not open it (private, or the token has ended); log in again: hf auth login"
    elif code in _FORBIDDEN:
        cure = ": the repository is private or not there; log in: hf auth login, or set HF_TOKEN"
    elif code in {MISSING, 410}:
        cure = ": there is no such file, or your token may not see it"
    return HubPermanentError(f"{host} answers {code}{cure}", code)


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
        def read(stream: IO[bytes], status: int, answered: Message) -> LogChunk:
            found = _RANGE.fullmatch(answered.get("Content-Range", ""))
            if status == 416:  # nothing there yet
                if found is None:
                    raise HubUnavailable("the answer (416) does not say how large the file is")
                return LogChunk(offset, b"", int(found[3]))
            if status == 206:
                if found is None or found[1] is None or int(found[1]) != offset:
                    raise HubUnavailable("the answer is not of the part that was asked for")
                return _whole(LogChunk(offset, stream.read(length), int(found[3])), length)
            # the whole file, from a server that knows no ranges
            size = answered.get("Content-Length", "")
            if status != 200 or not size.isdecimal():
                raise HubUnavailable(f"the answer ({status}) does not say how large the file is")
            left = min(offset, int(size))
            while left and (passed := stream.read(min(left, CHUNK_BYTES))):
                left -= len(passed)
            return _whole(LogChunk(offset, stream.read(length), int(size)), length)

        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        return ask(
            self._address, self._token, read, headers=headers, timeout=self._timeout, also={416}
        )


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
