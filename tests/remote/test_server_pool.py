"""Servers die, return, are busy and refuse; every request gets one answer or error."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import ClientOSError, web

from eyas.errors import UserError
from eyas.remote.address import Address
from eyas.remote.server_pool import (
    BrokenReplyError,
    RemoteServer,
    RequestFailedError,
    RequestRefusedError,
    RetryPolicy,
    ServerPool,
)

QUICK = RetryPolicy(timeout=2, patience=5, first_delay=0.01, longest_delay=0.05)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Scripted:
    """A server on its own port that can be stopped and restarted."""

    def __init__(self, answer: Callable[[Any], tuple[int, Any]], *, model: str = "m") -> None:
        self.answer, self.model = answer, model
        self.port, self.seen, self.now, self.most = 0, list[Any](), 0, 0
        self.slow, self.headers = 0.0, dict[str, str]()
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> Address:
        return Address.of(f"http://127.0.0.1:{self.port}")

    async def start(self) -> "Scripted":
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)  # 0 would wait for requests under way
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.slow)
            status, reply = self.answer(body)
        finally:
            self.now -= 1
        return web.Response(status=status, body=json.dumps(reply), headers=self.headers)


def echo(body: Any) -> tuple[int, Any]:
    return 200, {"said": body["prompt"]}


async def admit(server: RemoteServer) -> Mapping[str, Any]:
    return {"extra": server.address.url}


async def pool_of(
    stack: AsyncExitStack, *servers: Scripted, retry: RetryPolicy = QUICK, told: list[str] | None = None
) -> ServerPool:
    """Servers that have an address, started or not, in a pool."""
    said = [] if told is None else told
    pool = await stack.enter_async_context(
        ServerPool([server.address for server in servers], retry=retry, report=said.append)
    )
    for server in servers:
        stack.push_async_callback(server.stop)
    await pool.identify()
    await pool.start(admit)
    return pool


def said(reply: Any, _: RemoteServer) -> Any:
    return reply["said"]


async def ask(pool: ServerPool, *prompts: int) -> list[Any]:
    return await asyncio.gather(*(pool.post("/v1/completions", {"prompt": prompt}, said) for prompt in prompts))


def in_loop(test: Callable[[AsyncExitStack], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine function that takes an exit stack."""

    async def inside() -> None:
        async with AsyncExitStack() as stack:
            await test(stack)

    return lambda: asyncio.run(asyncio.wait_for(inside(), 60))


@in_loop
async def test_requests_go_to_the_least_busy_server_with_its_own_fields(stack: AsyncExitStack) -> None:
    servers = [await Scripted(echo).start() for _ in range(2)]
    for server in servers:
        server.slow = 0.02
    pool = await pool_of(stack, *servers)
    assert await ask(pool, *range(40)) == list(range(40))
    assert [len(server.seen) for server in servers] == [20, 20]
    for server in servers:
        assert {(body["model"], body["extra"]) for body in server.seen} == {("m", server.address.url)}


@in_loop
async def test_a_server_that_dies_costs_time_and_nothing_else(stack: AsyncExitStack) -> None:
    told: list[str] = []
    server = await Scripted(echo).start()
    server.slow = 5.0
    pool = await pool_of(stack, server, told=told)
    asked = asyncio.create_task(ask(pool, *range(50)))
    await asyncio.sleep(0.02)
    await server.stop()
    await asyncio.sleep(0.2)
    assert not asked.done()
    server.slow = 0.0
    await server.start()
    assert await asked == list(range(50))
    assert len(told) == 2
    assert "is away (no connection" in told[0]
    assert "is there again" in told[1]


@in_loop
async def test_another_server_takes_over_meanwhile_and_a_late_one_joins(stack: AsyncExitStack) -> None:
    first, late = await Scripted(echo).start(), await Scripted(echo).start()
    await late.stop()
    pool = await pool_of(stack, first, late)
    assert await ask(pool, *range(10)) == list(range(10))
    assert not late.seen
    await late.start()
    while not all(server.up for server in pool.servers):
        await asyncio.sleep(0.01)
    await first.stop()
    assert await ask(pool, *range(10)) == list(range(10))
    assert len(late.seen) == 10


@in_loop
async def test_a_server_that_comes_back_with_another_model_gets_nothing(stack: AsyncExitStack) -> None:
    told: list[str] = []
    server = await Scripted(echo).start()
    pool = await pool_of(stack, server, retry=RetryPolicy(patience=0.3, first_delay=0.01), told=told)
    await server.stop()
    server.model = "other"
    await server.start()
    server.answer = lambda body: (500, {})
    with pytest.raises(UserError, match=r"no server answered for 0.3 s \(--patience\)"):
        await ask(pool, 1)
    assert "does not serve 'm'" in told[0]


@in_loop
async def test_a_busy_server_is_retried_after_the_time_it_gives(stack: AsyncExitStack) -> None:
    server = await Scripted(echo).start()
    server.headers = {"Retry-After": "0.05"}
    left = [20]

    def busy(body: Any) -> tuple[int, Any]:
        left[0] -= 1
        return (429, {"error": {"message": "full"}}) if left[0] >= 0 else echo(body)

    server.answer = busy
    pool = await pool_of(stack, server)
    begun = asyncio.get_running_loop().time()
    assert await ask(pool, 7) == [7]
    assert len(server.seen) == 21
    assert asyncio.get_running_loop().time() - begun > 20 * 0.05


@in_loop
async def test_a_refused_request_is_sent_once_and_a_failing_one_a_limited_number_of_times(
    stack: AsyncExitStack,
) -> None:
    server = await Scripted(lambda body: (400, {"error": {"message": "prompt too long"}})).start()
    pool = await pool_of(stack, server)
    with pytest.raises(RequestRefusedError, match="400: prompt too long"):
        await ask(pool, 1)
    assert len(server.seen) == 1
    server.answer = lambda body: (500, {"error": "boom"})
    with pytest.raises(RequestFailedError, match="6 attempts failed, the last with 500: boom"):
        await ask(pool, 1)
    assert len(server.seen) == 7
    server.answer = echo

    def never(reply: Any, _: RemoteServer) -> Any:
        raise BrokenReplyError("cut off")

    with pytest.raises(RequestFailedError, match="cut off"):
        await pool.post("/v1/completions", {"prompt": 1}, never)
    server.answer = lambda body: (401, {})
    with pytest.raises(UserError, match="--api-key"):
        await ask(pool, 1)


@in_loop
async def test_a_trial_is_repeated_after_a_broken_connection(stack: AsyncExitStack) -> None:
    server = await Scripted(echo).start()
    stack.push_async_callback(server.stop)
    pool = await stack.enter_async_context(ServerPool([server.address], retry=QUICK))
    tried = []

    async def admit_the_third_time(server: RemoteServer) -> Mapping[str, Any]:
        tried.append(server)
        if len(tried) < 3:
            raise ClientOSError("reset")
        return {}

    await pool.identify()
    await pool.start(admit_the_third_time)
    assert len(tried) == 3
    assert await ask(pool, 5) == [5]


@in_loop
async def test_servers_must_be_there_and_have_one_model(stack: AsyncExitStack) -> None:
    one, other = await Scripted(echo).start(), await Scripted(echo, model="other").start()
    with pytest.raises(UserError, match=r"serves 'other' and .* 'm'"):
        await pool_of(stack, one, other)
    await one.stop()
    with pytest.raises(UserError, match=r"no server answers .*no connection"):
        await pool_of(stack, one)
    with pytest.raises(UserError, match="2 servers are given, 1 of them distinct"):
        ServerPool([Address.of("http://a/v1"), Address.of("http://a/")])
