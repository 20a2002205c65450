"""The engine as the server uses it: generate, take snapshots of its state, swap the drafter, close.

The rest of the server uses this protocol, in token ids. There are two engines behind it, eyas' own (`local_engine.py`)
and vLLM (`vllm/client.py`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyas.drafter.model import Drafter
from eyas.engine.output import OutputDelta, SpecDecodeStats
from eyas.engine.request import Request
from eyas.engine.speculation.drift import DriftReport
from eyas.target.text import TargetText

OnOutput = Callable[[int, Sequence[OutputDelta], SpecDecodeStats], Awaitable[None]]
"""Receives the index of a request, its newest outputs, and its speculation counts so far. There are several outputs if
the engine made more before the last ones were received."""
SNAPSHOT_SECONDS = 2.0
"""The longest wait for the engine; after it the previous snapshot is used."""
NOTICES = 8
"""The engine's latest events that are kept for /status."""


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
    """The number of times that each depth was chosen for an answer, in the current engine."""
    lookups_by_requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Whether looking up suffix drafts pays, where steps overlap (`suffix/lookup_gate.py`)."""
    collapsed: bool = False
    """Whether the drafter is of no use at present."""
    drift: DriftReport | None = None
    """The drift probe's report; None before the first snapshot."""
    notices: tuple[tuple[float, str], ...] = ()
    """The engine's latest events and when they came, by the monotonic clock; the newest last."""
    failed_steps: int = 0
    replaced: int = 0
    """Engines that were replaced so far."""


class EngineClient(Protocol):
    """An engine that answers requests, wherever it runs."""

    @property
    def target(self) -> TargetText:
        """The target's tokenizer, template and sizes."""

    @property
    def max_depth(self) -> int:
        """The deepest that a request may ask for."""

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine for good, if any."""

    @property
    def unavailable(self) -> str | None:
        """The reason why the engine cannot answer for the moment, if so."""

    async def generate(self, requests: Sequence[Request], on_output: OnOutput) -> None:
        """Run all requests to their end; if one fails or the caller is cancelled, all leave the engine."""

    async def snapshot(self) -> EngineSnapshot:
        """The engine's current state, or the previous snapshot if it takes long."""

    async def swap_drafter(self, drafter: Drafter | None, *, only_in_place: bool = False) -> bool:
        """Use another drafter, or none; if it is refused, nothing changes.

        Returns whether its weights were copied into the previous drafter. With `only_in_place` a drafter of another
        shape is refused.
        """

    def close(self) -> None:
        """Stop; requests in flight end with an error."""


async def run_all(streams: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run streams concurrently to their end; if one fails, the others are cancelled."""
    first, *others = streams
    if not others:
        await first
        return
    try:
        async with asyncio.TaskGroup() as group:
            for stream in (first, *others):
                group.create_task(stream)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the others were cancelled because of it
