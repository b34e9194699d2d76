"""How the hub's library speaks to the network here: every request has a time-out, and no failure is
retried below us.

The library's own retries sleep up to half a minute with no one able to stop them, and many of its
requests wait for ever. Its client is replaced, for the whole process, by one that gives each
request a time-out and turns every failure that may pass into `NoAnswer`, which the library lets
through.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import constants, hf_api, lfs
from huggingface_hub.utils import get_session

# its own client's, which ours stands in for
from huggingface_hub.utils._http import hf_request_event_hook

from tr11ops.base.answers import PageTrail
from tr11ops.base.errors import HubPermanentError, NoAnswer
from tr11ops.base.http import LARGEST_ANSWER_BYTES, may_pass
from tr11ops.base.redact import redact
from tr11ops.base.retry_after import wait_of

CONNECT_SECONDS = 15.0
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

    `send` raises NoAnswer, HubPermanentError, and ForeignAnswer where the pages of a listing come
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
                _read(response, host)
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise NoAnswer(f"{host} gives no answer ({why(error)})") from None
        if may_pass(response.status_code):
            response.close()
            raise NoAnswer(
                f"{host} answers {response.status_code}", wait_of(response.headers, time.time())
            )
        trail, following = _trail.get(), response.links.get("next", {}).get("url")
        if trail is not None and following is not None:
            trail.follow(following)
        return response


def _read(response: httpx2.Response, host: str) -> None:
    """Read an answer whole, as the client does, but no more than the hub ever has to say. Raises
    HubPermanentError.
    """
    pieces, size = [], 0
    try:
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST_ANSWER_BYTES:
                raise HubPermanentError(
                    f"{host} answers with more than {LARGEST_ANSWER_BYTES >> 20} MiB"
                )
    finally:
        response.close()
    response._content = b"".join(pieces)  # where the library's own `read` leaves it


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
