"""The bucket edge over https: certificates are checked, and a proxy of the site is gone through."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.bucket_cases import begin, send
from tests.tr11ops.backup.fault_proxy import FaultProxy
from tr11ops.base.errors import ArchivePermanentError, ArchiveUnavailable


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
