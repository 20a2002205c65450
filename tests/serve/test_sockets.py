"""Over a real socket: OpenAI's own client, clients that leave, and the end of the server."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest

from eyas.errors import UserError
from eyas.serve.model_info import ServerLimits
from eyas.serve.transport.server import Server, listen, url_of

LONG = {"prompt": "abcabc", "max_tokens": 240, "temperature": 0, "ignore_eos": True}


class Running:
    """A server in a thread of this process."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        listener = listen("127.0.0.1", 0)
        self.url = url_of(listener)
        self.server = Server(client.application, **options)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()
        until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.handle_exit(15, None)


@contextmanager
def running(client: Any, **options: Any) -> Iterator[Running]:
    server = Running(client, **options)
    try:
        yield server
    finally:
        server.stop()
        server.thread.join(30)
        assert not server.thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def slow_down(client: Any, seconds: float) -> None:
    """Make steps long enough for something to happen meanwhile."""
    step = client.engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    client.engine.step = slowly


@pytest.fixture(scope="module")
def socketed(client: Any) -> Iterator[openai.OpenAI]:
    with running(client) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client.application.context.admission.draining = False  # other tests ask the same application


def test_the_openai_client_lists_models(socketed: openai.OpenAI) -> None:
    assert [model.id for model in socketed.models.list()] == ["tiny"]
    assert socketed.models.retrieve("tiny").owned_by == "eyas"


def test_the_openai_client_chats_whole_and_streamed(socketed: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 3}
    whole = socketed.chat.completions.create(**ask, logprobs=True, top_logprobs=2, n=2)  # type: ignore[call-overload]
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = socketed.chat.completions.create(  # type: ignore[call-overload]
        **ask, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.speculative["passes"] > 0


def test_the_openai_client_completes_and_says_how_to_draft(socketed: openai.OpenAI) -> None:
    texts = set()
    for speculative in ({"mode": "off"}, {"mode": "fixed", "depth": 3}, {"mode": "auto", "details": True}):
        reply = socketed.completions.create(
            model="tiny", prompt=["abc", "xyz"], temperature=0, extra_body={"speculative": speculative}
        )
        texts.add(tuple(choice.text for choice in reply.choices))
    assert len(texts) == 1


def test_the_openai_client_understands_refusals(socketed: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template of tiny does not mention tools"):
        socketed.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            tools=[{"type": "function", "function": {"name": "look"}}],
        )
    with pytest.raises(openai.NotFoundError, match="not served here"):
        socketed.completions.create(model="other", prompt="abc")


def test_the_openai_client_understands_a_stream_that_fails(new_server: Any) -> None:
    with new_server() as client, running(client) as server:
        step, left = client.engine.step, [5]

        def fail_later() -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("boom")
            return step()

        client.engine.step = fail_later
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = asking.completions.create(model="tiny", **LONG_BY_OPENAI, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed while answering"):
            list(stream)
        assert asking.completions.create(model="tiny", prompt="abcabc", temperature=0).choices[0].text


LONG_BY_OPENAI: dict[str, Any] = {"prompt": "abcabc", "max_tokens": 200, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(new_server: Any, stream: bool) -> None:
    with new_server() as client, running(client) as server:
        slow_down(client, 0.02)
        body = json.dumps({**LONG, "n": 3, "stream": stream}).encode()
        with socket.create_connection(server.server.servers[0].sockets[0].getsockname()) as connection:
            head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
            connection.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body)
            until(lambda: client.engine.block_manager.used > 0)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: client.application.context.admission.in_flight == 0)
        until(lambda: not client.engine.busy)
        client.all_back()
        told = httpx2.get(f"{server.url}/metrics").text
        assert 'eyas_requests_total{endpoint="/v1/completions",outcome="disconnected"} 1.0' in told


def test_a_server_that_stops_lets_answers_come_to_their_end(new_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="eyas.serve"), new_server() as client:
        expected = client.complete(**LONG).json["choices"][0]["text"]
        with running(client) as server:
            slow_down(client, 0.005)
            texts: list[str] = []

            def ask() -> None:
                with httpx2.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as reply:
                    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
                assert lines[-1] == "[DONE]"
                texts.append("".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]))

            asking = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asking:
                thread.start()
            until(lambda: client.application.context.admission.in_flight == 3)
            server.stop()
            until(lambda: client.application.context.admission.draining)
            with pytest.raises(httpx2.TransportError):
                httpx2.post(f"{server.url}/v1/completions", json=LONG)
            for thread in asking:
                thread.join(30)
            server.thread.join(30)
        assert texts == [expected] * 3
        assert "stopping: 3 answers under way have 30 s" in caplog.messages
        client.all_back()


def test_a_server_that_must_stop_cuts_answers_off_with_an_error(new_server: Any) -> None:
    with new_server(limits=ServerLimits(drain_seconds=0.1)) as client, running(client) as server:
        slow_down(client, 0.05)
        with httpx2.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.stop()
            rest = [line for line in lines if line]
        assert "shutting_down" in rest[-1]
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1 port {port} .*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(UserError, match="nowhere"):
        listen("nowhere.invalid", 80)
