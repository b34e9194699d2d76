"""What all who speak HTTP agree on, and the one plain request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tr11ops.alerts.url_route import ping
from tr11ops.backup.remote_http import error_of_status
from tr11ops.base.errors import (
    ArchiveError,
    ArchiveUnavailable,
    HubError,
    HubUnavailable,
    NetworkError,
)
from tr11ops.base.http import get, may_pass
from tr11ops.hub.remote_log import ask


@contextmanager
def serving(
    status: int, headers: dict[str, str], body: bytes = b""
) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer; its address, and the authorizations that it was shown."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(status if self.path == "/" else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "status", [400, 401, 404, 408, 409, 410, 412, 425, 429, 500, 502, 503, 504, 599]
)
def test_hub_and_bucket_try_the_same_answers_again(status: int) -> None:
    with serving(status, {}) as (address, _), pytest.raises(HubError) as caught:
        ask(address, None, lambda stream, status, headers: stream.read())
    of_bucket: ArchiveError = error_of_status(status, "gs://b", "ana")
    assert (
        isinstance(caught.value, HubUnavailable)
        is isinstance(of_bucket, ArchiveUnavailable)
        is may_pass(status)
    )


def test_the_token_follows_to_the_same_place_alone() -> None:
    with serving(200, {}) as (other, seen_there):
        for target, authorizations in (
            ("/there", ["Bearer hf_x", "Bearer hf_x"]),
            (f"{other}x", ["Bearer hf_x"]),
        ):
            with (
                serving(302, {"Location": target}) as (address, seen),
                get(address, token="hf_x") as answer,
            ):
                assert answer.status == 200 and seen == authorizations
        assert seen_there == [""]


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_a_redirect_leads_to_the_web_alone(target: str) -> None:
    with serving(302, {"Location": target}) as (address, seen), get(address) as answer:
        assert answer.status == 302 and len(seen) == 1


def test_an_answer_that_is_cut_is_no_answer() -> None:
    with (
        serving(200, {"Content-Length": "100"}, b"x") as (address, _),
        pytest.raises(NetworkError, match="IncompleteRead"),
        get(address) as answer,
    ):
        answer.stream.read()


def test_no_server_is_no_answer_and_names_no_address(tmp_path: Path) -> None:
    with serving(200, {}) as (address, _):
        pass
    with pytest.raises(NetworkError, match=r"^Connection refused$"), get(f"{address}?key=secret"):
        raise AssertionError("nothing answers there")
    secret = tmp_path / "url"
    secret.write_text(f"{address}?key=secret\n")
    secret.chmod(0o600)
    assert ping(secret).endswith(": Connection refused") and "secret" not in ping(secret)


@pytest.mark.parametrize(
    ("status", "words"), [(200, ""), (404, "the service answered 404"), (503, "answered 503")]
)
def test_the_call_that_says_someone_looks(tmp_path: Path, status: int, words: str) -> None:
    secret = tmp_path / "url"
    with serving(status, {}) as (address, _):
        secret.write_text(f"{address}\n")
        secret.chmod(0o600)
        assert (words in ping(secret)) if words else ping(secret) == ""
