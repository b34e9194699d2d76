"""HTTP, as far as all who speak it agree: which failures may pass, how much is read, and one plain
request.

Files go to a bucket over `tr11ops.backup.remote_http` (bodies pushed piece by piece), commits to
the hub over its own library. One question needs neither: the standard library is loaded in half the
time of httpx2, 0.07 s against 0.15.
"""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.parse import urlsplit

from tr11ops.base.errors import NetworkError
from trainer.contract.record import Record

LARGEST_ANSWER_BYTES = 64 << 20
_PASSING = frozenset({408, 425, 429})


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
        if origin(newurl)[0] not in {"http", "https"}:  # the library would ask an FTP server
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token and origin(req.full_url) == origin(newurl):
            following.add_unredirected_header("Authorization", token)
        return following
