"""Over raw sockets: clients that leave, wait, trickle, never read or speak no HTTP. None of them hurts the others."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from each import each
from eyas.errors import UserError
from eyas.serve.model_info import ServerLimits
from eyas.serve.monitoring.json_logging import LIMIT_LINES, LIMIT_SECONDS, JsonFormatter, RateLimitedHandler, log_event
from eyas.serve.transport import connection_limiter, http_protocol
from eyas.serve.transport.connection_limiter import client_network, connection_cap
from eyas.serve.transport.server import Listener
from serve.conftest import serve
from serve.test_sockets import LONG, Running, running, slow_down, until

if TYPE_CHECKING:
    from eyas.target.model import Target

JSON_POST = "HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEALTH = "GET /health HTTP/1.1\r\nhost: x\r\n"
OK, BAD, CLOSED = "HTTP/1.1 200", "HTTP/1.1 400", ""
STRICT = ServerLimits(header_seconds=0.4, body_bytes=2000)

Begin = Callable[..., Any]


@pytest.fixture
def begin(target: Target) -> Begin:
    """Begin a server on a socket, with limits of its own."""

    @contextmanager
    def begin(**limits: Any) -> Iterator[Running]:
        with serve(target, None, limits=ServerLimits(**limits)) as client, running(client) as server:
            yield server

    return begin


@pytest.fixture(scope="module")
def strict(target: Target) -> Iterator[Running]:
    with serve(target, None, limits=STRICT) as client, running(client) as server:
        yield server


@contextmanager
def connected(server: Running, sent: bytes | str = b"", *, address: str = "127.0.0.1") -> Iterator[socket.socket]:
    there = server.server.servers[0].sockets[0].getsockname()
    with socket.create_connection(there, timeout=10, source_address=(address, 0)) as connection:
        connection.sendall(sent.encode() if isinstance(sent, str) else sent)
        yield connection


def rest_of(connection: socket.socket) -> str:
    """Everything until the server closes; it must do so in order, without a reset."""
    return b"".join(iter(lambda: connection.recv(2**16), b"")).decode()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def count_of(server: Running, code: str) -> float:
    counter = server.client.application.context.metrics.connections_refused
    return float(counter.labels(code)._value.get())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/drafter", "/tokenize"])
def test_a_disconnect_during_the_body_is_no_bug(begin: Begin, caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.INFO), begin() as server:
        with connected(server, f'POST {path} {JSON_POST}content-length: 100\r\n\r\n{{"model'):
            pass
        until(lambda: any(record.message == "request" for record in caplog.records))
        (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert (line["path"], line["outcome"], line.get("status")) == (path, "disconnected", None)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        told = httpx2.get(f"{server.url}/metrics").text
        assert f'eyas_requests_total{{endpoint="{path}",outcome="disconnected"}} 1.0' in told
        server.client.all_back()


CHUNKED = f"{JSON_POST}transfer-encoding: chunked\r\n\r\n"
ODDITIES: dict[str, tuple[str | bytes, str, str | None]] = {
    # What is sent, how the answer begins, and the code it is refused with, if it is.
    "HTTP/0.9": ("GET /\r\n\r\n", BAD, "bad_http"),
    "HTTP/1.0": ("GET /health HTTP/1.0\r\n\r\n", OK, None),
    "the preface of HTTP/2": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1 505", "http_version"),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100, BAD, "bad_http"),
    "all bytes": (bytes(range(256)) * 100, BAD, "bad_http"),
    "blank lines": ("\r\n\r\n\r\n", BAD, "bad_http"),
    "a websocket": (f"{HEALTH}upgrade: websocket\r\nconnection: upgrade, close\r\n\r\n", OK, None),
    "an upgrade to HTTP/2": (f"{HEALTH}upgrade: h2c\r\nconnection: upgrade, close\r\n\r\n", OK, None),
    "a tunnel": ("CONNECT x:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "HTTP/1.1 404", None),
    "an odd method": ("BREW /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "HTTP/1.1 405", None),
    "a long method": (f"{'A' * 20000} / HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 431", "head_too_large"),
    "a long query": (f"GET /health?{'a' * 20000} HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP/1.1 431", "head_too_large"),
    "a long header": (f"{HEALTH}a: {'b' * 20000}\r\n\r\n", "HTTP/1.1 431", "head_too_large"),
    "a header without end": (f"{HEALTH}a: {'b' * 40000}", "HTTP/1.1 431", "head_too_large"),
    "many headers": (HEALTH + "a: b\r\n" * 100 + "\r\n", "HTTP/1.1 431", "head_too_large"),
    "a NUL": ("GET /\0 HTTP/1.1\r\nhost: x\r\n\r\n", BAD, "bad_http"),
    "a NUL in disguise": ("GET /v1/models/%00 HTTP/1.1\r\nhost: x\r\n\r\n", BAD, "bad_path"),
    "no host": ("GET /health HTTP/1.1\r\n\r\n", BAD, "bad_http"),
    "a space before a colon": ("GET /health HTTP/1.1\r\nhost : x\r\n\r\n", BAD, "bad_http"),
    "a folded header": (f"{HEALTH}connection:\r\n close\r\n\r\n", OK, None),
    "both lengths": (
        f"POST /v1/completions {JSON_POST}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        BAD,
        "bad_framing",
    ),
    "chunks in HTTP/1.0": ("POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", BAD, "bad_framing"),
    "another encoding": (f"POST / {JSON_POST}transfer-encoding: gzip, chunked\r\n\r\n", "HTTP/1.1 501", "bad_http"),
    "two lengths": (f"POST / {JSON_POST}content-length: 4\r\ncontent-length: 5\r\n\r\nabcd", BAD, "bad_http"),
    "a negative length": (f"POST / {JSON_POST}content-length: -4\r\n\r\nabcd", BAD, "bad_http"),
    "an endless length": (f"POST / {JSON_POST}content-length: {'9' * 30}\r\n\r\nabcd", BAD, "bad_http"),
    "too long a body": (
        f"POST /v1/completions {JSON_POST}content-length: 2001\r\n\r\n",
        "HTTP/1.1 413",
        "too_large",
    ),
    "too long a body, half sent": (
        f"POST /v1/drafter {JSON_POST}content-length: 9000000\r\n\r\n{'a' * 1000000}",
        "HTTP/1.1 413",
        "too_large",
    ),
    "too long a body, announced": (
        f"POST /v1/completions {JSON_POST}content-length: 2001\r\nexpect: 100-continue\r\n\r\n",
        "HTTP/1.1 413",
        "too_large",
    ),
    "too long a body in chunks": (f"POST /v1/completions {CHUNKED}900\r\n{'a' * 0x900}\r\n", "HTTP/1.1 413", None),
    "a bad chunk": (f"POST /v1/completions {CHUNKED}zz\r\nabc\r\n", BAD, None),
    "a bad chunk for the drafter": (f"POST /v1/drafter {CHUNKED}zz\r\nabc\r\n", BAD, None),
    "a bad chunk that nobody reads": (f"GET /health {CHUNKED}zz\r\nabc\r\n", OK, None),
    "a chunk with more in it": (f"POST /v1/completions {CHUNKED}1\r\nabc\r\n", BAD, None),
    "chunks of a byte": (f"POST /v1/completions {CHUNKED}" + "1\r\na\r\n" * 110, BAD, None),
    "junk behind a request": (f"{HEALTH}\r\n\0\0junk", OK, "bad_http"),
    "a body that nobody reads": (f"{HEALTH}content-length: 100\r\n\r\nabc", OK, None),
}


@each("name", ODDITIES)
def test_invalid_http_gets_a_response_and_a_log_line(
    strict: Running, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    sent, begins, code = ODDITIES[name]
    before = code and count_of(strict, code)
    with caplog.at_level(logging.INFO), connected(strict) as connection:
        connection.sendall(sent.encode() if isinstance(sent, str) else sent)
        told = rest_of(connection)
    assert told.startswith(begins), told
    if not told.startswith(OK):
        error = json.loads(told.partition("\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
    lines = [record.fields for record in caplog.records if record.message == "connection_refused"]  # type: ignore[attr-defined]
    assert [line["code"] for line in lines] == ([code] if code else [])
    if code:
        assert count_of(strict, code) == before + 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert httpx2.get(f"{strict.url}/health").status_code == 200


def test_equal_lengths_and_pipelines_are_answered(strict: Running) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2})
    twice = f"content-length: {len(body)}\r\n" * 2
    last = f"{HEALTH}connection: close\r\n\r\n"
    with connected(strict, f"{HEALTH}\r\nPOST /v1/completions {JSON_POST}{twice}\r\n{body}{last}") as connection:
        assert rest_of(connection).count(OK) == 3


def test_expect_100_continue_is_answered(strict: Running) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    head = f"POST /v1/completions {JSON_POST}content-length: {len(body)}\r\nexpect: 100-continue\r\n"
    with connected(strict, f"{head}connection: close\r\n\r\n") as connection:
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert rest_of(connection).startswith(OK)


def test_a_silent_client_is_closed_and_a_slow_one_gets_408(strict: Running) -> None:
    silent, slow = count_of(strict, "silent"), count_of(strict, "header_timeout")
    started = time.monotonic()
    with connected(strict) as one, connected(strict, "GET /hea") as other:
        assert rest_of(one) == CLOSED
        assert rest_of(other).startswith("HTTP/1.1 408")
    assert 0.3 < time.monotonic() - started < 5
    assert (count_of(strict, "silent"), count_of(strict, "header_timeout")) == (silent + 1, slow + 1)


@each("before", ["", f"{HEALTH}\r\n"])
def test_trickling_does_not_extend_the_head_deadline(strict: Running, before: str) -> None:
    with connected(strict, before) as connection:
        if before:
            until(lambda: connection.recv(2**16).endswith(b"}"))
        started = time.monotonic()
        while not has_answer(connection):
            connection.sendall(b"G")
            time.sleep(0.05)
            assert time.monotonic() - started < 5
        assert rest_of(connection).startswith("HTTP/1.1 408")


def has_answer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
        return True
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(10)


def test_an_idle_connection_is_closed(begin: Begin) -> None:
    with begin() as server:
        server.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]  # uvicorn wants whole seconds
        with connected(server, f"{HEALTH}\r\n") as connection:
            assert rest_of(connection).startswith(OK)


def test_trickling_does_not_extend_the_body_deadline(begin: Begin) -> None:
    with begin(body_seconds=0.4) as server, connected(server) as connection:
        connection.sendall(f"POST /v1/completions {JSON_POST}content-length: 1000\r\n\r\n".encode())
        while not has_answer(connection):
            connection.sendall(b" ")
            time.sleep(0.05)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 408")


@contextmanager
def unread(server: Running, sent: bytes) -> Iterator[socket.socket]:
    """A client that sends and never reads, with small buffers on both sides, so that the server must wait."""
    (listening,) = server.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets have it too
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(listening.getsockname())
        connection.settimeout(10)
        connection.sendall(sent)
        yield connection


def test_a_client_that_does_not_read_is_closed(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "ERROR_SEND_SECONDS", 0.1)
    request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
    with begin(request_seconds=0.5) as server, unread(server, request * 100):
        until(lambda: bool(server.server.server_state.connections))
        (protocol,) = server.server.server_state.connections
        until(lambda: protocol.flow.write_paused)
        size = len(httpx2.get(f"{server.url}/openapi.json").content)
        assert protocol.transport.get_write_buffer_size() < 2 * (size + 2**16)
        until(lambda: not server.server.server_state.connections, 5)
        assert count_of(server, "unread") == 1


def test_a_stream_that_is_not_read_ends_with_its_request(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eyas.serve.transport.connection.ERROR_SEND_SECONDS", 0.1)
    body = json.dumps({**LONG, "stream": True, "logprobs": 20, "n": 4}).encode()
    head = f"POST /v1/completions {JSON_POST}content-length: {len(body)}\r\n\r\n".encode()
    with caplog.at_level(logging.INFO), begin(request_seconds=2) as server:
        with unread(server, head + body):
            until(lambda: any(record.message == "request" for record in caplog.records))
            until(lambda: not server.server.server_state.connections)
        (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert (line["status"], line["outcome"]) == (200, "timeout")
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        until(lambda: not server.client.engine.busy)
        server.client.all_back()


def test_silent_clients_are_evicted_for_new_ones(begin: Begin) -> None:
    with begin(max_connections=10) as server, ExitStack() as stack:
        quiet = stack.enter_context(connected(server, address="127.0.0.2"))  # the oldest, but not of the many
        silent = [stack.enter_context(connected(server)) for _ in range(30)]
        until(lambda: count_of(server, "evicted") == 21)
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert [is_open(connection) for connection in silent] == [False] * 22 + [True] * 8
        assert is_open(quiet)


def test_a_slow_body_is_evicted_and_a_running_answer_is_not(begin: Begin) -> None:
    with begin(max_connections=2) as server, ExitStack() as stack:
        slow_down(server.client, 0.02)
        body = json.dumps({**LONG, "max_tokens": 80, "stream": True})
        post = f"POST /v1/completions {JSON_POST}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        answered = stack.enter_context(connected(server, post + body))
        until(lambda: server.client.application.context.admission.in_flight == 1)
        slow = stack.enter_context(connected(server, post + body[:5]))
        until(lambda: server.server._limiter.open == 2)
        time.sleep(0.05)
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert not is_open(slow)
        assert rest_of(answered).endswith("[DONE]\n\n\r\n0\r\n\r\n")


def test_at_the_cap_only_probes_are_answered(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin(max_connections=1) as server, ExitStack() as stack:
        slow_down(server.client, 0.02)
        body = json.dumps({**LONG, "max_tokens": 80, "stream": True})
        post = f"POST /v1/completions {JSON_POST}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}"
        answered = stack.enter_context(connected(server, post))
        until(lambda: server.client.application.context.admission.in_flight == 1)
        assert httpx2.get(f"{server.url}/health").status_code == 200
        refused = httpx2.get(f"{server.url}/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        monkeypatch.setattr(connection_limiter, "RESERVED_PLACES", 0)
        with connected(server, post) as connection:
            told = rest_of(connection)
        assert told.startswith("HTTP/1.1 503")
        assert "too_many_connections" in told
        assert rest_of(answered).endswith("[DONE]\n\n\r\n0\r\n\r\n")
        assert httpx2.get(f"{server.url}/v1/models").status_code == 200


def test_a_lack_of_file_descriptors_pauses_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    class WithoutFiles(socket.socket):
        def accept(self) -> Any:
            attempts.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        with WithoutFiles() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            listener = Listener(listening, lambda *_: None)
            with socket.create_connection(listening.getsockname()):
                await asyncio.sleep(0.3)
                listener.close()

    asyncio.run(main())
    assert len(attempts) == 1
    assert "Too many open files" in caplog.text


def test_the_cap_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limiter.resource, "getrlimit", lambda _: (500, 500))
    assert 100 < connection_cap(None) < 500 - 64
    assert connection_cap(50) == 50
    with pytest.raises(UserError, match=r"open files is 500.*--max-connections 1000.*ulimit -n 1\d\d\d"):
        connection_cap(1000)
    monkeypatch.setattr(connection_limiter.resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(UserError, match="open files is 64, which leaves 0 connections"):
        connection_cap(None)


def test_addresses_of_one_client_count_as_one() -> None:
    assert client_network("192.0.2.1") == "192.0.2.1"
    assert client_network("2001:db8:1:2:3::4") == client_network("2001:db8:1:2::9") == "2001:db8:1:2::"
    assert client_network("::ffff:192.0.2.1") == "192.0.2.1"
    assert client_network("fe80::1%eth0") == "fe80::"


def test_floods_of_messages_are_rate_limited() -> None:
    stream = io.StringIO()
    handler = RateLimitedHandler(stream)
    handler.setFormatter(JsonFormatter())

    def log(name: str, message: str, after: float) -> None:
        record = logging.LogRecord(name, logging.ERROR, "", 0, message, None, None)
        record.created = after
        handler.handle(record)

    for index in range(100):
        log("asyncio", f"socket.accept() out of system resource\nsocket: {index}", after=0.01 * index)
        log("eyas.serve.endpoints.completions", "always written", after=0.01 * index)
    log("eyas.serve.endpoints.completions", "later", after=LIMIT_SECONDS + 1)
    log("asyncio", "another", after=LIMIT_SECONDS + 2)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == LIMIT_LINES + 100 + 3
    assert lines[0]["message"] == "socket.accept() out of system resource"
    assert [lines[-3][key] for key in ("event", "logger", "lines")] == ["suppressed", "asyncio", 100 - LIMIT_LINES]
    assert [line["message"] for line in lines[-2:]] == ["later", "another"]


def test_refusals_are_limited_by_kind_and_requests_are_not() -> None:
    stream = io.StringIO()
    handler = RateLimitedHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("eyas.serve.transport.http_protocol")
    logger.addHandler(handler)
    for _ in range(50):
        log_event(logger, "connection_refused", limited_by="bad_http", code="bad_http")
        log_event(logger, "request", status=200)
    log_event(logger, "connection_refused", limited_by="silent", code="silent")
    handler.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("code") for line in lines].count("bad_http") == LIMIT_LINES + 1
    assert [line["event"] for line in lines].count("request") == 50
    assert lines[-2]["code"] == "silent"
    assert (lines[-1]["event"], lines[-1]["lines"]) == ("suppressed", 50 - LIMIT_LINES)
