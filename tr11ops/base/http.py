"""HTTP, as far as all who speak it agree: which failures may pass, how much is read, how long a
server asks to be left alone, what of its answer is believed, and one plain request.

Files go to a bucket, and commits to the hub, over httpx2. One question does not need it: the
standard library is loaded in half the time, 0.07 s against 0.15.
"""

from __future__ import annotations

import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from tr11ops.base.errors import ForeignAnswer, NetworkError
from trainer.contract.documents import record_of
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    import httpx2

# Answers of a server before they are believed: JSON of the form that was asked for, and listings
# that come to an end.
#
# A portal that asks for a login, a proxy, a server of another kind: each answers with status 200. Of
# such an answer nothing follows, not even that there is nothing.

T = TypeVar("T")


def json_object(body: bytes | str) -> JsonObject:
    """The JSON object that an answer is. Raises ForeignAnswer."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: nested deeper than any answer
        raise ForeignAnswer("no JSON") from None
    if not isinstance(value, dict):
        raise ForeignAnswer("no JSON object")
    return value


def record_in(kind: type[T], value: JsonObject) -> T:
    """The record of class `kind` that an answer holds. Raises ForeignAnswer."""
    try:
        return record_of(kind, value)
    except ValueError as error:
        raise ForeignAnswer(str(error)) from None


class PageTrail:
    """The pages of one listing that were followed. One that is named again would have the listing
    go round for ever.
    """

    def __init__(self) -> None:
        self._followed: set[Hashable] = set()

    def follow(self, page: Hashable) -> None:
        """Go on to the page of this token or address. Raises ForeignAnswer where it was followed
        before.
        """
        if page in self._followed:
            raise ForeignAnswer("its pages go round")
        self._followed.add(page)


LONGEST_WAIT_SECONDS = 24 * 3600.0
# of a RateLimit header: none left, seconds to wait
_RESET = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")


class Headers(Protocol):
    """An answer's headers, by names in any case."""

    def get(self, name: str, default: str, /) -> str:
        """The value of a header."""


def wait_of(headers: Headers, now: float) -> float:
    """Seconds that an answer asks to wait: RateLimit's reset or Retry-After (seconds or a date),
    the longer one.

    A date is compared with the destination's own clock (`Date`); `now`, in seconds since the epoch,
    counts where it has none. What cannot be understood asks for nothing.
    """
    limit = _RESET.search(headers.get("RateLimit", ""))
    asked = headers.get("Retry-After", "").strip()
    wait = 0.0
    if limit:
        wait = float(limit[1])
    if asked.isascii() and asked.isdecimal() and len(asked) < 10:
        return min(max(wait, float(asked)), LONGEST_WAIT_SECONDS)
    then = _moment(asked)
    if then is not None:
        there = _moment(headers.get("Date", ""))
        wait = max(wait, then - (now if there is None else there))
    return min(wait, LONGEST_WAIT_SECONDS)


def _moment(text: str) -> float | None:
    """A date of HTTP, which is always in UTC, in seconds since the epoch; None for anything else."""
    try:
        moment = parsedate_to_datetime(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


LARGEST_ANSWER_BYTES = 64 << 20
_PASSING = frozenset({408, 425, 429})


def read_whole(answer: httpx2.Response) -> None:
    """Read an answer that is streamed, as its own `read` would. Raises ForeignAnswer where it has
    more than any server ever has to say.
    """
    pieces, size = [], 0
    for piece in answer.iter_bytes():
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_ANSWER_BYTES:
            raise ForeignAnswer(f"more than {LARGEST_ANSWER_BYTES >> 20} MiB")
    answer._content = b"".join(pieces)


def may_pass(status: int) -> bool:
    """Whether an answer of this status may be another at the next try."""
    return status in _PASSING or status >= 500


def origin(address: str) -> tuple[str, str]:
    """Scheme, and host with port."""
    return urlsplit(address)[:2]


class WebAnswer(Record):
    """An answer whose body is still to be read, from `address`: where redirects have led."""

    status: int
    headers: Message
    stream: IO[bytes]
    address: str


@contextmanager
def get(
    address: str,
    headers: Mapping[str, str] | None = None,
    token: str | None = None,
    timeout: float = 30.0,
) -> Iterator[WebAnswer]:
    """Ask once; what is read inside may fail as the request may. `timeout`: seconds of silence.

    Redirects lead to the web alone, and the token goes along only to the very same place. Raises
    NetworkError.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "tr11", **(headers or {})})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        try:
            found = urllib.request.build_opener(_Redirects).open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            found = error
        with found:
            yield WebAnswer(found.status, found.headers, found, found.url)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NetworkError(getattr(reason, "strerror", None) or type(reason).__name__) from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage
    ) -> Any:
        fp.close()  # its body is of no use, and may have no end: the library would read it
        return super().http_error_302(req, io.BytesIO(), code=code, msg=msg, headers=headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        following = super().redirect_request(
            req, fp, code=code, msg=msg, headers=headers, newurl=newurl
        )
        if origin(newurl)[0] not in {"http", "https"}:  # the library would ask an FTP server
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token and origin(req.full_url) == origin(newurl):
            following.add_unredirected_header("Authorization", token)
        return following
