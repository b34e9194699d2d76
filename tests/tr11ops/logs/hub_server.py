"""A small hub on loopback: files, range requests, a redirect to another port as to a CDN, and
failures on order.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Hub:
    """What the server gives, and what it was asked. `failures`: statuses (and Retry-After) of the
    next answers.

    `content` is the file at `path`; `files` are more of them, at one commit, which the repository's
    facts list.
    """

    content: bytes = b""
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = "c0ffee0" + 33 * "1"
    changed: str = "2022-05-01T12:00:00.000Z"
    facts_asked: int = 0
    path: str = "/big/logs/resolve/main/logs/main/main_log.txt"
    redirect: str = ""
    redirects: dict[str, str] = field(default_factory=dict)
    knows_ranges: bool = True
    cut_next: bool = False
    failures: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)  # Range, Authorization
    sent: int = 0
    url: str = ""


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            hub.asked.append((wanted, self.headers.get("Authorization", "")))
            if hub.failures:
                status, wait = hub.failures.pop(0)
                self._answer(status, b"no", {"Retry-After": wait} if wait else {})
            elif self.path in hub.redirects:
                self._answer(307, b"", {"Location": hub.redirects[self.path]})
            elif hub.redirect:
                self._answer(302, b"", {"Location": hub.redirect})
            elif self.path == "/api/models/big/logs" and hub.files:
                self._facts()
            elif (content := self._content(self.path.split("?")[0])) is None:
                self._answer(404, b"Entry not found")
            elif not hub.knows_ranges:
                self._answer(200, content)
            else:
                self._range(content, wanted)

        def _content(self, path: str) -> bytes | None:
            if path == hub.path and not hub.files:
                return hub.content
            return hub.files.get(path.removeprefix(f"/big/logs/resolve/{hub.commit}/"))

        def _facts(self) -> None:
            hub.facts_asked += 1
            tag = f'"{hub.commit}"'
            if self.headers.get("If-None-Match") == tag:
                self._answer(304, b"")
                return
            names = [{"rfilename": name} for name in hub.files]
            facts = {"sha": hub.commit, "lastModified": hub.changed, "siblings": names}
            self._answer(200, json.dumps(facts).encode(), {"ETag": tag})

        def _range(self, content: bytes, wanted: str) -> None:
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            assert match is not None, wanted
            first, last, size = int(match[1]), int(match[2]), len(content)
            if first >= size:
                self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            body = content[first : last + 1]
            self._answer(
                206, body, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{size}"}
            )

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if hub.cut_next and status == 206 and len(body) > 1:
                hub.cut_next, body = False, body[: len(body) // 2]
                self.close_connection = True
            hub.sent += len(body)
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of loopback, until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
