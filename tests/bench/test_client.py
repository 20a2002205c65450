"""The client keeps connections alive, and servers may close them."""

import asyncio

import pytest

from eyas.bench.client import Client, ServerGoneError
from eyas.bench.stream import StreamedAnswer
from eyas.remote.address import Address

EVENTS = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


class OneAnswer:
    """Answers the first request of a connection and closes it at the second; or, if silent, closes it at once."""

    def __init__(self, *, silent: bool = False) -> None:
        self.silent, self.asked = silent, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            self.asked += 1
            (length,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            if not self.silent:
                writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS)
                await writer.drain()
                await reader.read(1)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()


async def ask(server: OneAnswer, times: int) -> list[StreamedAnswer]:
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        async with Client(Address.of(f"http://{host}:{port}"), timeout=5) as client:
            return [
                await client.ask("/v1/chat/completions", {}, key=str(number), category="", turn=0)
                for number in range(times)
            ]


def test_a_connection_closed_after_an_answer_is_reopened() -> None:
    server = OneAnswer()
    answers = asyncio.run(ask(server, 4))
    assert [answer.error for answer in answers] == [None] * 4
    assert server.asked == 4


def test_a_server_that_never_answers_is_asked_twice() -> None:
    server = OneAnswer(silent=True)
    (answer,) = asyncio.run(ask(server, 1))
    assert answer.error is not None
    assert "the connection broke" in answer.error
    assert server.asked == 2


def test_a_server_that_is_gone_raises() -> None:
    async def gone() -> None:
        async with Client(Address.of("http://127.0.0.1:9"), timeout=5) as client:
            await client.ask("/v1/completions", {}, key="", category="", turn=0)

    with pytest.raises(ServerGoneError):
        asyncio.run(gone())
