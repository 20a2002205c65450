"""HTTPS: a certificate that serves, and those that are refused before a model is loaded."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from eyas.errors import UserError
from eyas.serve.model_info import ServerLimits
from eyas.serve.transport.server import Server, listen, url_of
from eyas.serve.transport.tls import tls_context
from serve.test_sockets import running, until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A certificate for localhost that signs itself, and its key; another one for each name."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str) -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        if not key.exists():
            words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
            extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
            subprocess.run([*words.split(), *extra], check=True, capture_output=True)
        return certificate, key

    return make


def test_a_certificate_serves_https(pair: Any, new_server: Any) -> None:
    certificate, key = pair("one")
    with new_server() as client:
        listener = listen("127.0.0.1", 0)
        server = Server(client.application, tls=tls_context(certificate, key))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            url = url_of(listener, tls=True)
            assert url.startswith("https://127.0.0.1:")
            while not server.started:
                time.sleep(0.005)
            trust = ssl.create_default_context(cafile=certificate)
            with httpx2.Client(verify=trust) as https:
                assert https.get(f"{url}/health").json() == {"status": "ok"}
                body = {"prompt": "abc", "max_tokens": 4, "stream": True}
                assert https.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx2.TransportError):
                httpx2.get(url.replace("https", "http") + "/health")
            with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
                httpx2.get(f"{url}/health")  # nobody vouches for it
        finally:
            server.handle_exit(15, None)
            thread.join(30)


def test_missing_tls_handshakes_hold_no_place(pair: Any, new_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = pair("one")
    trust = ssl.create_default_context(cafile=certificate)
    limits = ServerLimits(max_connections=5, header_seconds=0.5)
    with new_server(limits=limits) as client, running(client, tls=tls_context(certificate, key)) as server:
        there = server.server.servers[0].sockets[0].getsockname()
        url = f"https://127.0.0.1:{there[1]}/health"
        silent = [socket.create_connection(there, timeout=10) for _ in range(12)]
        assert httpx2.get(url, verify=trust).status_code == 200
        for connection in silent:
            with connection, suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        until(lambda: server.server._limiter.open == 0)
        with socket.create_connection(there, timeout=10) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            with suppress(ConnectionResetError):
                while plain.recv(100):
                    pass
        with trust.wrap_socket(socket.create_connection(there, timeout=10), server_hostname="127.0.0.1") as slow:
            slow.sendall(b"GET /hea")
            assert slow.recv(12) == b"HTTP/1.1 408"
        with trust.wrap_socket(socket.create_connection(there, timeout=10), server_hostname="127.0.0.1") as large:
            large.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
            assert large.recv(12) == b"HTTP/1.1 413"
        until(lambda: server.server._limiter.open == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_files_there_is_no_tls() -> None:
    assert tls_context(None, None) is None


def test_a_key_may_lie_in_the_certificates_file(pair: Any, tmp_path: Path) -> None:
    certificate, key = pair("one")
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    assert isinstance(tls_context(both, None), ssl.SSLContext)


def test_wrong_files_are_refused_by_name(pair: Any, tmp_path: Path) -> None:
    certificate, key = pair("one")
    other = pair("two")[1]
    text = tmp_path / "notes.txt"
    text.write_text("no certificate")
    locked = tmp_path / "locked.key"
    lock = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    for files, parts in {
        (None, key): ["--ssl-certfile"],
        (tmp_path / "none.pem", key): ["--ssl-certfile", "none.pem", "No such file"],
        (certificate, tmp_path): ["--ssl-keyfile", str(tmp_path)],
        (certificate, other): [str(other), "not that of the certificate"],
        (certificate, None): [str(certificate), "private key"],
        (text, key): [str(text), "no PEM certificate"],
        (certificate, locked): [str(locked), "encrypted", "openssl pkey"],
    }.items():
        with pytest.raises(UserError) as refused:
            tls_context(*files)
        for part in parts:
            assert part in str(refused.value), refused.value
