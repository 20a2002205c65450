"""The proposer: a choice of depths is kept while it suits the requests, and a hopeless drafter rests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from each import each
from engine.common import AUTO, OFF, Prompts, options, requests, run
from engine.depth_cells import on as controller_on
from engine.round_engines import round_engine
from engine.simulated_device import LARGE, serve_on
from eyas.drafter.model import Drafter
from eyas.engine.drafter_proposer import DrafterProposer
from eyas.engine.engine import Engine
from eyas.engine.request import Request, SequenceState, Speculation
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import HOLD, Choice, Controller, RowFacts
from eyas.engine.speculation.probes import PATIENCE, Account
from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.plan.shapes import CHAIN
from eyas.sampling import Sampling
from eyas.target.model import Target

NO_DEPTH = Speculation(mode="fixed", depth=0)


class Chooser:
    """Chooses the same depth for all requests on auto, and records what it was asked."""

    def __init__(self, depth: int, holds: int) -> None:
        self.depth, self.holds = depth, holds
        self.asked: list[tuple[list[int], int]] = []
        self.drift = SimpleNamespace(firing=False)
        self.surprised = False

    def choose(self, rows: Sequence[RowFacts], *, after: int) -> Choice:
        self.asked.append(([row.key for row in rows], after))
        depths = tuple(self.depth if row.mode == "auto" else row.depth or 0 for row in rows)
        return Choice(depths=depths, shape=CHAIN, reason="", holds=self.holds)


PLENTY = CapturedShapes(rows=tuple(range(1, 65)), depths=tuple(range(1, 8)), most_tokens=1024)


def made(chooser: Chooser, shapes: CapturedShapes = PLENTY, unfollowed: list[int] | None = None) -> DrafterProposer:
    """A proposer with these choices; records the keys of requests that the drafter stops following."""
    left = [] if unfollowed is None else unfollowed
    runner: Any = SimpleNamespace(shapes=shapes, unfollow=lambda seq: left.append(seq.key))
    unused: Any = SimpleNamespace()
    controller: Any = chooser
    return DrafterProposer(runner, controller, layer_ids=(), drift_probe=unused, tree=None)


def slots_of(proposer: DrafterProposer, decoding: Sequence[SequenceState]) -> dict[int, int]:
    """Draft slots in the next step."""
    return dict(proposer.plan(decoding).slots)


def seqs(*keys: int, speculation: Speculation = AUTO) -> list[SequenceState]:
    return [
        SequenceState(
            key=key,
            arrival=key,
            request=Request(prompt=(1, 2), sampling=Sampling(), max_new_tokens=9, speculation=speculation),
        )
        for key in keys
    ]


def test_a_choice_is_dropped_after_a_surprise() -> None:
    chooser = Chooser(3, holds=8)
    proposer, rows = made(chooser), seqs(0, 1)
    proposer.plan(rows)
    proposer.plan(rows)
    chooser.surprised = True
    proposer.plan(rows)
    assert chooser.asked == [([0, 1], 1), ([0, 1], 2)]


def test_a_choice_serves_the_same_requests_for_several_steps() -> None:
    chooser = Chooser(3, holds=4)
    proposer, rows = made(chooser), seqs(0, 1)
    slots = [slots_of(proposer, rows) for _ in range(6)]
    assert slots == [{0: 3, 1: 3}] * 6
    assert chooser.asked == [([0, 1], 1), ([0, 1], 4)]
    choices = [proposer.plan(rows).choice for _ in range(4)]
    assert choices[0] is choices[1] is not None, "also in later steps"
    assert choices[2] is choices[3] is not choices[0]


def test_repeated_choices_are_held_longer() -> None:
    from engine.simulated_device import LARGE, SHAPES

    controller = Controller(7)
    controller.captures(SHAPES)
    controller.rehearse(LARGE.rehearsal())
    rows, holds, after = [RowFacts(key, 200) for key in range(4)], list[int](), 1
    for _ in range(40):
        choice = controller.choose(rows, after=after)
        depth, after = choice.depths[0], choice.holds
        if depth:  # now and then a plain step is measured
            holds.append(choice.holds)
        rounds = [RoundOutcome(key=row.key, drafted=depth, accepted=depth) for row in rows if depth]
        controller.observe(StepReport(choice=choice, rounds=rounds))
    held = [held for held in holds if held > 1]  # a look at another depth is a step of its own
    assert max(held) == held[-1] == HOLD
    assert held == sorted(held), "nothing has changed meanwhile"


def test_requests_that_leave_change_nothing_and_new_ones_draft_as_the_others_do() -> None:
    chooser = Chooser(3, holds=8)
    proposer, rows = made(chooser), seqs(*range(8))
    proposer.plan(rows)
    proposer.plan(rows[1:])
    new = [*seqs(8), *seqs(9, speculation=Speculation(mode="off")), *seqs(10, speculation=NO_DEPTH)]
    slots = slots_of(proposer, [*rows[3:], *new])
    assert [slots[key] for key in (7, 8, 9, 10)] == [3, 3, 0, 0]
    assert len(chooser.asked) == 1
    deep = seqs(11, speculation=Speculation(mode="fixed", depth=2))
    assert slots_of(proposer, [*rows[3:], *new, *deep])[11] == 2
    assert chooser.asked[-1] == ([*range(3, 12)], 3)


def test_plain_steps_go_on_with_new_requests_unless_one_has_a_fixed_depth() -> None:
    chooser = Chooser(0, holds=8)
    proposer, rows = made(chooser), seqs(*range(8))
    assert slots_of(proposer, rows) == {}
    assert slots_of(proposer, [*rows, *seqs(8)]) == {}
    assert len(chooser.asked) == 1
    fixed = seqs(9, speculation=Speculation(mode="fixed", depth=2))
    assert slots_of(proposer, [*rows, *fixed])[9] == 2
    assert len(chooser.asked) == 2


@each(("before", "now"), [(1, 16), (16, 4)])
def test_a_choice_for_few_requests_does_not_serve_many(before: int, now: int) -> None:
    chooser = Chooser(0, holds=8)
    proposer, rows = made(chooser), seqs(*range(max(before, now)))
    proposer.plan(rows[:before])
    proposer.plan(rows[:now])
    assert len(chooser.asked) == 2


def test_fixed_depths_in_captured_passes_are_held_for_long() -> None:
    from engine.simulated_device import SHAPES

    controller = Controller(7)
    controller.captures(SHAPES)
    assert controller.choose([RowFacts(0, 9, "fixed", 3)]).holds == HOLD


def test_a_choice_is_kept_for_more_requests_only_where_passes_exist_for_them() -> None:
    chooser = Chooser(depth=7, holds=9)
    proposer = made(chooser, CapturedShapes(rows=(4, 64, 96), depths=(1, 3, 7), most_tokens=512))
    proposer.plan(seqs(*range(64)))
    proposer.plan(seqs(*range(60)))
    assert len(chooser.asked) == 1, "fewer requests fit"
    proposer.plan(seqs(*range(66)))
    assert len(chooser.asked) == 2, "passes for more than 64 rows have no deep drafts"


def missed(account: Account, spells: int, step: int = 0) -> int:
    """Probes whose drafts were all rejected, each as soon as it is due; returns the step of the last one's end."""
    for _ in range(spells):
        while not account.due(step):
            step += 1
        account.begin()
        account.book(-0.1, 1.0)
        account.end(step, 1.0)
    return step


def test_failed_probes_become_rarer_until_one_succeeds() -> None:
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


def test_requests_on_auto_are_released_and_those_with_a_fixed_depth_are_not() -> None:
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
    assert len(chooser.asked) == 1, "there is no new request to choose for"
    followed = seqs(10)
    proposer.plan([*rows, *deep, *new, *followed])
    assert len(chooser.asked) == 2
    assert unfollowed == [*range(8), 10]


def collapsed(users: int) -> tuple[Controller, int]:
    """A controller whose drafter is hopeless, and the number of steps until it rests."""
    controller, steps = controller_on(LARGE), 0
    while not controller._resting:
        serve_on(controller, LARGE, lambda _: [0.0] * 7, users=users, steps=50)
        steps += 50
        assert steps < 3000
    return controller, steps


@each("users", [1, 16])
def test_a_hopeless_drafter_rests_after_hundreds_of_steps(users: int) -> None:
    controller, steps = collapsed(users)
    assert steps > 200
    new = [controller.follows_new() for _ in range(5)]
    assert sum(new) <= 1
    choice = controller.choose([RowFacts(key=0, context=50, mode="off")])
    assert choice.rests
    assert choice.holds == HOLD
    assert "follows only probes" in choice.reason


def submit(engine: Engine, prompts: Prompts, speculation: Speculation) -> dict[int, list[int]]:
    return {engine.submit(one): [] for one in requests(prompts, max_new_tokens=20, speculation=speculation)}


def step(engine: Engine, said: dict[int, list[int]]) -> None:
    for delta in engine.step():
        said[delta.key] += delta.tokens
    engine.scheduler.check()


def answers(engine: Engine, prompts: Prompts, speculation: Speculation) -> list[list[int]]:
    return [
        list(answer.tokens) for answer in run(engine, requests(prompts, max_new_tokens=20, speculation=speculation))
    ]


def test_answers_stay_the_same_when_requests_are_released_and_others_are_not_followed(
    tiny_target: Target, tiny_drafter: Drafter, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that were read without the drafter are no cached prefixes for requests that it follows."""
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
    assert not engine.core.runner.follows.any(), "no states were kept"
    rests = False
    before = engine.stats.accepted
    assert answers(engine, prompts, AUTO) == expected
    assert engine.stats.accepted > before
