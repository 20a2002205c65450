"""A drafter that is hopeless for long follows nobody, costs nothing then, and is noticed when it is good again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.round_engines import dense_where_padded, round_engine  # noqa: F401  fixtures are used by name
from engine.simulated_device import LARGE
from engine.test_captured_plan import controller_on
from engine.test_engine import OFF, options, request
from engine.test_held_choice import Chooser, made, seqs
from eyas.drafter.model import Drafter
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.speculation.controller import Choice, Controller, RowFacts
from eyas.engine.speculation.exploration import Exploration
from eyas.engine.speculation.policy import POLICY
from eyas.target.model import Target

AUTO = Speculation()


def missed(probes: Exploration, count: int, step: int = 0) -> int:
    for _ in range(count):
        step += int(POLICY.probe_longest_wait)
        probes.settle(step, seconds=1.1, plain=1.0, saved=0.0, hit=False, chance=0.01)
    return step


def test_probes_that_miss_for_long_are_hopeless_and_a_lucky_hit_does_not_change_it_for_long() -> None:
    probes = Exploration()
    step = missed(probes, POLICY.hopeless_misses - 1)
    assert not probes.hopeless
    step = missed(probes, 5, step)
    assert probes.hopeless
    probes.settle(step + 1, seconds=1.1, plain=1.0, saved=1.0, hit=True, chance=0.02)
    assert not probes.hopeless
    missed(probes, POLICY.probe_hit_outweighs, step)
    assert probes.hopeless
    probes.rest()
    assert not probes.hopeless


def test_one_request_is_admitted_for_the_next_probe() -> None:
    probes = Exploration()
    step = missed(probes, POLICY.hopeless_misses)
    assert not probes.admits(step)
    due = step + int(POLICY.probe_longest_wait)
    assert [probes.admits(due) for _ in range(3)] == [True, False, False]
    assert not probes.admits(due + int(POLICY.probe_resting_wait) - 1)
    assert probes.admits(due + int(POLICY.probe_resting_wait))


class Resting(Chooser):
    def choose(self, rows: Sequence[RowFacts], *, after: int) -> Choice:
        return replace(super().choose(rows, after=after), rests=True)

    def follows_new(self) -> bool:
        return False


class _Forgetful:
    def forget(self, key: int) -> None:
        pass


def test_requests_on_auto_are_released_and_those_that_ask_for_a_depth_are_not() -> None:
    chooser = Resting(0, holds=8)
    proposer = made(chooser)
    proposer._drafter = _Forgetful()  # type: ignore[assignment]
    rows, deep = seqs(*range(8)), seqs(8, speculation=Speculation(mode="fixed", depth=2))
    assert dict(proposer.draft_slots([*rows, *deep]))[8] == 2
    assert proposer.take_released() == rows
    assert proposer.take_released() == []
    assert [proposer.follows(seq) for seq in (*rows, *deep)] == [False] * 8 + [True]
    new = seqs(9)
    proposer.admit(new[0])
    proposer.draft_slots([*rows, *deep, *new])
    assert len(chooser.asked) == 1, "nobody has come for whom there would be a choice"
    followed = seqs(10)
    proposer.draft_slots([*rows, *deep, *new, *followed])
    assert len(chooser.asked) == 2


def collapsed(users: int) -> tuple[Controller, int]:
    """A controller whose drafter is hopeless, and how many steps that took."""
    from engine.simulated_device import serve_on

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
    assert choice.holds == POLICY.resting_steps
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
    assert engine.rounds is not None
    assert not engine.rounds.runner._follows.any(), "passes left no states"
    rests = False
    before = engine.stats.accepted
    assert answers(engine, prompts, AUTO) == expected
    assert engine.stats.accepted > before
