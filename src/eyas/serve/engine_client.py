"""The engine as the server uses it: generate for requests, take snapshots of its state, swap the drafter, close."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType

from eyas.drafter.model import Drafter
from eyas.engine.async_engine import AsyncEngine, EngineError
from eyas.engine.engine import Engine
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import Request
from eyas.engine.speculation.drift import DriftReport
from eyas.serve.supervisor import Supervisor, add_stats

logger = logging.getLogger(__name__)
OnOutput = Callable[[int, OutputDelta, SpecDecodeStats], Awaitable[None]]
"""Takes the index of a request, its newest output, and its speculation counts so far."""
SNAPSHOT_SECONDS = 2.0
"""How long to wait for a step to end before the previous snapshot is used."""
NOTICES = 8
"""How many of the engine's latest events are kept for /status."""


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """The engine's state between two steps."""

    at: float = field(default_factory=time.monotonic)
    """When it was taken, by the monotonic clock."""
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    block_size: int = 1
    """Tokens in a block."""
    blocks_used: int = 0
    blocks_cached: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    """Since the server started, over all engines."""
    depth_shares: dict[int, float] = field(default_factory=dict)
    rows_by_depth: dict[int, int] = field(default_factory=dict)
    """How often each depth was chosen for an answer, in the current engine."""
    collapsed: bool = False
    """Whether the drafter is of no use at present."""
    drift: DriftReport | None = None
    """The drift probe's report; None before the first snapshot."""
    notices: tuple[tuple[float, str], ...] = ()
    """The engine's latest events and when they came, by the monotonic clock; the newest last."""


class EngineClient:
    """Runs an engine under a supervisor. Use it as a context manager, or call `close`."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.supervisor = Supervisor(build)
        engine = build()
        self.target, self.budget, self.max_depth = engine.target, engine.budget, engine.config.max_depth
        self._notices: deque[tuple[float, str]] = deque(maxlen=NOTICES)
        self._async_engine = AsyncEngine(engine, mend=self.supervisor)
        self._last_snapshot = EngineSnapshot(blocks=self.budget.blocks)

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine for good, if any."""
        return self._async_engine.failure

    async def generate(self, requests: Sequence[Request], on_output: OnOutput) -> None:
        """Run all requests to their end; if one fails or the caller is cancelled, all leave the engine."""
        if len(requests) == 1:
            await self._stream(0, requests[0], on_output)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    group.create_task(self._stream(index, request, on_output))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it

    async def snapshot(self) -> EngineSnapshot:
        """The engine's current state, or the previous snapshot if a step takes long."""
        try:
            async with asyncio.timeout(SNAPSHOT_SECONDS):
                self._last_snapshot = await self._async_engine.between_steps(self._take_snapshot)
        except (TimeoutError, EngineError):
            pass
        return self._last_snapshot

    async def swap_drafter(self, drafter: Drafter | None) -> None:
        """Use another drafter, or none, from the next step on; if it is refused, nothing changes."""
        await self._async_engine.between_steps(lambda engine: engine.swap_drafter(drafter))

    def close(self) -> None:
        """Stop after the current step; requests in flight end with an error."""
        self._async_engine.close()

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _stream(self, index: int, request: Request, on_output: OnOutput) -> None:
        stats_by_key: list[SpecDecodeStats] = []

        def taken_on(engine: Engine, key: int) -> None:
            stats_by_key.append(engine.stats_of(key))
            self._log_events(engine)

        async with aclosing(self._async_engine.stream(request, taken_on=taken_on)) as deltas:
            async for delta in deltas:
                await on_output(index, delta, stats_by_key[0])

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
            collapsed=bool(report["collapsed"]),
            drift=engine.drift.report(),
            notices=tuple(self._notices),
        )
