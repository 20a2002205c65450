"""Load on a server: a number of users who ask in turn (closed loop), or a request rate (open loop).

Also measures the client's own overhead: one thread reads all streams, so its share of a core and its delay at waking up
say how far the measured times can be trusted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from eyas.bench.workload import Task
from eyas.errors import UserError

TICK = 0.02
BUSY = 0.5
"""Share of a core from which bursts of tokens wait in the client."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Closed loop with `users`, or open loop with `rate`."""

    users: int | None = None
    rate: float | None = None
    """Requests per second."""

    def __post_init__(self) -> None:
        if (self.users is None) == (self.rate is None):
            raise UserError("a load has users or a rate, not both and not neither")
        if self.users is not None and self.users < 1:
            raise UserError(f"{self.users} users cannot ask; give 1 or more")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UserError(f"a rate of {self.rate} requests per second is none; give more than 0")

    @property
    def label(self) -> str:
        return f"{self.users} user{'s' if self.users != 1 else ''}" if self.users is not None else f"{self.rate:g}/s"


Converse = Callable[[Task, int], Awaitable[None]]
"""Holds a conversation of at most this many turns."""


async def run_load(load: Load, tasks: Sequence[Task], converse: Converse, *, seed: int) -> None:
    """Run all tasks under a load. An exception in one ends all."""
    if load.users is not None:
        waiting = iter(tasks)

        async def user() -> None:
            for task in waiting:
                await converse(task, task.requests)

        await _gather([user() for _ in range(min(load.users, len(tasks)))])
        return

    assert load.rate is not None
    times = arrival_times(load.rate, len(tasks), seed)
    clock = asyncio.get_running_loop().time
    began = clock()

    async def visitor(task: Task, when: float) -> None:
        await asyncio.sleep(max(0.0, began + when - clock()))
        await converse(task, 1)  # a second turn would arrive when an answer ends, not at the given rate

    await _gather([visitor(task, when) for task, when in zip(tasks, times, strict=True)])


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process, the first at 0."""
    draw, when, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(when)
        when += draw.expovariate(rate)
    return times


async def _gather(coroutines: Sequence[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ClientOverhead:
    """Context manager that measures the client's CPU share and wake-up delays."""

    def __init__(self) -> None:
        self.late: list[float] = []
        """Seconds by which each tick came late."""
        self._cpu = self._wall = 0.0
        self.cpu_share = 0.0
        """CPU seconds per second."""

    async def __aenter__(self) -> "ClientOverhead":
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._watch = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        seconds = time.perf_counter() - self._wall
        self.cpu_share = (time.process_time() - self._cpu) / seconds if seconds > 0 else 0.0

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.late.append(max(0.0, time.perf_counter() - due))
