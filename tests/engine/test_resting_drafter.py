"""A drafter that is hopeless for long follows nobody, costs nothing then, and is noticed when it is good again."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.depth_cells import on as controller_on
from engine.round_engines import round_engine
from engine.simulated_device import LARGE, serve_on
from engine.test_engine import OFF, options, request
from engine.test_held_choice import Chooser, made, seqs, slots_of
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.speculation.controller import HOLD, Choice, Controller, RowFacts
from eyas.engine.speculation.probes import PATIENCE, Account
from eyas.target.model import Target

AUTO = Speculation()


def missed(account: Account, spells: int, step: int = 0) -> int:
    """Probes whose drafts were all refused, each as soon as it is due; the step of the last one's end."""
    for _ in range(spells):
        while not account.due(step):
            step += 1
        account.begin()
        account.book(-0.1, 1.0)
        account.end(step, 1.0)
    return step


def test_probes_that_miss_are_rarer_and_rarer_until_one_hits() -> None:
    account, waits = Account(), list[int]()
    for _ in range(30):
        step = missed(account, 1, 0 if not waits else waits[-1])
        due = next(later for later in range(step, step + 10_000) if account.due(later))
        assert not account.due(due - 1)
        waits.append(due)
    assert [later - earlier for earlier, later in pairwise(waits)] == [PATIENCE * misses for misses in range(2, 31)]
    account.begin()
    account.book(1.0, 1.0)
    account.end(waits[-1], 1.0)
    assert account.due(waits[-1])
    assert account.misses == 0


class Resting(Chooser):
    def choose(self, rows: Sequence[RowFacts], *, after: int) -> Choice:
        return replace(super().choose(rows, after=after), rests=True)

    def follows_new(self) -> bool:
        return False


def test_requests_on_auto_are_released_and_those_that_ask_for_a_depth_are_not() -> None:
    chooser, unfollowed = Resting(0, holds=8), list[int]()
    proposer = made(chooser, unfollowed=unfollowed)
    rows, deep = seqs(*range(8)), seqs(8, speculation=Speculation(mode="fixed", depth=2))
    assert slots_of(proposer, [*rows, *deep])[8] == 2
    assert unfollowed == list(range(8))
    assert [seq.speculates for seq in (*rows, *deep)] == [False] * 8 + [True]
    new = seqs(9)
    proposer.admit(new[0])
    assert not new[0].speculates
    proposer.plan([*rows, *deep, *new])
    assert len(chooser.asked) == 1, "nobody has come for whom there would be a choice"
    followed = seqs(10)
    proposer.plan([*rows, *deep, *new, *followed])
    assert len(chooser.asked) == 2
    assert unfollowed == [*range(8), 10]


def collapsed(users: int) -> tuple[Controller, int]:
    """A controller whose drafter is hopeless, and how many steps that took."""
    controller, steps = controller_on(LARGE), 0
    while not controller._resting:
        serve_on(controller, LARGE, lambda _: [0.0] * 7, users=users, steps=50)
        steps += 50
        assert steps < 3000
    return controller, steps


@pytest.mark.parametrize("users", [1, 16])
def test_a_hopeless_drafter_rests_after_hundreds_of_steps(users: int) -> None:
    controller, steps = collapsed(users)
    assert steps > 200
    new = [controller.follows_new() for _ in range(5)]
    assert sum(new) <= 1
    choice = controller.choose([RowFacts(key=0, context=50, mode="off")])
    assert choice.rests
    assert choice.holds == HOLD
    assert "follows nobody" in choice.reason


def submit(engine: Engine, prompts: Sequence[tuple[int, ...]], speculation: Speculation) -> dict[int, list[int]]:
    return {engine.submit(request(prompt, max_new_tokens=20, speculation=speculation)): [] for prompt in prompts}


def step(engine: Engine, said: dict[int, list[int]]) -> None:
    for piece in engine.step():
        said[piece.key] += piece.tokens
    engine.scheduler.check()


def answers(engine: Engine, prompts: Sequence[tuple[int, ...]], speculation: Speculation) -> list[list[int]]:
    said = submit(engine, prompts, speculation)
    while engine.busy:
        step(engine, said)
    return list(said.values())


def test_answers_stay_the_same_when_requests_are_released_under_way_and_others_are_not_followed(
    tiny_target: Target, tiny_drafter: Drafter, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that were read without the drafter are no prefixes for those that it follows."""
    engine = round_engine(tiny_target, tiny_drafter, options())
    prompts = prompts[:6]
    expected = answers(engine, prompts, OFF)
    choose, rests = engine.controller.choose, False

    def choose_and_rest(rows: Sequence[RowFacts], **more: Any) -> Choice:
        choice = choose(rows, **more)
        return replace(choice, rests=True, depths=(0,) * len(rows), holds=4) if rests else choice

    monkeypatch.setattr(engine.controller, "choose", choose_and_rest)
    monkeypatch.setattr(engine.controller, "follows_new", lambda: not rests)
    said = submit(engine, prompts, AUTO)
    while min(map(len, said.values())) < 4:
        step(engine, said)
    assert all(seq.speculates for seq in engine.scheduler.running)
    rests = True
    late = submit(engine, prompts, AUTO)
    while engine.busy:
        step(engine, said | late)
    assert list(said.values()) == list(late.values()) == expected
    assert not engine.core.runner.follows.any(), "passes left no states"
    rests = False
    before = engine.stats.accepted
    assert answers(engine, prompts, AUTO) == expected
    assert engine.stats.accepted > before
