"""HTTP for large bodies (sent piece by piece as they come, read piece by piece, in the caller's own
thread), and what a destination's answer means.

There is no event loop and no thread here, so that it survives a fork. Nothing is tried again here:
that is for anyone who holds the bytes. `timeout` bounds each step (connecting, sending 1 MiB, the
next bytes of an answer), not the whole.

Not gcsfs, which can go on with no file that was cut off: what was tried and is missing is in
docs/object-store.md.
"""

from __future__ import annotations

import base64
import errno
import http.client
import re
import select
import ssl
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from urllib.parse import unquote, urlsplit

from tr11ops.base.errors import (
    ArchiveError,
    ArchiveFull,
    ArchivePermanentError,
    ArchiveUnavailable,
    ForeignAnswer,
    StaleConnection,
)
from tr11ops.base.http import LARGEST_ANSWER_BYTES, json_object, may_pass
from tr11ops.base.redact import one_line
from trainer.contract.record import Record

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


SLICE_BYTES = 1 << 20
IDLE_CONNECTIONS = 64  # that are kept


class BucketAnswer(Record):
    """A whole answer."""

    status: int
    headers: Message
    body: bytes


class BucketClient:
    """Requests to one server, from many threads at once. Methods raise ArchiveUnavailable or
    ArchivePermanentError.

    `shown` is how the server is named in messages; `authorise` adds the credentials to a request's
    headers.
    """

    def __init__(
        self,
        base: str,
        timeout: float,
        shown: str,
        authorise: Callable[[dict[str, str]], None] = lambda headers: None,
    ) -> None:
        self._base = urlsplit(base)
        self._timeout = timeout
        self._shown = shown
        self._authorise = authorise
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._tls = ssl.create_default_context() if self._base.scheme == "https" else None

    def call(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> BucketAnswer:
        """One request whose body and answer are small enough to be held."""
        return self.ask(method, target, body, headers).finish()

    def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """One request whose body is small; the answer's head is there.

        A server may close a connection just when it is used again: then the request goes over a new
        one, once.
        """
        try:
            return self._ask(method, target, body, headers)
        except StaleConnection:
            self.close()
            return self._ask(method, target, body, headers)

    def _ask(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str] | None
    ) -> Exchange:
        exchange = self.begin(method, target, len(body), headers)
        exchange.send(body)
        exchange.response()
        return exchange

    def begin(
        self, method: str, target: str, length: int, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """Begin a request whose body of `length` bytes is sent afterwards."""
        sent = {
            "User-Agent": "tr11",
            "Accept-Encoding": "identity",
            "Content-Length": str(length),
            **(headers or {}),
        }
        self._authorise(sent)
        connection = self._connection()
        exchange = Exchange(self, connection, is_reused=connection.sock is not None)
        with exchange.guarded():
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
        return exchange

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Take back a connection whose answer was read to the end."""
        with self._lock:
            if connection.sock is not None and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def away(self, error: Exception, is_reused: bool) -> ArchiveError:
        """What a failure of the network means, on a connection that was used before or a new one."""
        if is_reused and isinstance(error, BrokenPipeError | ConnectionResetError):
            return StaleConnection(f"{self._shown}: the connection was closed")
        if isinstance(error, ssl.SSLCertVerificationError):
            return ArchivePermanentError(
                f"{self._shown}: its certificate is not valid: {one_line(error.verify_message)}"
            )
        if isinstance(error, TimeoutError):
            return ArchiveUnavailable(f"{self._shown}: nothing was heard for {self._timeout:g} s")
        if isinstance(error, OSError):
            return ArchiveUnavailable(
                f"{self._shown}: {one_line(error.strerror or type(error).__name__)}"
            )
        return ArchiveUnavailable(
            f"{self._shown}: the answer was cut off or is not HTTP ({type(error).__name__})"
        )

    def close(self) -> None:
        """Close the connections that no one uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = None
                if self._idle:
                    connection = self._idle.pop()
            if connection is None:
                return self._connect()
            if connection.sock is not None and not _is_readable(connection):
                return connection
            connection.close()  # the server has closed it

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._base.hostname or "", self._base.port
        if self._tls is None:
            return http.client.HTTPConnection(
                host, port, timeout=self._timeout, blocksize=SLICE_BYTES
            )
        proxy = urllib.request.getproxies().get("https")
        if not proxy or urllib.request.proxy_bypass(host):
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._tls)
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = http.client.HTTPSConnection(
            way.hostname or "", way.port or 3128, timeout=self._timeout, context=self._tls
        )
        headers = {}
        if way.username:
            pair = f"{unquote(way.username)}:{unquote(way.password or '')}"
            headers["Proxy-Authorization"] = "Basic " + base64.b64encode(
                pair.encode("utf-8")
            ).decode("ascii")
        connection.set_tunnel(host, port or 443, headers)
        return connection


@dataclass
class Exchange:
    """One request on its way, on a connection of its own until its answer was read."""

    client: BucketClient
    connection: http.client.HTTPConnection
    is_reused: bool

    def __post_init__(self) -> None:
        self._response: http.client.HTTPResponse | None = None
        self._is_early = False  # the answer came before the body was sent

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turns failures of the network into ArchiveError, and closes the connection after any."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            self.abandon()
            raise self.client.away(error, self.is_reused and self._response is None) from None
        except BaseException:
            self.abandon()
            raise

    def send(self, piece: bytes | memoryview) -> None:
        """Send a piece of the body. A server that answers early is heard in `finish`."""
        view = memoryview(piece)
        with self.guarded():
            for start in range(0, len(view), SLICE_BYTES):
                if not self._is_early:
                    self._send(view[start : start + SLICE_BYTES])

    def _send(self, piece: memoryview) -> None:
        try:
            self.connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            with suppress(OSError, http.client.HTTPException):
                self._response = self.connection.getresponse()
            if self._response is None:
                raise
            self._is_early = True

    @property
    def was_answered(self) -> bool:
        """Whether the server has answered before the body's end."""
        return self._is_early

    def response(self) -> http.client.HTTPResponse:
        """The answer's head, when the body was sent."""
        if self._response is None:
            with self.guarded():
                self._response = self.connection.getresponse()
        return self._response

    def finish(self) -> BucketAnswer:
        """The whole answer, when the body was sent."""
        response = self.response()
        with self.guarded():
            body = response.read(LARGEST_ANSWER_BYTES)
            if response.length:  # read(n) does not say that the connection ended too early
                raise http.client.IncompleteRead(body, response.length)
        self.release(response)
        return BucketAnswer(response.status, response.headers, body)

    def release(self, response: http.client.HTTPResponse) -> None:
        """The answer was read to its end: the connection can serve another request."""
        if self._is_early or response.will_close:
            self.abandon()
        else:
            self.client.keep(self.connection)

    def abandon(self) -> None:
        """Cut the connection; what the server has not heard by now, it never will."""
        self.connection.close()

    def pieces(
        self, response: http.client.HTTPResponse, piece_bytes: int
    ) -> Generator[bytes, None, None]:
        """The answer's body. Raises ArchiveUnavailable when it is cut off."""
        done, wanted = 0, response.length
        whole = False
        try:
            with self.guarded():
                while piece := response.read(piece_bytes):
                    done += len(piece)
                    yield piece
                if wanted is not None and done != wanted:
                    raise http.client.IncompleteRead(b"", wanted - done)
            whole = True
        finally:
            if whole:
                self.release(response)
            else:  # the reader has enough, or the network has failed
                self.abandon()


def _is_readable(connection: http.client.HTTPConnection) -> bool:
    """An idle connection with something to read was closed by the server."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
