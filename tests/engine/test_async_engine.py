"""Many callers of one engine: each stream is its own, and leaving one leaves nothing behind."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from eyas.engine.async_engine import AsyncEngine, EngineError
from eyas.engine.output import OutputDelta
from eyas.engine.request import FinishReason, Request
from eyas.errors import UserError
from eyas.sampling import Sampling


class FakeEngine:
    """Gives request k the tokens k, k, ... one a step, and remembers what was asked of it."""

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
        pieces = []
        for key in list(self.left):
            self.left[key] -= 1
            ended = self.left[key] == 0
            finished = FinishReason.LENGTH if ended else None
            pieces.append(OutputDelta(key=key, tokens=(key,), texts=("x",), depths=(0,), finished=finished))
            if ended:
                del self.left[key]
        return pieces


def request(tokens: int) -> Request:
    return Request(prompt=(1,), sampling=Sampling(), max_new_tokens=tokens)


def streaming(fake: FakeEngine) -> AsyncEngine:
    engine: Any = fake
    return AsyncEngine(engine)


async def collect(engine: AsyncEngine, tokens: int) -> Sequence[OutputDelta]:
    return [piece async for piece in engine.stream(request(tokens))]


def test_every_caller_gets_its_own_pieces_to_the_end() -> None:
    async def main() -> list[Sequence[OutputDelta]]:
        with streaming(FakeEngine()) as engine:
            return await asyncio.gather(*(collect(engine, 5 + i) for i in range(8)))

    for i, pieces in enumerate(asyncio.run(main())):
        assert len(pieces) == 5 + i
        assert len({piece.key for piece in pieces}) == 1
        assert pieces[-1].finished is FinishReason.LENGTH


def test_what_steps_gave_while_nobody_looked_comes_together_and_in_order() -> None:
    fake = FakeEngine()

    async def main() -> list[list[OutputDelta]]:
        with streaming(fake) as engine:
            batches = engine.batches(request(40))
            together = [await anext(batches)]
            while fake.busy:  # the loop does not run meanwhile, as if it wrote to others
                time.sleep(0.001)
            return [*together, *[deltas async for deltas in batches]]

    together = asyncio.run(main())
    assert sum(map(len, together)) == 40
    assert len(together) <= 3
    assert [delta.finished for deltas in together for delta in deltas].index(FinishReason.LENGTH) == 39


def test_pieces_of_steps_before_one_that_failed_are_still_told() -> None:
    fake = FakeEngine()

    async def main() -> int:
        told = 0
        with streaming(fake) as engine:
            try:
                async for deltas in engine.batches(request(1000)):
                    told += len(deltas)
                    while fake.steps < 5:
                        time.sleep(0.001)
                    fake.broken = True
                    while engine.failure is None:
                        time.sleep(0.001)
            except EngineError:
                return told
        raise AssertionError("a failed engine ends its streams")

    told = asyncio.run(main())
    assert told >= 4
    assert told == fake.steps - 1  # only the last step failed


def test_leaving_a_stream_cancels_its_request() -> None:
    fake = FakeEngine()

    async def main() -> None:
        with streaming(fake) as engine:
            stream = engine.stream(request(1000))
            first = await anext(stream)
            await stream.aclose()
            while fake.busy:
                await asyncio.sleep(0.001)
            assert fake.cancelled == [first.key]
            assert len(await collect(engine, 3)) == 3

    asyncio.run(main())


def test_a_task_that_is_cancelled_before_its_first_piece_leaves_nothing() -> None:
    fake = FakeEngine()

    async def main() -> None:
        with streaming(fake) as engine:
            task = asyncio.create_task(collect(engine, 900))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while fake.busy:
                await asyncio.sleep(0.001)
            assert len(await collect(engine, 2)) == 2

    asyncio.run(main())


def test_a_refused_request_is_its_callers_affair_alone() -> None:
    async def main() -> None:
        with streaming(FakeEngine()) as engine:
            good = asyncio.create_task(collect(engine, 50))
            with pytest.raises(UserError, match="too long"):
                await collect(engine, 2000)
            assert len(await good) == 50

    asyncio.run(main())


def test_a_failing_step_ends_all_streams_with_its_reason_and_refuses_later_ones() -> None:
    fake = FakeEngine()

    async def main() -> None:
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

    asyncio.run(main())


def test_closing_ends_open_streams_and_refuses_new_ones() -> None:
    async def main() -> None:
        engine = streaming(FakeEngine())
        task = asyncio.create_task(collect(engine, 1000))
        await asyncio.sleep(0.005)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RuntimeError, match="closed"):
            await task
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, 1)

    asyncio.run(main())


def mended(fake: FakeEngine, lost: Sequence[int] | None, successor: FakeEngine | None = None) -> AsyncEngine:
    """An engine whose owner knows what to do about a failing step."""

    def mend(_engine: Any, _error: BaseException) -> Any:
        fake.broken = False
        for key in [*fake.left] if lost is None else lost:
            fake.cancel(key)
        return successor or fake, lost

    engine: Any = fake
    return AsyncEngine(engine, mend=mend)


def test_a_mended_engine_loses_some_requests_and_goes_on_with_the_others() -> None:
    fake = FakeEngine()

    async def main() -> None:
        with mended(fake, lost=[0]) as engine:
            tasks = [asyncio.create_task(collect(engine, 300)) for _ in range(2)]
            await asyncio.sleep(0.01)
            fake.broken = True
            with pytest.raises(EngineError, match="out of luck"):
                await tasks[0]
            assert len(await tasks[1]) == 300
            assert len(await collect(engine, 3)) == 3

    asyncio.run(main())


def test_what_an_earlier_step_gave_is_told_after_mending() -> None:
    fake = FakeEngine()
    told = OutputDelta(key=0, tokens=(0,), texts=("x",), depths=(0,), finished=FinishReason.LENGTH)

    def fail_with_a_piece_untold() -> list[OutputDelta]:
        fake.left.clear()
        fake.step = lambda: [told]  # type: ignore[method-assign]
        raise ValueError("out of luck")

    fake.step = fail_with_a_piece_untold  # type: ignore[method-assign]

    async def main() -> None:
        with mended(fake, lost=[]) as engine:
            assert await asyncio.wait_for(collect(engine, 5), 5) == [told]

    asyncio.run(main())


def test_leaving_a_stream_of_a_replaced_engine_cancels_nobody_else() -> None:
    fake, successor = FakeEngine(), FakeEngine()

    async def main() -> None:
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
            pieces = await other
            assert len(pieces) == 30
            assert pieces[0].key == first.key

    asyncio.run(main())


def test_one_may_look_at_the_engine_between_steps() -> None:
    async def main() -> None:
        with streaming(FakeEngine()) as engine:
            assert await engine.between_steps(lambda seen: seen.busy) is False
            with pytest.raises(ZeroDivisionError):
                await engine.between_steps(lambda seen: 1 // 0)
            assert len(await collect(engine, 2)) == 2

    asyncio.run(main())
