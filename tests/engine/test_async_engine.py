"""Many callers of one engine: each has its own stream, and leaving a stream leaves nothing behind."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

import pytest

from eyas.engine.async_engine import AsyncEngine, EngineError
from eyas.engine.output import OutputDelta
from eyas.engine.request import FinishReason, Request
from eyas.errors import UserError
from eyas.sampling import Sampling


class FakeEngine:
    """Gives request k the tokens k, k, ..., one per step, and records cancellations."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.steps = 0
        self.broken = False

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def submit(self, request: Request) -> int:
        if request.max_new_tokens > 1000:
            raise UserError("too long")
        key = self.steps * 100 + len(self.left)
        self.left[key] = request.max_new_tokens
        return key

    def cancel(self, key: int) -> bool:
        self.cancelled.append(key)
        return self.left.pop(key, None) is not None

    def step(self) -> list[OutputDelta]:
        self.steps += 1
        time.sleep(0.0005)
        if self.broken:
            raise ValueError("out of luck")
        deltas = []
        for key in list(self.left):
            self.left[key] -= 1
            finished = None if self.left[key] else FinishReason.LENGTH
            deltas.append(OutputDelta(key=key, tokens=(key,), texts=("x",), depths=(0,), finished=finished))
            if finished:
                del self.left[key]
        return deltas


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    return run


def request(tokens: int) -> Request:
    return Request(prompt=(1,), sampling=Sampling(), max_new_tokens=tokens)


def streaming(fake: FakeEngine) -> AsyncEngine:
    engine: Any = fake
    return AsyncEngine(engine)


async def collect(engine: AsyncEngine, tokens: int) -> Sequence[OutputDelta]:
    return [delta async for delta in engine.stream(request(tokens))]


@in_loop
async def test_every_caller_gets_its_own_deltas_to_the_end() -> None:
    with streaming(FakeEngine()) as engine:
        streams = await asyncio.gather(*(collect(engine, 5 + i) for i in range(8)))
    for i, deltas in enumerate(streams):
        assert len(deltas) == 5 + i
        assert len({delta.key for delta in deltas}) == 1
        assert deltas[-1].finished is FinishReason.LENGTH


@in_loop
async def test_deltas_that_came_while_the_loop_was_busy_are_batched_in_order() -> None:
    fake = FakeEngine()
    with streaming(fake) as engine:
        batches = engine.batches(request(40))
        together = [await anext(batches)]
        while fake.busy:  # block the event loop
            time.sleep(0.001)
        together += [deltas async for deltas in batches]
    assert sum(map(len, together)) == 40
    assert len(together) <= 3
    assert [delta.finished for deltas in together for delta in deltas].index(FinishReason.LENGTH) == 39


@in_loop
async def test_deltas_of_steps_before_a_failed_one_are_still_delivered() -> None:
    fake, delivered = FakeEngine(), 0
    with streaming(fake) as engine:
        try:
            async for deltas in engine.batches(request(1000)):
                delivered += len(deltas)
                while fake.steps < 5:
                    time.sleep(0.001)
                fake.broken = True
                while engine.failure is None:
                    time.sleep(0.001)
        except EngineError:
            pass
        else:
            pytest.fail("a failed engine ends its streams with an error")
    assert delivered >= 4
    assert delivered == fake.steps - 1  # only the last step failed


@in_loop
async def test_leaving_a_stream_cancels_its_request() -> None:
    fake = FakeEngine()
    with streaming(fake) as engine:
        stream = engine.stream(request(1000))
        first = await anext(stream)
        await stream.aclose()
        while fake.busy:
            await asyncio.sleep(0.001)
        assert fake.cancelled == [first.key]
        assert len(await collect(engine, 3)) == 3


@in_loop
async def test_a_task_that_is_cancelled_before_its_first_delta_leaves_nothing() -> None:
    fake = FakeEngine()
    with streaming(fake) as engine:
        task = asyncio.create_task(collect(engine, 900))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while fake.busy:
            await asyncio.sleep(0.001)
        assert len(await collect(engine, 2)) == 2


@in_loop
async def test_a_refused_request_affects_its_caller_only() -> None:
    with streaming(FakeEngine()) as engine:
        good = asyncio.create_task(collect(engine, 50))
        with pytest.raises(UserError, match="too long"):
            await collect(engine, 2000)
        assert len(await good) == 50


@in_loop
async def test_a_failing_step_ends_all_streams_with_its_reason_and_refuses_later_ones() -> None:
    fake = FakeEngine()
    with streaming(fake) as engine:
        tasks = [asyncio.create_task(collect(engine, 900)) for _ in range(3)]
        await asyncio.sleep(0.01)
        fake.broken = True
        for task in tasks:
            with pytest.raises(RuntimeError, match="out of luck"):
                await task
        assert not fake.busy
        with pytest.raises(RuntimeError, match="serves no more"):
            await collect(engine, 1)


@in_loop
async def test_closing_ends_open_streams_and_refuses_new_ones() -> None:
    engine = streaming(FakeEngine())
    task = asyncio.create_task(collect(engine, 1000))
    await asyncio.sleep(0.005)
    await asyncio.to_thread(engine.close)
    with pytest.raises(RuntimeError, match="closed"):
        await task
    with pytest.raises(RuntimeError, match="closed"):
        await collect(engine, 1)


def mended(fake: FakeEngine, lost: Sequence[int] | None, successor: FakeEngine | None = None) -> AsyncEngine:
    """An engine whose owner repairs it after a failed step."""

    def mend(_engine: Any, _error: BaseException) -> Any:
        fake.broken = False
        for key in [*fake.left] if lost is None else lost:
            fake.cancel(key)
        return successor or fake, lost

    engine: Any = fake
    return AsyncEngine(engine, mend=mend)


@in_loop
async def test_a_mended_engine_loses_some_requests_and_goes_on_with_the_others() -> None:
    fake = FakeEngine()
    with mended(fake, lost=[0]) as engine:
        tasks = [asyncio.create_task(collect(engine, 300)) for _ in range(2)]
        await asyncio.sleep(0.01)
        fake.broken = True
        with pytest.raises(EngineError, match="out of luck"):
            await tasks[0]
        assert len(await tasks[1]) == 300
        assert len(await collect(engine, 3)) == 3


@in_loop
async def test_deltas_of_an_earlier_step_are_delivered_after_mending() -> None:
    fake = FakeEngine()
    delta = OutputDelta(key=0, tokens=(0,), texts=("x",), depths=(0,), finished=FinishReason.LENGTH)

    def fail_before_delivery() -> list[OutputDelta]:
        fake.left.clear()
        fake.step = lambda: [delta]  # type: ignore[method-assign]
        raise ValueError("out of luck")

    fake.step = fail_before_delivery  # type: ignore[method-assign]
    with mended(fake, lost=[]) as engine:
        assert await asyncio.wait_for(collect(engine, 5), 5) == [delta]


@in_loop
async def test_leaving_a_stream_of_a_replaced_engine_cancels_no_other_request() -> None:
    fake, successor = FakeEngine(), FakeEngine()
    with mended(fake, None, successor) as engine:
        stream = engine.stream(request(900))
        first = await anext(stream)
        fake.broken = True
        while engine.engine is not successor:  # type: ignore[comparison-overlap]
            await asyncio.sleep(0.001)
        successor.steps = 0
        other = asyncio.create_task(collect(engine, 30))
        await asyncio.sleep(0.002)
        await stream.aclose()
        deltas = await other
        assert len(deltas) == 30
        assert deltas[0].key == first.key


@in_loop
async def test_the_engine_can_be_inspected_between_steps() -> None:
    with streaming(FakeEngine()) as engine:
        assert await engine.between_steps(lambda seen: seen.busy) is False
        with pytest.raises(ZeroDivisionError):
            await engine.between_steps(lambda seen: 1 // 0)
        assert len(await collect(engine, 2)) == 2
