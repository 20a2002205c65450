"""Acceptance is estimated by depth, and outdated estimates are forgotten fast."""

import random
from itertools import accumulate
from operator import mul

import pytest

from each import each
from eyas.engine.speculation.acceptance import GUESS, RECENT, Acceptance
from eyas.engine.speculation.step_report import RoundOutcome
from eyas.plan.shapes import Shape

TRUE = [0.8, 0.7, 0.6, 0.5]


def play(acceptance: Acceptance, chances: list[float], rounds: int, chance: random.Random) -> None:
    """Observe rounds of full depth with these acceptance probabilities."""
    for _ in range(rounds):
        accepted = next((depth for depth, p in enumerate(chances) if chance.random() >= p), len(chances))
        acceptance.observe([(len(chances), accepted)])


def test_an_unknown_drafter_is_given_a_chance_that_declines_with_depth() -> None:
    by_depth = Acceptance(4).by_depth
    assert by_depth[0] == pytest.approx(GUESS)
    assert sorted(by_depth, reverse=True) == list(by_depth)
    assert by_depth[3] > 0.8 * GUESS


def test_a_few_misses_end_the_first_guess() -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.0], 10, random.Random(0))
    assert acceptance.by_depth[0] < 0.12


@each("seed", range(4))
def test_estimates_approach_the_truth_at_every_depth(seed: int) -> None:
    acceptance = Acceptance(4)
    play(acceptance, TRUE, 2000, random.Random(seed))
    assert acceptance.by_depth == pytest.approx(TRUE, abs=0.12)
    assert acceptance.survivals == pytest.approx(list(accumulate(acceptance.by_depth, mul)))


def test_drafts_behind_a_rejected_one_are_not_counted() -> None:
    acceptance = Acceptance(4)
    for _ in range(100):
        acceptance.observe([(4, 1)])
    assert acceptance.by_depth[0] > 0.95
    assert acceptance.by_depth[1] < 0.1
    assert acceptance.by_depth[2] == pytest.approx(0.95 * acceptance.by_depth[1]), "never tried"


@each(("before", "after"), [(0.8, 0.0), (0.05, 0.8)])
def test_a_change_is_noticed_within_a_few_dozen_rounds(before: float, after: float) -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    play(acceptance, [before] * 4, 3000, chance)
    play(acceptance, [after] * 4, 40, chance)
    assert acceptance.by_depth[0] == pytest.approx(after, abs=0.15)


def test_probes_count_for_more_than_what_was_before_them() -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.0], 1000, random.Random(0))
    for _ in range(6):
        acceptance.doubt()
        acceptance.observe([(1, 1)])
    assert acceptance.by_depth[0] > 0.3


def test_a_drafter_is_proven_by_accepted_drafts_only_and_no_longer_after_doubt() -> None:
    acceptance = Acceptance(4, [0.9] * 4)
    acceptance.observe([(3, 0)] * 200)
    assert not acceptance.proven
    acceptance.observe([(3, 2)] * 8)
    assert acceptance.proven
    acceptance.doubt()
    assert not acceptance.proven


def test_equal_rounds_observed_at_once_count_as_one_by_one() -> None:
    at_once, one_by_one = Acceptance(4), Acceptance(4)
    at_once.observe([(4, 2)] * 30)
    for _ in range(30):
        one_by_one.observe([(4, 2)])
    assert at_once.by_depth == pytest.approx(one_by_one.by_depth)
    assert at_once.rounds == one_by_one.rounds == 30


TREE = Shape(kind="tree", depth=3, width=2, budget=6)


def test_in_a_tree_only_ranks_tell_about_first_candidates() -> None:
    acceptance = Acceptance(4)
    by_sibling = RoundOutcome(key=0, drafted=3, accepted=2, ranks=[2, 1, 0])
    acceptance.observe_trees(TREE, [by_sibling] * 300)
    assert acceptance.by_depth[0] < 0.05
    by_first = RoundOutcome(key=0, drafted=3, accepted=1, ranks=[1, 0])
    acceptance.observe_trees(TREE, [by_first] * 3000)
    assert acceptance.by_depth[0] > 0.95
    assert acceptance.by_depth[1] < 0.05


def test_gains_of_trees_over_chains_are_learned() -> None:
    acceptance = Acceptance(4)
    acceptance.observe([(3, 1)] * 500)
    before = acceptance.gain(TREE)
    acceptance.observe_trees(TREE, [RoundOutcome(key=0, drafted=3, accepted=2, ranks=[1, 2, 0])] * 200)
    assert acceptance.gain(TREE) == pytest.approx(2.0, abs=0.1)
    assert before == pytest.approx(1.3, abs=0.1)
    assert acceptance.gain(3) == pytest.approx(1.0, abs=0.05)


def test_collapse_and_recovery_are_reported_once_each() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    play(acceptance, TRUE, 300, chance)
    assert acceptance.take_events() == []
    play(acceptance, [0.0] * 4, 500, chance)
    (said,) = acceptance.take_events()
    assert f"of the last {RECENT} rounds" in said
    assert "eyas check" in said
    play(acceptance, TRUE, 500, chance)
    (said,) = acceptance.take_events()
    assert "back" in said
    assert acceptance.take_events() == []


@each("seed", range(4))
def test_a_mediocre_drafter_is_not_reported_as_collapsed(seed: int) -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.35] * 4, 3000, random.Random(seed))
    assert acceptance.take_events() == []
