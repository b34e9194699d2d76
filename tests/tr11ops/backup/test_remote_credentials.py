"""Who we are for a bucket, and who it is: which credentials are taken and what is said when they will not do; https,
its certificates, and the proxy of a site.
"""

from __future__ import annotations

import base64
import datetime
import http.server
import ipaddress
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.bucket_cases import begin, send
from tests.tr11ops.backup.fault_proxy import Fault, FaultProxy
from tr11ops.backup.base import Archive
from tr11ops.backup.remote import open_remote
from tr11ops.base.errors import ArchiveError, ArchivePermanentError, ArchiveUnavailable

TOKEN = "ya29.planted-access-token"
KEY_ID = "planted-key-id-0123456789"


@contextmanager
def token_server(status: int, answer: dict[str, Any]) -> Iterator[str]:
    """Gives out tokens, as Google's does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def private_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(key: rsa.RSAPrivateKey) -> str:
    kind = serialization.PrivateFormat.PKCS8
    return key.private_bytes(
        serialization.Encoding.PEM, kind, serialization.NoEncryption()
    ).decode()


@pytest.fixture
def account(tmp_path: Path, private_key: rsa.RSAPrivateKey) -> Callable[[str], Path]:
    """Writes the key file of a service account whose tokens come from an address."""

    def write(token_uri: str) -> Path:
        path = tmp_path / "account.json"
        path.write_text(
            json.dumps(
                {
                    "type": "service_account",
                    "client_email": "copies@example.iam.gserviceaccount.com",
                    "private_key_id": KEY_ID,
                    "private_key": pem(private_key),
                    "token_uri": token_uri,
                },
                indent=1,
            )
        )
        path.chmod(0o600)
        return path

    return write


def opened(store: ObjectStore, path: Path | None, **changes: Any) -> Archive:
    options = {name: value for name, value in store.options.items() if name != "token"}
    return open_remote(store.url, options | changes, path)


def shows_no_secret(text: str, key: rsa.RSAPrivateKey) -> None:
    body = [line for line in pem(key).splitlines() if not line.startswith("-")]
    assert not any(secret in text for secret in (TOKEN, "ya29", KEY_ID, "BEGIN", *body))
    assert "\n" not in text


def test_the_account_s_token_goes_with_each_request(
    object_store: ObjectStore, account: Callable[[str], Path]
) -> None:
    with token_server(
        200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
    ) as uri:
        archive = opened(object_store, account(uri))
        archive.put("x", b"1")
        assert b"".join(archive.read("x")) == b"1"
    assert {headers.get("authorization") for _, _, headers in object_store.faults.seen} == {
        f"Bearer {TOKEN}"
    }
    assert all(
        "token" not in target and "ya29" not in target for _, target, _ in object_store.faults.seen
    )


@pytest.mark.parametrize(("status", "text"), [(401, "are not accepted"), (403, "may not do this")])
def test_a_refusal_names_the_file_and_shows_nothing_of_it(
    object_store: ObjectStore,
    account: Callable[[str], Path],
    private_key: rsa.RSAPrivateKey,
    status: int,
    text: str,
) -> None:
    object_store.faults.plant(
        Fault("answer", status=status, message=f"no: Bearer {TOKEN} token={TOKEN} {TOKEN}")
    )
    with token_server(
        200, {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
    ) as uri:
        path = account(uri)
        with pytest.raises(ArchivePermanentError, match=text) as caught:
            opened(object_store, path).look("x")
    assert f"the credentials in {path}" in str(caught.value)
    shows_no_secret(str(caught.value), private_key)


def test_a_key_that_was_withdrawn(
    object_store: ObjectStore, account: Callable[[str], Path], private_key: rsa.RSAPrivateKey
) -> None:
    answer = {"error": "invalid_grant", "error_description": f"Invalid JWT {KEY_ID} {TOKEN}"}
    with (
        token_server(400, answer) as uri,
        pytest.raises(ArchivePermanentError, match="are not accepted") as caught,
    ):
        opened(object_store, account(uri)).look("x")
    shows_no_secret(str(caught.value), private_key)
    assert object_store.faults.seen == [], "nothing is asked without a token"


def test_no_token_server_may_be_another_time(
    object_store: ObjectStore, account: Callable[[str], Path]
) -> None:
    with pytest.raises(ArchiveUnavailable, match="gives out tokens does not answer"):
        opened(object_store, account("http://127.0.0.1:1/token")).look("x")


def test_tokens_are_not_sent_in_the_clear(
    object_store: ObjectStore, account: Callable[[str], Path]
) -> None:
    with pytest.raises(ArchivePermanentError, match="without https"):
        opened(
            object_store, account("http://127.0.0.1:1/token"), endpoint_url="http://192.0.2.1:80"
        )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", "{}", '{"type": "service_account"}', '{"type": "x"}', "\0\xff"]
)
def test_a_file_that_is_no_key(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ArchivePermanentError, match=r"backup.credentials_file = .*key.json: "):
        open_remote("gs://bucket/x", {}, path)


def test_a_file_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(ArchivePermanentError, match="chmod o-rwx"):
        open_remote("gs://bucket/x", {}, path)
    path.chmod(0o640)  # the one of the group who is on call runs the next round
    with pytest.raises(ArchivePermanentError, match="holds no key of an account"):
        open_remote("gs://bucket/x", {}, path)
    with pytest.raises(ArchivePermanentError, match="No such file"):
        open_remote("gs://bucket/x", {}, tmp_path / "none.json")


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(
        ArchivePermanentError, match=r"no credentials were found; set backup.credentials_file"
    ):
        open_remote("gs://bucket/x", {})


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("gs://user:hunter2@bucket/x", {}, "credentials belong into"),
        ("gs://bucket/x?token=hunter2", {}, "credentials belong into"),
        ("gs://bucket/x#hunter2", {}, "credentials belong into"),
        ("gs:///x", {}, "names no bucket"),
        ("bucket", {}, "is not a URL"),
        ("gs://bucket", {"token": "hunter2"}, "must be anon"),
        ("nosuch://bucket", {}, "nothing is known of nosuch://"),
        ("s3://bucket", {}, "pip install s3fs"),
        ("abfs://bucket", {}, "pip install adlfs"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_line(
    url: str, options: dict[str, str | int | float | bool], text: str
) -> None:
    with pytest.raises(ArchivePermanentError) as caught:
        open_remote(url, options)
    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_odd_option_is_named(object_store: ObjectStore) -> None:
    with pytest.raises(ArchiveError, match=r"backup.options"):
        open_remote(object_store.url, {**object_store.options, "access": "nonsense"})


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key and a certificate for 127.0.0.1 that it signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - day).not_valid_after(now + day).add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path / "both.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, kind, plain)
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def secure(object_store: ObjectStore, certificate: Path) -> Iterator[FaultProxy]:
    """The object store over https."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    proxy = FaultProxy(object_store.server, context)
    yield proxy
    proxy.close()


def test_a_certificate_that_no_one_vouches_for(
    object_store: ObjectStore, secure: FaultProxy
) -> None:
    with pytest.raises(
        ArchivePermanentError, match="its certificate is not valid: self-signed certificate"
    ):
        object_store.open(endpoint_url=secure.url).look("x")


def test_files_go_and_come_over_https(
    object_store: ObjectStore,
    secure: FaultProxy,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    archive = object_store.open(endpoint_url=secure.url)
    content = bytes(range(256)) * 4000
    begin(archive, "x", len(content), content[:600_000])
    assert send(archive, "x", content) == 512 << 10
    assert b"".join(archive.read("x")) == content


class Tunnel(socketserver.ThreadingTCPServer):
    """A site's proxy for https. `asked` are the heads of the requests that it got."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: tuple[str, int]) -> None:
        self.asked: list[str] = []
        tunnel = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += self.request.recv(1)
                tunnel.asked.append(head.decode())
                with socket.create_connection(target) as far:
                    self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    back = threading.Thread(target=_pass_on, args=(far, self.request), daemon=True)
                    back.start()
                    _pass_on(self.request, far)
                    back.join(5)

        super().__init__(("127.0.0.1", 0), Handler)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()


def test_a_proxy_is_used_and_its_password_not_shown(
    object_store: ObjectStore,
    secure: FaultProxy,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "")
    port = int(secure.url.rpartition(":")[2])
    with Tunnel(("127.0.0.1", port)) as tunnel:
        thread = threading.Thread(target=tunnel.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv(
            "https_proxy", f"http://me:hunt%40er2@127.0.0.1:{tunnel.server_address[1]}"
        )
        archive = object_store.open(endpoint_url=secure.url)
        archive.put("x", b"12345")
        assert b"".join(archive.read("x")) == b"12345"
        archive.close()
        tunnel.shutdown()
        thread.join()
    assert tunnel.asked[0].startswith(f"CONNECT 127.0.0.1:{port} ")
    assert f"Basic {base64.b64encode(b'me:hunt@er2').decode()}" in tunnel.asked[0]
    with pytest.raises(ArchiveUnavailable) as caught:
        object_store.open(endpoint_url=secure.url).look("x")
    assert "hunt" not in str(caught.value)
