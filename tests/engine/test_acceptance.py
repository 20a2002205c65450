"""Acceptance is estimated by depth, by request and by confidence; what is no longer true is forgotten fast."""

import random
from itertools import accumulate
from operator import mul
from typing import Any

import pytest

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.observations import RoundOutcome
from eyas.engine.speculation.policy import POLICY

TRUE = [0.8, 0.7, 0.6, 0.5]


def told(drafted: int, accepted: int, *, key: int = 0, **more: Any) -> RoundOutcome:
    return RoundOutcome(key=key, drafted=drafted, accepted=accepted, **more)


def play(acceptance: Acceptance, chances: list[float], rounds: int, chance: random.Random, key: int = 0) -> None:
    """Rounds of full depth with these chances."""
    for _ in range(rounds):
        accepted = next((depth for depth, p in enumerate(chances) if chance.random() >= p), len(chances))
        acceptance.observe(told(len(chances), accepted, key=key))
        acceptance.end_steps(1)
    acceptance.refresh()


def test_an_unknown_drafter_is_given_a_chance_that_declines_with_depth() -> None:
    by_depth = Acceptance(4).by_depth
    assert by_depth[0] == pytest.approx(POLICY.first_guess)
    assert sorted(by_depth, reverse=True) == list(by_depth)
    assert by_depth[3] > 0.8 * POLICY.first_guess


def test_a_few_misses_end_the_first_guess() -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.0], 10, random.Random(0))
    assert acceptance.by_depth[0] < 0.12


@pytest.mark.parametrize("seed", range(4))
def test_estimates_approach_the_truth_at_every_depth(seed: int) -> None:
    acceptance = Acceptance(4)
    play(acceptance, TRUE, 2000, random.Random(seed))
    assert acceptance.by_depth == pytest.approx(TRUE, abs=0.12)
    assert acceptance.survivals(0) == pytest.approx(list(accumulate(acceptance.by_depth, mul)))


def test_drafts_behind_a_refused_one_are_not_counted() -> None:
    acceptance = Acceptance(4)
    for _ in range(100):
        acceptance.observe(told(4, 1))
    acceptance.refresh()
    assert acceptance.by_depth[0] > 0.95
    assert acceptance.by_depth[1] < 0.1
    assert acceptance.by_depth[2] == pytest.approx(0.95 * acceptance.by_depth[1]), "never tried"


def test_a_request_differs_from_the_others_only_by_its_own_evidence() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    for _ in range(60):
        play(acceptance, [0.9] * 4, 1, chance, key=1)
        play(acceptance, [0.3] * 4, 1, chance, key=2)
    good, bad, new = (acceptance.settle(key) for key in (1, 2, 3))
    assert good > 2 > new == 0 > -2 > bad
    assert acceptance.survivals(good)[0] > 0.75 > 0.45 > acceptance.survivals(bad)[0]
    assert acceptance.levels([1, 2, 3]) == [good, bad, 0]
    acceptance.forget(1)
    assert acceptance.levels([1]) == [0]


def test_a_request_that_rests_becomes_like_the_others_again() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    for _ in range(40):
        play(acceptance, [0.9] * 4, 1, chance, key=1)
        play(acceptance, [0.1] * 4, 1, chance, key=2)
    assert acceptance.settle(2) < -3
    for _ in range(500):
        acceptance.end_steps(1)
    assert acceptance.settle(2) == 0


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.0), (0.05, 0.8)])
def test_a_change_is_noticed_within_a_few_dozen_rounds(before: float, after: float) -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    play(acceptance, [before] * 4, 3000, chance)
    play(acceptance, [after] * 4, 40, chance)
    assert acceptance.by_depth[0] == pytest.approx(after, abs=0.15)


def test_probes_count_for_more_than_what_was_before_them() -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.0], 1000, random.Random(0))
    for _ in range(6):
        acceptance.end_steps(1)
        acceptance.note_probe()
        acceptance.observe(told(1, 1))
    acceptance.refresh()
    assert acceptance.by_depth[0] > 0.3


def test_a_drafter_that_is_too_sure_of_itself_is_corrected() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    assert acceptance.chances_of([0.95, 0.35]) == pytest.approx([0.95, 0.35]), "at first it is taken at its word"
    for _ in range(400):
        sure = chance.choice((0.95, 0.35))
        acceptance.observe(told(1, int(chance.random() < (0.5 if sure > 0.9 else 0.1)), confidences=[sure]))
    acceptance.refresh()
    high, low = acceptance.chances_of([0.95])[0], acceptance.chances_of([0.35])[0]
    assert high == pytest.approx(0.5, abs=0.1)
    assert low == pytest.approx(0.1, abs=0.1)


def test_drafts_withheld_for_being_unlikely_do_not_flatter_the_drafter() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    for _ in range(500):
        if chance.random() < 0.5:
            acceptance.observe(told(1, int(chance.random() < 0.9), confidences=[0.9]))
        else:
            acceptance.observe(told(0, 0), withheld=0.1)
    acceptance.refresh()
    assert acceptance.by_depth[0] == pytest.approx(0.5, abs=0.07)


def test_ranks_tell_how_often_a_sibling_would_have_been_right() -> None:
    acceptance = Acceptance(4)
    for number in range(1000):
        rank = (1, 1, 1, 1, 1, 2, 2, 3, 0, 0)[number % 10]
        acceptance.observe(told(1, int(number % 10 < 5), ranks=[rank]))
    acceptance.refresh()
    assert acceptance.by_depth[0] == pytest.approx(0.5, abs=0.02)
    assert acceptance.siblings.shares()[:3] == pytest.approx([0.4, 0.2, 0.0], abs=0.02)


def test_in_a_tree_ranks_alone_tell_how_first_candidates_fared() -> None:
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.observe(told(3, 2, ranks=[2, 1, 0]))  # by a sibling, by a first candidate, not at all
    acceptance.refresh()
    assert acceptance.by_depth[0] < 0.05
    assert acceptance.by_depth[1] > 0.95
    assert acceptance.by_depth[2] < 0.05


def test_collapse_and_return_are_said_once_each() -> None:
    acceptance, chance = Acceptance(4), random.Random(0)
    play(acceptance, TRUE, 300, chance)
    assert acceptance.watch.take() == []
    play(acceptance, [0.0] * 4, 500, chance)
    (said,) = acceptance.watch.take()
    assert f"of the last {POLICY.latest_rounds} rounds" in said
    assert "eyas check" in said
    play(acceptance, TRUE, 500, chance)
    (said,) = acceptance.watch.take()
    assert "back" in said
    assert acceptance.watch.take() == []


@pytest.mark.parametrize("seed", range(4))
def test_a_mediocre_drafter_is_not_called_collapsed(seed: int) -> None:
    acceptance = Acceptance(4)
    play(acceptance, [0.35] * 4, 3000, random.Random(seed))
    assert acceptance.watch.take() == []
