"""A choice of depths serves the steps that follow, as long as it is one for those that decode."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.engine.drafter_proposer import DrafterProposer
from eyas.engine.request import Request, SequenceState, Speculation
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import HOLD, Choice, Controller, RowFacts
from eyas.engine.speculation.step_report import RoundOutcome, StepReport
from eyas.plan.shapes import CHAIN
from eyas.sampling import Sampling

AUTO, NO_DEPTH = Speculation(), Speculation(mode="fixed", depth=0)


class Chooser:
    """Chooses the same depth for all on auto, and notes who it was asked for."""

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
    """A proposer by these choices; the keys of requests that the drafter leaves alone are noted."""
    left = [] if unfollowed is None else unfollowed
    runner: Any = SimpleNamespace(shapes=shapes, unfollow=lambda seq: left.append(seq.key))
    unused: Any = SimpleNamespace()
    controller: Any = chooser
    return DrafterProposer(runner, controller, layer_ids=(), drift_probe=unused, tree=None)


def slots_of(proposer: DrafterProposer, decoding: Sequence[SequenceState]) -> dict[int, int]:
    """Room for drafts in the next step."""
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


def test_a_choice_is_not_held_behind_a_surprise() -> None:
    chooser = Chooser(3, holds=8)
    proposer, rows = made(chooser), seqs(0, 1)
    proposer.plan(rows)
    proposer.plan(rows)
    chooser.surprised = True
    proposer.plan(rows)
    assert chooser.asked == [([0, 1], 1), ([0, 1], 2)]


def test_the_same_requests_are_chosen_for_once() -> None:
    chooser = Chooser(3, holds=4)
    proposer, rows = made(chooser), seqs(0, 1)
    slots = [slots_of(proposer, rows) for _ in range(6)]
    assert slots == [{0: 3, 1: 3}] * 6
    assert chooser.asked == [([0, 1], 1), ([0, 1], 4)]
    choices = [proposer.plan(rows).choice for _ in range(4)]
    assert choices[0] is choices[1] is not None, "also of a step that follows"
    assert choices[2] is choices[3] is not choices[0]


def test_choices_that_stay_the_same_are_held_longer() -> None:
    from engine.simulated_device import LARGE, SHAPES

    controller = Controller(7)
    controller.captures(SHAPES)
    controller.rehearse(LARGE.rehearsal())
    rows, holds, after = [RowFacts(key, 200) for key in range(4)], list[int](), 1
    for _ in range(40):
        choice = controller.choose(rows, after=after)
        depth, after = choice.depths[0], choice.holds
        if depth:  # now and then a plain step is timed
            holds.append(choice.holds)
        rounds = [RoundOutcome(key=row.key, drafted=depth, accepted=depth) for row in rows if depth]
        controller.observe(StepReport(choice=choice, rounds=rounds))
    held = [held for held in holds if held > 1]  # a look at another depth is a step of its own
    assert max(held) == held[-1] == HOLD
    assert held == sorted(held), "nothing has changed meanwhile"


def test_who_leaves_changes_nothing_and_who_comes_drafts_as_the_others_do() -> None:
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


def test_plain_steps_go_on_with_others_unless_one_has_a_depth_of_its_own() -> None:
    chooser = Chooser(0, holds=8)
    proposer, rows = made(chooser), seqs(*range(8))
    assert slots_of(proposer, rows) == {}
    assert slots_of(proposer, [*rows, *seqs(8)]) == {}
    assert len(chooser.asked) == 1
    fixed = seqs(9, speculation=Speculation(mode="fixed", depth=2))
    assert slots_of(proposer, [*rows, *fixed])[9] == 2
    assert len(chooser.asked) == 2


@pytest.mark.parametrize(("before", "now"), [(1, 16), (16, 4)])
def test_what_was_chosen_for_few_does_not_serve_many(before: int, now: int) -> None:
    chooser = Chooser(0, holds=8)
    proposer, rows = made(chooser), seqs(*range(max(before, now)))
    proposer.plan(rows[:before])
    proposer.plan(rows[:now])
    assert len(chooser.asked) == 2


def test_where_depths_are_fixed_and_captured_there_is_little_to_choose() -> None:
    from engine.simulated_device import SHAPES

    controller = Controller(7)
    controller.captures(SHAPES)
    assert controller.choose([RowFacts(0, 9, "fixed", 3)]).holds == HOLD


def test_a_choice_is_kept_for_more_requests_only_where_there_are_passes_for_as_many() -> None:
    chooser = Chooser(depth=7, holds=9)
    proposer = made(chooser, CapturedShapes(rows=(4, 64, 96), depths=(1, 3, 7), most_tokens=512))
    proposer.plan(seqs(*range(64)))
    proposer.plan(seqs(*range(60)))
    assert len(chooser.asked) == 1, "fewer are no matter"
    proposer.plan(seqs(*range(66)))
    assert len(chooser.asked) == 2, "for more than 64 a pass has no room for deep drafts"
