"""One question to a hub, and patience with its failures. Reading only.

The token goes to the hub alone, never to another machine that the hub redirects to, and into no message.
"""

from __future__ import annotations

import io
import itertools
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, HTTPMessage
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from tr11ops.hub.address import host_of
from tr11ops.retry_after import wait_of
from tr11ops.units import duration

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
FIRST_WAIT_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 3600.0
TRIES = 4  # of a question that is not part of following or watching
MISSING = 404
_LATER = frozenset({408, 425, 429})
_FORBIDDEN = frozenset({401, 403})


class RemoteRefused(Exception):
    """The hub will not give this: it is not there, or not for us. `status` is its answer's. The text is one line."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RemoteAway(Exception):
    """The hub gave no answer, or a temporary one; `wait` is what it asked for, in seconds. The text is one line."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


@dataclass(frozen=True)
class Patience:
    """What happens when the network fails: the waits double up to `longest` seconds, after `tries` (None: never) it is
    given up; and at once where the hub asks for a longer wait than `most` seconds.

    `say` tells the person, once for each kind of failure. `spread` (0..1) is by how much a wait may be longer by
    chance, so that those who failed together do not ask again together.
    """

    sleep: Callable[[float], None]
    say: Callable[[str], None]
    tries: int | None = TRIES
    longest: float = 300.0
    spread: float = 0.0
    most: float = LONGEST_WAIT_SECONDS

    def until_answered(self, question: Callable[[], T], host: str) -> T:
        """What `question` returns once it does. Raises RemoteAway when patience is at its end, and RemoteRefused."""
        said, wait = "", FIRST_WAIT_SECONDS
        for attempt in itertools.count(1):
            try:
                found = question()
            except RemoteAway as failure:
                if attempt == self.tries:
                    raise
                if failure.wait > self.most and self.tries is not None:
                    words = f"{failure}, and asks for {duration(failure.wait)} of silence: not waited for"
                    raise RemoteAway(words, failure.wait) from None
                delay = max(min(wait, self.longest), min(failure.wait, self.most))
                delay *= 1 + self.spread * random.random()
                if str(failure) != said:
                    said = str(failure)
                    self.say(f"{said}: trying again in {delay:.0f} s")
                self.sleep(delay)
                wait *= 2
            else:
                if said:
                    self.say(f"{host} answers again")
                return found
        raise AssertionError("unreachable")


Reading = Callable[[IO[bytes], int, Message], T]


def ask(
    address: str,
    token: str | None,
    read: Reading[T],
    headers: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    also: AbstractSet[int] = frozenset(),
) -> T:
    """Ask once, and give what `read(stream, status, headers)` makes of a good answer, or of a status in `also`.

    Raises RemoteRefused and RemoteAway, `read`'s included.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "tr11", **(headers or {})})
    host = host_of(address)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=timeout) as answer:
            if answer.headers.get_content_type() == "text/html":  # such as a network that wants a login first
                raise RemoteAway(f"a web page answers instead of {host}")
            return read(answer, answer.status, answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in also:
                return read(error, error.code, error.headers)
            if error.code >= 400 and _origin(error.url) != _origin(
                address
            ):  # a signed address may have ended; asking again gives a new one
                raise RemoteAway(f"the storage of {host} answers {error.code}") from None
            raise _failure(error, host, has_token=bool(token)) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        words = getattr(reason, "strerror", None) or type(reason).__name__
        raise RemoteAway(f"{host} gives no answer ({words})") from None


def _origin(address: str) -> tuple[str, str]:
    return urlsplit(address)[:2]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect; the token goes along only to the very same place that it was meant for."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage
    ) -> Any:
        fp.close()  # its body is of no use, and may have no end: the library would read it
        return super().http_error_302(req, io.BytesIO(), code, msg, headers)

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
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if _origin(newurl)[0] not in {"http", "https"}:
            raise RemoteRefused(f"{host_of(req.full_url)} sends us to an address that is no web address", code)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token and _origin(req.full_url) == _origin(newurl):
            following.add_unredirected_header("Authorization", token)
        return following


def _failure(error: urllib.error.HTTPError, host: str, has_token: bool) -> RemoteRefused | RemoteAway:
    """What an error's status means, in one line with the cure."""
    code = error.code
    if code in _LATER or code >= 500:
        return RemoteAway(f"{host} answers {code}", wait_of(error.headers, time.time()))
    if code in _FORBIDDEN and has_token:
        cure = "your token does not open it (private, or the token has ended); log in again: hf auth login"
        return RemoteRefused(f"{host} answers {code}: {cure}", code)
    if code in _FORBIDDEN:
        cure = "the repository is private or not there; log in: hf auth login, or set HF_TOKEN"
        return RemoteRefused(f"{host} answers {code}: {cure}", code)
    if code in {MISSING, 410}:
        return RemoteRefused(f"{host} answers {code}: there is no such file, or your token may not see it", code)
    return RemoteRefused(f"{host} answers {code}", code)
