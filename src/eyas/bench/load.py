"""How requests come: a number of users who ask one after another, or a rate that does not wait for answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from eyas.bench.workload import Task
from eyas.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Load:
    """Closed loop, with users, or open loop, with a rate."""

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
        """For people."""
        return f"{self.users} user{'s' if self.users != 1 else ''}" if self.users is not None else f"{self.rate:g}/s"


Converse = Callable[[Task, int], Awaitable[None]]
"""Has a conversation, of that many turns at most."""


async def run_load(load: Load, tasks: Sequence[Task], converse: Converse, *, seed: int) -> None:
    """All tasks under a load. What goes wrong in one ends all."""
    if load.users is not None:
        waiting = iter(tasks)

        async def user() -> None:
            for task in waiting:
                await converse(task, task.requests)

        await _all([user() for _ in range(min(load.users, len(tasks)))])
        return

    assert load.rate is not None
    times = arrival_times(load.rate, len(tasks), seed)
    clock = asyncio.get_running_loop().time
    began = clock()

    async def visitor(task: Task, when: float) -> None:
        await asyncio.sleep(max(0.0, began + when - clock()))
        await converse(task, 1)  # a second turn would come when an answer ends, not when the rate says

    await _all([visitor(task, when) for task, when in zip(tasks, times, strict=True)])


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """A Poisson process: each gap is exponential, the first request comes at once."""
    draw, when, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(when)
        when += draw.expovariate(rate)
    return times


async def _all(works: Sequence[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
