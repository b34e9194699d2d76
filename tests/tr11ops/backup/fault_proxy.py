"""A proxy in front of the object-store server: it does harm where it is told to, and repairs one
fault of the server.

The server publishes an unfinished upload when it is asked how much of it has arrived (its issue
1149). Google's answers 308 and changes nothing; so does the proxy.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec.structs import replace

from trainer.contract.record import Record

Kind = Literal[
    "answer",
    "deaf",
    "foreign",
    "truncate",
    "stall",
    "corrupt",
    "corrupt-sent",
    "hang",
    "reset",
    "lose-answer",
    "cut-sent",
]


class Fault(Record):
    """What is done to requests of a method whose target contains a text: after `skip` of them, to
    `times` of them.

    answer: `status` instead of the server's, with `body` where one is given; deaf: the same, and
    the request's body is not read; foreign: the server hears the request, and `body` with `headers`
    is its answer; truncate: the answer ends after `at` bytes; stall: nothing comes after them;
    corrupt: its byte `at` is changed; corrupt-sent: that of the request; hang: no answer; reset:
    the connection is cut; lose-answer: the server hears the request, no one its answer; cut-sent:
    cut after `at` bytes.
    """

    kind: Kind
    method: str = ""
    text: str = ""
    status: int = 503
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    message: str = "planted"
    at: int = 0
    times: int = 1
    skip: int = 0
    body: bytes | None = None

    def fits(self, method: str, target: str) -> bool:
        return self.method in ("", method) and self.text in target


@dataclass
class Session:
    """One upload session as it went by: bytes that the server has, and its answer to the last of
    them.
    """

    held: int = 0
    last: tuple[int, bytes] | None = None


class FaultProxy:
    """The proxy, on a port of its own, with `tls` over https. `seen` are method, target and headers
    of each request.
    """

    def __init__(self, server: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.server = server
        self.seen: list[tuple[str, str, Mapping[str, str]]] = []
        self.sessions: dict[str, Session] = {}
        self.lock = threading.Lock()
        self.release = threading.Event()
        self._faults: list[Fault] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._http.server_address[1]}"

    def plant(self, *faults: Fault) -> None:
        with self.lock:
            self._faults.extend(faults)

    def clear(self) -> None:
        """As new: no faults, nothing remembered; hanging requests are let go."""
        with self.lock:
            self._faults.clear()
            self.seen.clear()
            self.sessions.clear()
        self.release.set()
        self.release = threading.Event()

    def fault_of(self, method: str, target: str) -> Fault | None:
        """The fault that a request meets; it is used up by that."""
        with self.lock:
            for place, fault in enumerate(self._faults):
                if fault.fits(method, target):
                    if fault.skip:
                        self._faults[place] = replace(fault, skip=fault.skip - 1)
                        return None
                    if fault.times > 1:
                        self._faults[place] = replace(fault, times=fault.times - 1)
                    else:
                        del self._faults[place]
                    return fault
        return None

    def close(self) -> None:
        self.clear()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed, or a connection that we cut: nothing to say."""


class _Cut(Exception):
    """The connection is cut here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        try:
            self._pass_on(self.owner.fault_of(self.command, self.path))
        except _Cut:
            with suppress(OSError):
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.connection.shutdown(socket.SHUT_RD)
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _pass_on(self, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        with self.owner.lock:
            self.owner.seen.append((self.command, self.path, dict(self.headers)))
        if fault is not None and kind == "deaf":
            self._say(fault.status, fault.headers, _error(fault))
            raise _Cut
        if fault is not None and kind == "cut-sent":
            self.rfile.read(min(fault.at, int(self.headers.get("Content-Length", 0))))
            raise _Cut
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length or kind == "reset":
            raise _Cut
        if kind == "hang":
            self.owner.release.wait(30)
            raise _Cut
        if fault is not None and kind == "answer":
            self._say(fault.status, fault.headers, _error(fault))
            return
        if fault is not None and kind == "corrupt-sent":
            body = _changed(body, fault.at)
        status, headers, answer = self._asked(body) or self._ask(body)
        if kind == "lose-answer":
            raise _Cut
        if fault is not None and kind == "foreign":
            self._say(
                status, {**headers, **fault.headers}, answer if fault.body is None else fault.body
            )
            return
        if fault is not None and kind == "corrupt":
            answer = _changed(answer, fault.at)
        if fault is not None and kind in {"truncate", "stall"}:
            self._say(status, {**headers, "Content-Length": str(len(answer))}, answer[: fault.at])
            if kind == "stall":
                self.owner.release.wait(30)
            self.close_connection = True
            return
        self._say(status, headers, answer)

    def _asked(self, body: bytes) -> tuple[int, dict[str, str], bytes] | None:
        """The answer to: how much of this upload has arrived?"""
        if self.command != "PUT" or not re.fullmatch(
            r"bytes \*/(\d+|\*)", self.headers.get("Content-Range", "")
        ):
            return None
        with self.owner.lock:
            session = self.owner.sessions.get(_upload_id(self.path))
        if session is None or body:
            return None
        if session.last is not None:
            return session.last[0], {}, session.last[1]
        return 308, {"Range": f"bytes=0-{session.held - 1}"} if session.held else {}, b""

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(*self.owner.server, timeout=60)
        sent = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        self.upstream.request(self.command, self.path, body, sent)
        response = self.upstream.getresponse()
        answer = response.read()
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
        self._note(response.status, headers, answer)
        return response.status, headers, answer

    def _note(self, status: int, headers: Mapping[str, str], answer: bytes) -> None:
        """Remember how far an upload is."""
        with self.owner.lock:
            if self.command == "POST" and "Location" in headers:
                self.owner.sessions[_upload_id(headers["Location"])] = Session()
            session = self.owner.sessions.get(_upload_id(self.path))
            if session is not None and self.command == "PUT":
                if status == 308:
                    session.held = int(headers["Range"].rpartition("-")[2]) + 1
                elif status == 200:
                    session.last = status, answer
            if self.command == "DELETE":
                self.owner.sessions.pop(_upload_id(self.path), None)

    def _say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


_HOP = {"connection", "content-length", "transfer-encoding", "date"}


def _upload_id(target: str) -> str:
    return parse_qs(urlsplit(target).query).get("upload_id", [""])[0]


def _changed(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]


def _error(fault: Fault) -> bytes:
    if fault.body is not None:
        return fault.body
    return json.dumps({"error": {"code": fault.status, "message": fault.message}}).encode()
