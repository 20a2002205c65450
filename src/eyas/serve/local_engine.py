"""eyas' own engine for the server: in this process, on a thread of its own, with a supervisor."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from eyas.drafter.model import Drafter
from eyas.engine.async_engine import AsyncEngine, EngineError
from eyas.engine.engine import Engine
from eyas.engine.output import SpecDecodeStats
from eyas.engine.request import Request
from eyas.serve.engine_client import NOTICES, SNAPSHOT_SECONDS, EngineSnapshot, OnOutput, run_all
from eyas.serve.supervisor import Supervisor, add_stats

logger = logging.getLogger(__name__)


class LocalEngineClient:
    """An `EngineClient`. Use it as a context manager, or call `close`."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.supervisor = Supervisor(build)
        self.unavailable = None
        engine = build()
        self.target, self.budget, self.max_depth = engine.target, engine.budget, engine.config.max_depth
        self._notices: deque[tuple[float, str]] = deque(maxlen=NOTICES)
        self._async_engine = AsyncEngine(engine, mend=self.supervisor)
        self._last_snapshot = EngineSnapshot(blocks=self.budget.blocks)

    @property
    def failure(self) -> BaseException | None:
        return self._async_engine.failure

    async def generate(self, requests: Sequence[Request], on_output: OnOutput) -> None:
        await run_all(self._stream(index, request, on_output) for index, request in enumerate(requests))

    async def snapshot(self) -> EngineSnapshot:
        try:
            async with asyncio.timeout(SNAPSHOT_SECONDS):
                self._last_snapshot = await self._async_engine.between_steps(self._take_snapshot)
        except (TimeoutError, EngineError):
            pass
        return replace(
            self._last_snapshot, failed_steps=self.supervisor.failed_steps, replaced=self.supervisor.replaced
        )

    async def swap_drafter(self, drafter: Drafter | None, *, only_in_place: bool = False) -> bool:
        return await self._async_engine.between_steps(
            lambda engine: engine.swap_drafter(drafter, in_place=True, or_refuse=only_in_place)
        )

    def close(self) -> None:
        self._async_engine.close()

    def __enter__(self) -> "LocalEngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _stream(self, index: int, request: Request, on_output: OnOutput) -> None:
        stats_by_key: list[SpecDecodeStats] = []

        def taken_on(engine: Engine, key: int) -> None:
            stats_by_key.append(engine.stats_of(key))
            self._log_events(engine)

        async with aclosing(self._async_engine.batches(request, taken_on=taken_on)) as batches:
            async for deltas in batches:
                await on_output(index, deltas, stats_by_key[0])

    def _log_events(self, engine: Engine) -> None:
        for event in engine.controller.events():
            self._notices.append((time.monotonic(), event))
            logger.warning(event)

    def _take_snapshot(self, engine: Engine) -> EngineSnapshot:
        self._log_events(engine)
        stats = SpecDecodeStats()
        add_stats(stats, self.supervisor.replaced_stats)
        add_stats(stats, engine.stats)
        report = engine.controller.report()
        return EngineSnapshot(
            running=len(engine.scheduler.running),
            waiting=engine.scheduler.waiting,
            blocks=engine.block_manager.blocks,
            block_size=engine.block_manager.block_size,
            blocks_used=engine.block_manager.used,
            blocks_cached=engine.block_manager.cached,
            prefix_lookups=engine.block_manager.lookups,
            prefix_hits=engine.block_manager.hits,
            stats=stats,
            depth_shares=report["share_of_depths"],
            rows_by_depth=report["rows_by_depth"],
            lookups_by_requests=engine.lookups_by_requests,
            collapsed=bool(report["collapsed"]),
            drift=engine.drift.report(),
            notices=tuple(self._notices),
        )
