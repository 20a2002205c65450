"""Counting before work: what is too much is refused before it is parsed, validated or tokenized, and quickly."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from chat_tokenizer import CHATML, chat_tokenizer
from each import each
from eyas.serve.api_error import ApiError
from eyas.serve.context import SHORT_BODY_BYTES
from eyas.serve.protocol.validation import MAX_VALUES, check_shape
from serve.conftest import serve

KIND = {"content-type": "application/json"}
BODY = 4 * 2**20 - 2**10
ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "input": "/v1/responses"}


def flood(before: str, unit: str, after: str, size: int = BODY) -> bytes:
    """A body of that size, full of `unit`."""
    return (before + (unit + ",") * ((size - len(before)) // (len(unit) + 1)) + unit + after).encode()


@pytest.mark.slow
@each(
    ("before", "unit", "after", "status"),
    [
        ('{"prompt": [', '"a"', "]}", 413),
        ('{"prompt": [', "[1]", "]}", 413),
        ('{"prompt": [', "[]", "]}", 413),
        ('{"prompt": [', "{}", "]}", 413),
        ('{"prompt": [', "null", "]}", 400),
        ('{"prompt": ["a", ', "1", "]}", 400),
        ('{"prompt": [[1], ', "1", "]}", 400),
        ('{"prompt": [', "1.5", "]}", 400),
        ('{"prompt": "a", "stop": [', "1", "]}", 400),
        ('{"prompt": "a", "stop_token_ids": [', "1", "]}", 400),
        ('{"prompt": "a", "allowed_token_ids": [', "null", "]}", 400),
        ('{"prompt": "a", "logit_bias": {"0": 1}, "colour": [', "1", "]}", 400),
        ('{"messages": [', "1", "]}", 400),
        ('{"messages": [', "{}", "]}", 413),
        ('{"messages": [', '{"role": "user", "content": "a"}', "]}", 413),
        ('{"messages": [{"role": "user", "content": [', "1", "]}]}", 400),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [', "1", "]}", 400),
        ('{"messages": [{"role": "user", "content": "a"}], "metadata": {"a": [', "1", "]}}", 400),
        ('{"input": [', "1", "]}", 400),
        ('{"input": "a", "include": [', "1", "]}", 400),
    ],
)
def test_floods_are_refused_quickly(client: Any, before: str, unit: str, after: str, status: int) -> None:
    path = next(path for field, path in ROUTES.items() if before.startswith(f'{{"{field}"'))
    started = time.thread_time()
    reply = client.post(path, content=flood(before, unit, after), headers=KIND)
    assert reply.status == status, reply.text[:300]
    assert len(reply.text) < 1000
    assert time.thread_time() - started < 5, "they took up to a minute, on the event loop"
    client.all_back()


@each(
    ("fields", "parts"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * 2049}, ["messages", "2049", "2048"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]}, ["content", "2048"]),
        ({"logit_bias": {str(number): 1 for number in range(4097)}}, ["logit_bias", "4097", "4096"]),
        ({"stop_token_ids": [1] * 4097}, ["stop_token_ids", "4096"]),
        ({"stop": "a" * 1025}, ["stop", "1,025", "1024"]),
        ({f"x{number}": 1 for number in range(300)}, ["the body", "256"]),
        ({"x" * 10_000: 1}, ["xxx", "leave it out"]),
        ({"model": "x" * 10_000}, ["xxx", "tiny"]),
        ({"temperature": "x" * 10_000}, ["temperature", "xxx"]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, ["tools", "129", "128"]),
    ],
)
def test_exceeded_limits_get_a_short_error(client: Any, fields: dict[str, Any], parts: list[str]) -> None:
    reply = client.chat(**fields)
    reply.assert_refused(404 if "model" in fields else 400, *parts)
    assert len(reply.text) < 1000


def test_brackets_in_strings_are_not_counted() -> None:
    text = 'He said: "[{' * 100_000 + "\\"
    check_shape(json.dumps({"prompt": text}).encode())
    check_shape(b'{"prompt": "' + b"\\n" * 10**6 + b'"}')
    check_shape(b"[" + b"1," * 10**6 + b"1]")
    check_shape(b"[]" * (MAX_VALUES // 1))
    for body in (b'""' * (MAX_VALUES + 1), b"[" * (MAX_VALUES + 1), b'\\"\\"x"' * (MAX_VALUES + 1)):
        with pytest.raises(ApiError, match="65,536"):
            check_shape(body)
    started = time.thread_time()
    check_shape(b'"' + b'\\"' * 2 * 10**6)  # a string without an end is read once
    assert time.thread_time() - started < 3


def test_answers_are_counted_before_anything_is_tokenized(new_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_server() as client:
        capacity = client.application.context.admission.capacity

        def never(*_: Any) -> Any:
            raise AssertionError("tokenized before it was counted")

        monkeypatch.setattr(type(client.application.context.request_builder), "_encode", never)
        prompts = ["a"] * (capacity + 1)
        client.complete(prompt=prompts).assert_refused(400, f"{capacity + 1} answers", str(capacity))
        client.complete(prompt=["a"] * 9, n=128).assert_refused(400, "1152 answers")
        client.complete(prompt=[[1]] * 9, n=128).assert_refused(400, "1152 answers")
        client.all_back()


def test_a_text_that_cannot_fit_is_not_tokenized(
    tiny_target: Any, tiny_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(tiny_target, tokenizer=chat_tokenizer(CHATML))  # its longest token has 12 letters
    with serve(target, tiny_drafter) as client:
        most = 12 * 256
        client.complete(prompt="a" * most).assert_refused(400, f"{most} tokens")

        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError("tokenized")

        monkeypatch.setattr(target.tokenizer, "encode", never)
        for reply in (
            client.complete(prompt="a" * (most + 1)),
            client.complete(prompt="é" * most),
            client.chat("a" * most),
            client.post("/tokenize", {"prompt": "a" * (most + 1)}),
        ):
            reply.assert_refused(400, "257 tokens at least" if "257" in reply.text else "tokens at least", "256")


def test_short_prompts_do_not_wait_for_long_ones(new_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with new_server() as client:
        builder = type(client.application.context.request_builder)
        encode: Callable[..., list[int]] = builder._encode

        def slowly(self: Any, text: str) -> list[int]:
            assert len(text) < SHORT_BODY_BYTES or go_on.wait(20)
            return encode(self, text)

        monkeypatch.setattr(builder, "_encode", slowly)

        async def main() -> tuple[Any, Any, Any]:
            long = {"prompt": "a" * (SHORT_BODY_BYTES + 1), "max_tokens": 2}
            waiting = asyncio.create_task(client.send("POST", "/v1/completions", json=long))
            await asyncio.sleep(0.05)
            short = await client.send("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            health = await client.send("GET", "/health")
            assert not waiting.done()
            go_on.set()
            return short, health, await waiting

        short, health, long = asyncio.run(main())
        assert (short.status, health.status) == (200, 200)
        long.assert_refused(400, "65,537 characters")
        client.all_back()


def test_threads_share_a_tokenizer(client: Any) -> None:
    tokenizer = client.application.context.engine_client.target.tokenizer
    texts = ["abc" * length for length in range(1, 60)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(tokenizer.encode, texts)) == expected
