"""A hub on this machine: two listeners, one that speaks the hub's API and one that is its storage,
in threads.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msgspec.structs import replace

from tr11ops.twin.hub.routes import Api, HubRequest, HubResponse
from tr11ops.twin.hub.state import HubAccount, HubProblem, HubState, Repo

PIECE = 1 << 20


class HubServer:
    """A running hub. Its accounts: `token` (bot, who writes) and `read_token` (reader); both are of science."""

    def __init__(
        self,
        port: int = 0,
        token: str | None = None,
        api: type[Api] = Api,
        handler: type[HubHandler] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tr11-hub-"))
        self.now: Callable[[], float] = time.time  # may be replaced at any time
        self.hub = HubState(self._folder, lambda: self.now())  # noqa: PLW0108  it may be replaced
        self.token = token or "hf_" + "Write" + secrets.token_hex(14)
        self.read_token = "hf_" + "Reads" + secrets.token_hex(14)
        self.signature = "sig" + secrets.token_hex(16)
        self.hub.accounts[self.token] = HubAccount("bot", True, ("science",))
        self.hub.accounts[self.read_token] = HubAccount("reader", False, ("science",))
        self.api = api(self.hub, self.signature)
        self._servers = [
            _Listener(("127.0.0.1", number), handler or HubHandler, self, host)
            for number, host in ((port, "hub"), (0, "storage"))
        ]
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )
        self.api.hub_url = self.url
        self.api.storage_url = self.storage_url
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all, and remove the objects."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def create(self, name: str, kind: str = "model", private: bool = True) -> Repo:
        return self.hub.create(kind, name, private, "bot")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        owner: HubServer,
        host: str,
    ) -> None:
        self.owner = owner
        self.host = host
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Broken(Exception):
    """The connection is to be broken off, without another word."""


class HubHandler(BaseHTTPRequestHandler):
    """One connection to either listener."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    server: _Listener

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path = re.sub(r"//+", "/", address.path)
        kind, parts = Api.kind_of(self.command, path)
        headers = {name.lower(): text for name, text in self.headers.items()}
        request = HubRequest(
            self.command, path, query=parse_qs(address.query), headers=headers, parts=parts
        )
        draft = self.server.owner.hub.folder / f"draft-{secrets.token_hex(8)}"
        try:
            self.serve(kind, request, draft)
        except (Broken, ConnectionError, TimeoutError):
            self._break()
        finally:
            draft.unlink(missing_ok=True)

    do_HEAD = do_POST = do_PUT = do_GET

    def serve(self, kind: str, request: HubRequest, draft: Path) -> None:
        """Take the rest of the request, a large object's content into `draft`, and answer it."""
        length = int(self.headers.get("Content-Length") or 0)
        if self.server.host == "storage" and self.command == "PUT":
            self._receive(draft, length)
        else:
            request = replace(request, body=self._read(length))
        try:
            answer = self.answer(kind, request, draft)
        except HubProblem as problem:
            answer = problem_answer(problem)
        self.send_answer(answer)

    def answer(self, kind: str, request: HubRequest, draft: Path) -> HubResponse:
        """Raises HubProblem for a refusal."""
        if self.server.host == "storage":
            return self.server.owner.api.storage(request, draft)
        return self.server.owner.api.answer(kind, request)

    def _read(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise Broken
        return body

    def _receive(self, draft: Path, length: int) -> None:
        with draft.open("wb") as stream:
            while length > 0:
                piece = self.rfile.read(min(length, PIECE))
                if not piece:
                    raise Broken
                stream.write(piece)
                length -= len(piece)

    def send_answer(self, answer: HubResponse) -> None:
        if answer.file is not None:
            size = answer.file.stat().st_size
        else:
            size = len(answer.body)
        begin = 0
        end = size
        status = answer.status
        headers = dict(answer.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if answer.is_ranged and wanted is not None:
            begin = int(wanted[1])
            if wanted[2]:
                end = min(size, int(wanted[2]) + 1)
            if begin >= size:
                status = 416
                begin = 0
                end = 0
                headers["Content-Range"] = f"bytes */{size}"
            else:
                status = 206
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command != "HEAD":
            self.send_content(answer, begin, end - begin)

    def send_content(self, answer: HubResponse, begin: int, left: int) -> None:
        """So many bytes of the answer's content."""
        if answer.file is None:
            self.wfile.write(answer.body[begin : begin + left])
            return
        with answer.file.open("rb") as stream:
            stream.seek(begin)
            while left > 0 and (piece := stream.read(min(left, PIECE))):
                self.wfile.write(piece)
                left -= len(piece)

    def _break(self) -> None:
        """Drop the connection the hard way, so that the other side sees a reset."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def problem_answer(problem: HubProblem) -> HubResponse:
    """The answer that tells of a refusal."""
    headers = {"X-Error-Message": " ".join(problem.text.split())}
    if problem.code:
        headers["X-Error-Code"] = problem.code
    return HubResponse.of({"error": problem.text, **problem.more}, problem.status, **headers)
