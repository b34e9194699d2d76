"""One question to a hub, asked again while it fails. Reading only.

The token goes to the hub alone, never to another machine that the hub redirects to, and into no
message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from email.message import Message
from typing import IO, TypeVar

from tr11ops.base.errors import HubPermanentError, HubUnavailable, NetworkError
from tr11ops.base.http import WebAnswer, get, may_pass, origin
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.base.retry_after import wait_of
from tr11ops.hub.address import host_of

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
