"""Closed and open loop, and the overhead of the client."""

import asyncio
from itertools import pairwise
from statistics import mean

import pytest

from each import each
from eyas.bench.load import ClientOverhead, Load, arrival_times, run_load
from eyas.bench.workload import Task
from eyas.errors import UserError

TASKS = [Task(key=str(i), category="c", turns=("a", "b")) for i in range(12)]


class Watch:
    """Counts concurrent conversations, each of which takes some time."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.now = self.most = 0
        self.turns: list[int] = []
        self.seconds = seconds

    async def __call__(self, task: Task, turns: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        self.turns.append(turns)
        await asyncio.sleep(self.seconds)
        self.now -= 1


@each("users", [1, 4, 50])
def test_a_closed_loop_has_one_conversation_per_user(users: int) -> None:
    watch = Watch()
    asyncio.run(run_load(Load(users=users), TASKS, watch, seed=0))
    assert watch.most == min(users, len(TASKS))
    assert watch.turns == [2] * 12


def test_an_open_loop_does_not_wait_and_asks_first_turns() -> None:
    watch = Watch(seconds=0.2)
    asyncio.run(run_load(Load(rate=400), TASKS, watch, seed=0))
    assert watch.most == 12  # all came before the first was answered
    assert watch.turns == [1] * 12


def test_arrivals_are_a_poisson_process_fixed_by_the_seed() -> None:
    times = arrival_times(5.0, 4000, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert mean(gap > 0.2 for gap in gaps) == pytest.approx(0.368, abs=0.03)  # exp(-1): exponential, not regular
    assert times == arrival_times(5.0, 4000, seed=3) != arrival_times(5.0, 4000, seed=4)


def test_an_error_in_one_conversation_ends_all() -> None:
    done = []

    async def talk(task: Task, turns: int) -> None:
        if task.key == "3":
            raise RuntimeError("boom")
        await asyncio.sleep(0.01)
        done.append(task.key)

    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(run_load(Load(users=2), TASKS, talk, seed=0))
    assert len(done) < 5


@each("wrong", [{}, {"users": 1, "rate": 1.0}, {"users": 0}, {"rate": 0.0}, {"rate": float("inf")}])
def test_invalid_loads_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Load(**wrong)  # type: ignore[arg-type]


def test_a_cancellation_at_the_end_of_the_overhead_block_is_raised() -> None:
    async def work() -> None:
        async with ClientOverhead():
            asyncio.get_running_loop().call_soon(task.cancel)

    async def main() -> None:
        nonlocal task
        task = asyncio.create_task(work())
        await task

    task: asyncio.Task[None]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
