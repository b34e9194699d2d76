"""How the hub's library speaks to the network here (every request has a time-out, and no failure is
retried below us), and what its failures mean to us.

The library's own retries sleep up to half a minute with no one able to stop them, and many of its
requests wait for ever. Its client is replaced, for the whole process, by one that gives each
request a time-out and turns every failure that may pass into `Unavailable`, which the library lets
through.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any
from urllib.parse import urlsplit

import httpx2
import huggingface_hub
from huggingface_hub import constants, hf_api, lfs
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session
from huggingface_hub.utils._http import hf_request_event_hook

from tr11ops.base.errors import (
    FileChanged,
    ForeignAnswer,
    HubConflict,
    HubError,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
    Unavailable,
)
from tr11ops.base.http import PageTrail, may_pass, read_whole, wait_of
from tr11ops.base.redact import one_line, redact
from tr11ops.hub.base import Credentials, host_of

# its own client's, which ours stands in for


CONNECT_SECONDS = 15.0
TOO_MANY = 429
_WITH_LOGGERS = (hf_api, lfs)  # imported, so that all loggers are there when they are silenced
_LIBRARIES = ("huggingface_hub", "httpx2", "httpcore2")


_trail: ContextVar[PageTrail | None] = ContextVar("trail", default=None)


@contextmanager
def one_question() -> Iterator[None]:
    """Inside, no page of a listing is followed twice: the library follows `Link: next` for as long
    as there is one.
    """
    token = _trail.set(PageTrail())
    try:
        yield
    finally:
        _trail.reset(token)


class _Client(httpx2.Client):
    """The library's client with our time-outs and errors. Proxies of the environment are used as
    ever.

    `send` raises Unavailable, HubPermanentError, and ForeignAnswer where the pages of a listing come
    back.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(
            event_hooks={"request": [hf_request_event_hook]}, follow_redirects=True, timeout=timeout
        )
        self.silence = timeout
        self._seconds = httpx2.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)).as_dict()

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        # the library passes "no time-out" with some requests: ours holds for all
        request.extensions = {**request.extensions, "timeout": self._seconds}
        host = request.url.host
        try:
            is_streamed = options.pop("stream", False)
            response = super().send(request, stream=True, **options)
            if not is_streamed:
                try:
                    read_whole(response)
                except ForeignAnswer as error:
                    raise HubPermanentError(f"{host} answers with {error}") from None
                finally:
                    response.close()
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise Unavailable(f"{host} gives no answer ({why(error)})") from None
        if may_pass(response.status_code):
            response.close()
            why_not = ""
            if response.status_code == TOO_MANY:
                why_not = ": it was asked too often for now"
            raise Unavailable(
                f"{host} answers {response.status_code}{why_not}",
                wait_of(response.headers, time.time()),
            )
        trail, following = _trail.get(), response.links.get("next", {}).get("url")
        if trail is not None and following is not None:
            trail.follow(following)
        return response


class _Redacting(logging.Filter):
    """Takes secrets out of what the library logs: its requests' addresses may be signed."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def why(error: Exception) -> str:
    """A network failure in few words, without addresses."""
    kinds = {
        httpx2.ConnectTimeout: "no connection in time",
        httpx2.TimeoutException: "silent for too long",
        httpx2.ConnectError: "no connection",
        httpx2.ProxyError: "the proxy refuses",
        httpx2.DecodingError: "the answer was garbled",
        httpx2.RemoteProtocolError: "the answer was cut",
        httpx2.NetworkError: "the connection broke",
    }
    return next(
        (words for kind, words in kinds.items() if isinstance(error, kind)), type(error).__name__
    )


def install(timeout: float) -> None:
    """Make the library use this client from now on, silent and without telemetry. `timeout`:
    seconds of silence.
    """
    present = get_session()
    if isinstance(present, _Client) and present.silence == timeout:
        return  # another client would have to make all connections again
    constants.HF_HUB_DISABLE_TELEMETRY = True
    bars = importlib.import_module("huggingface_hub.utils.tqdm")  # by its name it is a class
    # the library's function for it obeys the environment instead
    vars(bars)["HF_HUB_DISABLE_PROGRESS_BARS"] = True
    # what matters reaches the caller as an error
    huggingface_hub.logging.set_verbosity(logging.CRITICAL)
    # a filter holds for one logger, not for those below it
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        if name.startswith(_LIBRARIES) and not any(
            isinstance(known, _Redacting) for known in logger.filters
        ):
            logger.addFilter(_Redacting())
    huggingface_hub.set_client_factory(lambda: _Client(timeout))


# What a failure of the hub's library means to us: come again later, or a person is needed, and for
# what.

_CURES = {
    402: "the account's storage or plan is at its limit",
    404: "there is no such thing, or the token may not see it; names are OWNER/NAME",
    409: "it is there already, or someone else is changing it",
    410: "it was taken away",
    412: "someone else has committed meanwhile",
    413: "too large",
}
# What a hub says of a refusal that is not about the token, whatever its number, and what to do.
_REASONS = (
    (
        r"storage|quota|billing|upgrade your|\bplan\b",
        "the account's storage or plan is at its limit; remove there what is not needed, or raise it",
    ),
    (r"rate limit|too many|too often", "it was asked too often for now; try again later"),
    (
        r"restricted|gated|accept",
        "the repository's conditions are to be accepted on its page, by the token's account",
    ),
    (r"disabled|archived|locked|banned|suspended", "it is shut there; ask the hub"),
)
_OF_PERMISSION = re.compile(
    r"token|permission|rights|forbidden|authori[sz]|allowed|denied|write access", re.IGNORECASE
)


def failure_of(
    error: Exception, what: str, endpoint: str, credentials: Credentials
) -> Exception | None:
    """Our error for one of the library's. None for a fault of this program, which is to be raised
    as it is.
    """
    for found in _chain(error):
        known = _known(found, what, endpoint, credentials)
        if known is not None:
            return known
    is_foreign = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, ForeignAnswer))
    if is_foreign or _is_of_library(error):
        # such as a portal that asks for a login; an answer without what it should hold is a
        # KeyError of the library
        return HubUnavailable(
            f"{what}: what answers at {host_of(endpoint)} does not speak as a hub does"
        )
    if isinstance(error, ValueError):  # the library's word for answers and paths that it cannot use
        return HubPermanentError(one_line(f"{what}: {error}", credentials.secrets))
    return None


def _known(
    error: BaseException, what: str, endpoint: str, credentials: Credentials
) -> Exception | None:
    known: Exception | None = None
    match error:
        case HubError() | FileChanged():
            known = error
        case Unavailable():
            known = HubUnavailable(one_line(f"{what}: {error}", credentials.secrets), error.wait)
        case HfHubHTTPError():
            known = _of_answer(error, what, endpoint, credentials)
        case httpx2.TransportError() | httpx2.DecodingError():  # while an answer was read
            known = HubUnavailable(f"{what}: {host_of(endpoint)} gives no answer ({why(error)})")
        case OfflineModeIsEnabled():
            known = HubPermanentError(
                f"{what}: HF_HUB_OFFLINE is set, so the hub is not asked; unset it"
            )
        case httpx2.InvalidURL() | HFValidationError():
            known = HubPermanentError(one_line(f"{what}: {error}", credentials.secrets))
    return known


def _of_answer(
    error: HfHubHTTPError, what: str, endpoint: str, credentials: Credentials
) -> HubError:
    status = error.response.status_code
    address = urlsplit(str(error.response.url))
    if address.netloc != urlsplit(endpoint).netloc:
        # storage that the hub sent us to: its signed address may have become too old; a new one is
        # got by asking again
        return HubUnavailable(f"{what}: the hub's storage answers {status}")
    said = one_line(error.server_message or "", credentials.secrets, limit=160)
    text = one_line(
        f"{what}: {host_of(endpoint)} answers {status}: {_cure(status, said, credentials)}",
        credentials.secrets,
    )
    if said and said.lower() not in text.lower():
        text = f"{text} ({said})"
    kinds: dict[int, type[HubPermanentError]] = {404: HubMissing, 410: HubMissing, 412: HubConflict}
    return kinds.get(status, HubPermanentError)(text, status)


def _cure(status: int, said: str, credentials: Credentials) -> str:
    """What a refusal means, and what to do: by what the hub says of it, before what its number says."""
    has_token = credentials.token is not None
    if status in {400, 402, 403, 409, 422}:
        for pattern, cure in _REASONS:
            if re.search(pattern, said, re.IGNORECASE):
                return cure
    if status == 401 and has_token:
        return f"the token of {credentials.source} is not valid (any more); put a new one there"
    if status == 401:
        return "no token; name hub.credentials_file, set HF_TOKEN, or type: hf auth login"
    if status == 403 and said and not _OF_PERMISSION.search(said):
        return "it refuses this for a reason of its own"
    if status == 403:
        if has_token:
            whose = f"the token of {credentials.source}"
        else:
            whose = "who comes without a token"
        return f"{whose} has no permission for this; it needs write access to this repository"
    return _CURES.get(status, "it does not take what was sent")


def _is_of_library(error: Exception) -> bool:
    if isinstance(error, RecursionError):  # the JSON reader's, which the library's client asks
        return True
    if not isinstance(error, (LookupError, TypeError, AttributeError)):
        return False
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(names) and str(names[-1]).startswith("huggingface_hub")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, the nearest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
