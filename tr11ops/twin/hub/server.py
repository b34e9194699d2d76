"""A hub on this machine: two listeners, one that speaks the hub's API and one that is its storage,
in threads.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msgspec.structs import replace

from tr11ops.twin.hub.routes import Answer, Api, HubRequest, Settings
from tr11ops.twin.hub.state import Commit, Fault, HubAccount, HubProblem, HubState, Repo, Window
from trainer.contract.record import Record

PIECE = 1 << 20


class Seen(Record):
    """One request, as it came. `host` is "hub" or "storage"; `status` 0: it got no answer."""

    kind: str
    method: str
    host: str
    url: str
    authorization: str | None
    agent: str
    bytes_in: int
    status: int
    range: str | None = None


class HubServer:
    """A running hub; see tests/plugins/hub_fixture.py for how tests use it."""

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tr11-hub-"))
        self.now: Callable[[], float] = time.time  # tests may replace it at any time
        self.hub = HubState(self._folder, lambda: self.now())  # noqa: PLW0108  it may be replaced
        self.settings = Settings()
        self.token = token or "hf_" + "Write" + secrets.token_hex(14)
        self.read_token = "hf_" + "Reads" + secrets.token_hex(14)
        # in the addresses of the storage: as secret as a token
        self.signature = "sig" + secrets.token_hex(16)
        self.hub.accounts[self.token] = HubAccount("bot", True, ("science",))
        self.hub.accounts[self.read_token] = HubAccount("reader", False, ("science",))
        self.api = Api(self.hub, self.settings, self.signature)
        self.requests: list[Seen] = []
        self.faults: list[Fault] = []
        self.is_down = False  # every connection is broken at once
        self.commit_limit: Window | None = Window(128, 3600, "commits")
        self.request_limit: Window | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._servers = [
            _Listener(("127.0.0.1", number), _Handler, self, host)
            for number, host in ((port, "hub"), (0, "storage"))
        ]
        self.url, self.storage_url = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )
        self.api.hub_url, self.api.storage_url = self.url, self.storage_url
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
        """End all, release what hangs, and remove the objects."""
        self._stopping.set()
        for fault in self.faults:
            fault.release()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------- what tests set
    def configure(self, **settings: int) -> None:
        """Change `Settings`: tree_page, commits_page, multipart_from, part_bytes."""
        self.settings = self.api.settings = replace(self.settings, **settings)

    def create(self, name: str, kind: str = "model", private: bool = True) -> Repo:
        return self.hub.create(kind, name, private, "bot")

    def put(
        self,
        name: str,
        path: str,
        content: bytes,
        title: str = "by hand",
        kind: str = "model",
    ) -> Commit:
        """A commit by someone else, as through the hub's web page."""
        import base64

        header = {"key": "header", "value": {"summary": title, "description": ""}}
        file = {
            "key": "file",
            "value": {
                "path": path,
                "content": base64.b64encode(content).decode(),
                "encoding": "base64",
            },
        }
        return self.hub.commit(
            self.hub.repos[kind, name],
            "main",
            [json.dumps(line).encode() for line in (header, file)],
            "somebody",
        )

    def fail(
        self,
        kind: str,
        status: int = 503,
        *,
        times: int = 1,
        after: int = 0,
        headers: Mapping[str, str] | None = None,
        text: str = "the hub is not well",
    ) -> Fault:
        return self._add(
            Fault(
                kind,
                "status",
                times=times,
                after=after,
                status=status,
                headers=dict(headers or {}),
                text=text,
            )
        )

    def break_off(self, how: str, kind: str, *, times: int = 1, after: int = 0) -> Fault:
        """A fault without an answer of its own: "reset", "lose", "hang", "lag" or "truncate"."""
        return self._add(Fault(kind, how, times, after))

    def garble(
        self,
        kind: str,
        *,
        times: int = 1,
        headers: Mapping[str, str] | None = None,
        body: str = "<html>log in to the network first</html>",
    ) -> Fault:
        return self._add(Fault(kind, "garble", times, headers=dict(headers or {}), text=body))

    def on(self, kind: str, call: Callable[[], None], *, times: int = 1) -> Fault:
        """Run `call` in the server's thread when such a request has come and before it is handled."""
        return self._add(Fault(kind, "call", times, call=call))

    def heal(self) -> None:
        """Forget all faults, and come up again."""
        with self._lock:
            for fault in self.faults:
                fault.release()
            self.faults = []
            self.is_down = False

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self.faults.append(fault)
        return fault

    # ------------------------------------------------------------------------- what tests look at
    def count(self, kind: str | None = None) -> int:
        return sum(1 for seen in list(self.requests) if kind in {None, seen.kind})

    def counts(self) -> Counter[str]:
        return Counter(seen.kind for seen in list(self.requests))

    def bytes_sent(self) -> int:
        """Bytes of large objects that were put, again and again counted."""
        return sum(
            seen.bytes_in for seen in list(self.requests) if seen.kind in {"lfs-put", "lfs-part"}
        )

    def forget_requests(self) -> None:
        self.requests = []

    def repo(self, name: str, kind: str = "model") -> Repo:
        return self.hub.repos[kind, name]

    def history(self, name: str, kind: str = "model", branch: str = "main") -> list[Commit]:
        """All commits of a branch, oldest first; the first is the hub's own."""
        return self.repo(name, kind).lineage(branch)[::-1]

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a commit with its content."""
        commit = self.repo(name).resolve(revision)
        return {path: self.hub.content(blob) for path, blob in commit.files.items()}

    def authorizations_at_storage(self) -> list[str]:
        return [
            seen.authorization
            for seen in list(self.requests)
            if seen.host == "storage" and seen.authorization
        ]

    def secrets(self) -> list[str]:
        """What may be in no output of the operation."""
        return [self.token, self.read_token, self.signature]

    # ------------------------------------------------------------------------- one request
    def fault_for(self, kind: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.meets(kind)), None)

    def see(self, seen: Seen) -> None:
        with self._lock:
            self.requests.append(seen)

    def limited(self, kind: str) -> tuple[float, dict[str, str]]:
        with self._lock:
            told: dict[str, str] = {}
            for window in (self.request_limit, self.commit_limit if kind == "commit" else None):
                if window is not None:
                    wait, told = window.take(self.now())
                    if wait > 0:
                        return wait, told
            return 0.0, told

    def wait_for(self, fault: Fault) -> None:
        while not fault.released.wait(0.05) and not self._stopping.is_set():
            pass


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
        self.owner, self.host = owner, host
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Broken(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    server: _Listener

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        owner, host = self.server.owner, self.server.host
        address = urlsplit(self.path)
        path = re.sub(r"//+", "/", address.path)
        if host == "hub":
            kind, parts = Api.kind_of(self.command, path)
        else:
            is_part = "part=" in address.query
            kind, parts = (
                {"PUT": "lfs-part" if is_part else "lfs-put"}.get(self.command, "storage-get"),
                {},
            )
        length = int(self.headers.get("Content-Length") or 0)
        status, draft = 0, None
        try:
            fault = self._begin_fault(kind)
            body = b""
            if host == "storage" and self.command == "PUT":
                draft = owner.hub.folder / f"draft-{secrets.token_hex(8)}"
                self._receive(draft, length)
            else:
                body = self._read(length)
            headers = {name.lower(): text for name, text in self.headers.items()}
            request = HubRequest(
                self.command, path, query=parse_qs(address.query), headers=headers, body=body
            )
            answer = self._answer(kind, parts, request=request, draft=draft, fault=fault)
            how = "" if fault is None else fault.how
            if how == "lose":
                raise _Broken
            if fault is not None and how == "lag":
                owner.wait_for(fault)
            if fault is not None and how == "garble":
                answer = Answer(
                    200, fault.text.encode(), {"Content-Type": "text/html", **fault.headers}
                )
            status = answer.status
            # before the answer: who has it finds the request counted
            self._remember(kind, length, status)
            self._send(answer, is_cut=how == "truncate")
        except (_Broken, ConnectionError, TimeoutError):
            if status == 0:
                self._remember(kind, length, status)
            self._break()
        finally:
            if draft is not None:
                draft.unlink(missing_ok=True)

    def _begin_fault(self, kind: str) -> Fault | None:
        """The fault that this request meets; one that breaks the connection at once does so here."""
        owner = self.server.owner
        if owner.is_down:
            raise _Broken
        fault = owner.fault_for(kind)
        if fault is None:
            return None
        if fault.how == "hang":
            owner.wait_for(fault)
        if fault.how in {"reset", "hang"}:
            raise _Broken
        if fault.call is not None:
            fault.call()
        return fault

    def _remember(self, kind: str, length: int, status: int) -> None:
        seen = Seen(
            kind,
            self.command,
            host=self.server.host,
            url=self.path,
            authorization=self.headers.get("Authorization"),
            agent=self.headers.get("User-Agent", ""),
            bytes_in=length,
            status=status,
            range=self.headers.get("Range"),
        )
        self.server.owner.see(seen)

    def _answer(
        self,
        kind: str,
        parts: dict[str, str],
        request: HubRequest,
        draft: Path | None,
        fault: Fault | None,
    ) -> Answer:
        owner = self.server.owner
        try:
            if fault is not None and fault.how == "status":
                raise HubProblem(fault.status, fault.text)
            if self.server.host == "storage":
                return owner.api.storage(request, draft)
            wait, told = owner.limited(kind)
            if wait > 0:
                text = (
                    "You have exceeded the rate limit for repository commits (128 per hour)."
                    if kind == "commit"
                    else "Too many requests"
                )
                return Answer.of({"error": text}, 429, **told)
            answer = owner.api.answer(kind, parts, request)
            return replace(answer, headers={**told, **answer.headers})
        except HubProblem as problem:
            if fault is not None and fault.how == "status":
                headers = dict(fault.headers)
            else:
                headers = {}
            headers["X-Error-Message"] = " ".join(problem.text.split())
            if problem.code:
                headers["X-Error-Code"] = problem.code
            return Answer.of({"error": problem.text, **problem.more}, problem.status, **headers)

    def _read(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise _Broken
        return body

    def _receive(self, draft: Path, length: int) -> None:
        with draft.open("wb") as stream:
            while length > 0:
                piece = self.rfile.read(min(length, PIECE))
                if not piece:
                    raise _Broken
                stream.write(piece)
                length -= len(piece)

    def _send(self, answer: Answer, is_cut: bool) -> None:
        if answer.file is not None:
            size = answer.file.stat().st_size
        else:
            size = len(answer.body)
        begin, end, status, headers = 0, size, answer.status, dict(answer.headers)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if answer.is_ranged and wanted is not None:
            begin = int(wanted[1])
            if wanted[2]:
                end = min(size, int(wanted[2]) + 1)
            else:
                end = size
            if begin >= size:
                status, begin, end = 416, 0, 0
                headers["Content-Range"] = f"bytes */{size}"
            else:
                status = 206
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_cut:
            left = (end - begin) // 2
        else:
            left = end - begin
        if answer.file is None:
            self.wfile.write(answer.body[begin : begin + left])
        else:
            with answer.file.open("rb") as stream:
                stream.seek(begin)
                while left > 0 and (piece := stream.read(min(left, PIECE))):
                    self.wfile.write(piece)
                    left -= len(piece)
        if is_cut:
            self.wfile.flush()
            raise _Broken

    def _break(self) -> None:
        """Drop the connection the hard way, so that the other side sees a reset."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
