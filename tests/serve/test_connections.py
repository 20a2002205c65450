"""Over raw sockets: clients that leave, wait, trickle, never read or speak no HTTP. None of them hurts the others."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from serve.test_sockets import Running, running, until

JSON_POST = "host: x\r\ncontent-type: application/json\r\n"


@contextmanager
def connected(server: Running, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(server.server.servers[0].sockets[0].getsockname(), timeout=10) as connection:
        connection.sendall(sent)
        yield connection


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/drafter", "/tokenize"])
def test_a_client_that_leaves_while_it_sends_is_no_bug(
    new_server: Any, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.INFO), new_server() as client, running(client) as server:
        with connected(server, f'POST {path} HTTP/1.1\r\n{JSON_POST}content-length: 100\r\n\r\n{{"model'.encode()):
            pass
        until(lambda: any(record.message == "request" for record in caplog.records))
        (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert (line["path"], line["outcome"], line.get("status")) == (path, "disconnected", None)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        told = httpx2.get(f"{server.url}/metrics").text
        assert f'eyas_requests_total{{endpoint="{path}",outcome="disconnected"}} 1.0' in told
        client.all_back()
