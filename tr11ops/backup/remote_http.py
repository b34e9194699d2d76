"""HTTP with a bucket (bodies sent piece by piece as they come, read piece by piece, in the caller's
own thread), and what a destination's answer means.

There is no event loop and no thread here, so that it survives a fork. Nothing is tried again here:
that is for anyone who holds the bytes. `timeout` bounds each step (connecting, sending a piece, the
next bytes of an answer), not the whole.

Not gcsfs, which can go on with no file that was cut off: what was tried and is missing is in
docs/explanation/object-store.md.
"""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import httpx2

from tr11ops.base.errors import (
    ArchiveError,
    ArchiveFull,
    ArchivePermanentError,
    ArchiveUnavailable,
    ForeignAnswer,
)
from tr11ops.base.http import json_object, may_pass, read_whole
from tr11ops.base.redact import one_line

# What a destination's answer means, in one line that holds no secret: try again, never try again,
# or no room.

_FULL = re.compile(r"(?i)quota|no space|storage limit|insufficient storage|billing")
_RATE = re.compile(r"(?i)rate|too many|slow ?down|retry|requests per")


def error_of_status(
    status: int, where: str, who: str, message: str = "", wait: float = 0.0
) -> ArchiveError:
    """The error that an HTTP status stands for. `who`: which credentials were used, in words."""
    said = ""
    if message.strip():
        said = f": {one_line(message)}"
    is_rate = (status < 500 and may_pass(status)) or (status == 403 and bool(_RATE.search(message)))
    if is_rate:
        return ArchiveUnavailable(
            f"{where}: asks to be left alone for a while (HTTP {status})", wait
        )
    if status == 507 or (status == 403 and _FULL.search(message)):
        return ArchiveFull(f"{where}: no room or no quota is left there (HTTP {status}){said}")
    if may_pass(status):
        return ArchiveUnavailable(f"{where}: has a fault of its own (HTTP {status})", wait)
    texts = {
        401: f"{who} are not accepted{said}; set backup.credentials_file to a valid key",
        403: f"{who} may not do this{said}; give their account the role Storage Object User on the bucket",
        404: "is not there (HTTP 404); check its name",
        410: "is no longer there (HTTP 410); check its name",
    }
    return ArchivePermanentError(
        f"{where}: {texts.get(status, f'does not take the request (HTTP {status}){said}')}"
    )


def error_of_exception(error: BaseException, where: str, who: str) -> ArchiveError:
    """The error that a library's exception stands for; one that says nothing of itself may be gone
    at the next try.
    """
    if isinstance(error, ArchiveError):
        return error
    status = status_of(error)
    if status is not None:
        return error_of_status(status, where, who, str(error))
    if type(error).__name__ in {
        "NoCredentialsError",
        "PartialCredentialsError",
        "DefaultCredentialsError",
    }:
        return ArchivePermanentError(
            f"{where}: no credentials were found; set backup.credentials_file"
        )
    if isinstance(error, OSError):
        return _error_of_system(error, where, who)
    return ArchiveUnavailable(f"{where}: {type(error).__name__}: {one_line(str(error))}")


def _error_of_system(error: OSError, where: str, who: str) -> ArchiveError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return ArchiveFull(f"{where}: {error.strerror}")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return ArchivePermanentError(f"{where}: {error.strerror or 'not allowed'} ({who})")
    if isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError | FileExistsError
    ):
        return ArchivePermanentError(f"{where}: {error.strerror or 'is not there'}")
    if isinstance(error, TimeoutError):
        what = "no answer in time"
    else:
        what = one_line(error.strerror or type(error).__name__)
    return ArchiveUnavailable(f"{where}: {what}")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a library's exception carries, wherever it keeps it; None when it has
    none.
    """
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(value, int):
            return value
        return None
    for holder, name in (
        (error, "status"),
        (error, "status_code"),
        (error, "code"),
        (response, "status_code"),
    ):
        value = getattr(holder, name, None)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
            return value
    return None


def message_of(body: bytes) -> str:
    """What the server says was wrong; "" when it says nothing that is meant for people."""
    try:
        error = json_object(body)["error"]
        if isinstance(error, dict):
            return str(error["message"])
        return str(error)
    except (ForeignAnswer, KeyError):
        return ""


def error_of_token(error: Exception, where: str, who: str) -> ArchiveError:
    """What it means that no token could be had. google-auth says itself whether another try may
    help.
    """
    chain = (error, *([error.__cause__] if error.__cause__ is not None else []))
    kinds = {type(one).__name__ for one in chain}
    if "TransportError" in kinds or any(getattr(one, "retryable", False) for one in chain):
        return ArchiveUnavailable(f"{where}: the server that gives out tokens does not answer")
    if kinds & {"RefreshError", "HttpError", "NonRetryableError", "DefaultCredentialsError"}:
        return ArchivePermanentError(
            f"{where}: {who} are not accepted; set backup.credentials_file to a valid key"
        )
    return error_of_exception(error, where, who)


IDLE_CONNECTIONS = 64  # that are kept


class BucketClient:
    """Requests to one server, from many threads at once. Methods raise ArchiveUnavailable or
    ArchivePermanentError.

    `shown` is how the server is named in messages; `authorise` adds the credentials to a request's
    headers.
    """

    def __init__(
        self, base: str, timeout: float, shown: str, authorise: Callable[[dict[str, str]], None]
    ) -> None:
        self._base = base
        self._timeout = timeout
        self._shown = shown
        self._authorise = authorise
        self._client = httpx2.Client(
            headers={"User-Agent": "tr11", "Accept-Encoding": "identity"},
            timeout=timeout,
            verify=ssl.create_default_context(),
            # a proxy is for what leaves the site
            trust_env=base.startswith("https:"),
            limits=httpx2.Limits(max_keepalive_connections=IDLE_CONNECTIONS),
        )

    def call(
        self,
        method: str,
        target: str,
        body: bytes | Iterator[bytes] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """One request, and its whole answer. What `body` raises goes through."""
        with self.ask(method, target, body, headers) as answer:
            self.finish(answer)
        return answer

    @contextmanager
    def ask(
        self,
        method: str,
        target: str,
        body: bytes | Iterator[bytes] = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx2.Response]:
        """One request whose answer is read inside: where that ends early, the connection is cut."""
        sent = dict(headers or {})
        self._authorise(sent)
        request = self._client.build_request(
            method, self._base + target, content=body, headers=sent
        )
        try:
            with closing(self._answer_to(request)) as answer:
                yield answer
        except httpx2.TransportError as error:
            raise self._away(error) from None

    def _answer_to(self, request: httpx2.Request) -> httpx2.Response:
        """The beginning of an answer. What is only asked for is asked once more where no answer began:
        the server may have closed a connection that was kept.
        """
        try:
            return self._client.send(request, stream=True)
        except httpx2.RemoteProtocolError:
            if request.method != "GET":
                raise
        return self._client.send(request, stream=True)

    def finish(self, answer: httpx2.Response) -> None:
        """Read the rest of an answer that is small enough to be held."""
        try:
            read_whole(answer)
        except ForeignAnswer as error:
            raise ArchiveUnavailable(f"{self._shown}: it answers with {error}") from None

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _away(self, error: httpx2.TransportError) -> ArchiveError:
        """What a failure of the network means."""
        system = _system_error(error)
        if isinstance(system, ssl.SSLCertVerificationError):
            return ArchivePermanentError(
                f"{self._shown}: its certificate is not valid: {one_line(system.verify_message)}"
            )
        if isinstance(error, httpx2.TimeoutException):
            return ArchiveUnavailable(f"{self._shown}: nothing was heard for {self._timeout:g} s")
        if system is not None:
            return ArchiveUnavailable(
                f"{self._shown}: {one_line(system.strerror or type(system).__name__)}"
            )
        return ArchiveUnavailable(
            f"{self._shown}: the answer was cut off or is not HTTP ({type(error).__name__})"
        )


def _system_error(error: BaseException) -> OSError | None:
    """What the system said, below the words of the library."""
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    return below
