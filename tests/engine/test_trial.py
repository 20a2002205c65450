"""Trials: drafting for a while although that does not seem to pay."""

import pytest

from engine.simulated_device import SMALL_WITH_LEAN_HOST, serve_on
from engine.test_captured_plan import controller_on
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.exploration import Exploration
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.trial import DraftTrial

HARD, EASY = [0.1] * 7, [0.99] * 7


def test_a_trial_has_lost_what_lies_behind_its_best() -> None:
    trial = DraftTrial(plain=1.0)
    for saved, accepted in ((2.0, 3), (-0.5, 0), (-0.5, 0), (0.25, 1)):
        trial.take(saved, accepted)
    assert trial.saved == pytest.approx(1.25)
    assert trial.lost == pytest.approx(0.75)
    assert (trial.steps, trial.accepted) == (4, 4)


def test_what_a_trial_gains_pays_for_others_and_what_it_loses_is_owed() -> None:
    probes = Exploration()
    good, bad = DraftTrial(plain=1.0), DraftTrial(plain=1.0)
    good.take(5.0, 6)
    for _ in range(4):
        bad.take(-1.0, 0)
    probes.end_trial(10, good)
    assert probes.put_by == pytest.approx(5.0)
    probes.end_trial(20, bad)
    assert (probes.put_by, probes.lost) == (pytest.approx(1.0), 0.0)
    probes.end_trial(30, bad)
    assert (probes.put_by, probes.lost) == (0.0, pytest.approx(3.0))
    probes.end_trial(40, good)
    assert (probes.put_by, probes.lost) == (pytest.approx(2.0), 0.0), "debts come first"


def test_a_trial_that_paid_is_soon_followed_by_another_and_one_that_lost_by_none_for_longer() -> None:
    good, bad = DraftTrial(plain=1.0), DraftTrial(plain=1.0)
    good.take(1.0, 1)
    bad.take(-4.0, 0)
    paid, lost = Exploration(), Exploration()
    paid.end_trial(0, good)
    lost.end_trial(0, bad)
    assert paid.steps_left(0) == POLICY.probe_shortest_wait < lost.steps_left(0)


def test_steps_of_a_trial_without_a_hit_make_a_drafter_hopeless() -> None:
    probes, bad = Exploration(), DraftTrial(plain=1.0)
    for _ in range(POLICY.hopeless_misses):
        bad.take(-0.5, 0)
    probes.end_trial(0, bad)
    assert probes.hopeless


def test_a_trial_that_came_to_nothing_is_no_hit() -> None:
    probes = Exploration()
    probes.misses = 6
    probes.end_trial(0, DraftTrial(plain=1.0))
    assert probes.misses == 6


def test_an_easy_passage_behind_a_hard_one_is_tried_and_drafted_for() -> None:
    device = SMALL_WITH_LEAN_HOST
    for seed in range(4):
        run = serve_on(
            controller_on(device), device, lambda step: HARD if step < 200 else EASY, users=1, steps=700, seed=seed
        )
        hard, easy = run.depths[100:200], run.depths[450:]
        assert sum(depth > 0 for depth in hard) < 0.35 * len(hard)
        assert sum(depth > 1 for depth in easy) > 0.8 * len(easy)


def test_one_step_that_something_else_made_late_ends_no_trial() -> None:
    trial = DraftTrial(plain=1.0)
    trial.take(-100.0, 2)
    assert trial.lost < POLICY.trial_most_loss * trial.plain


@pytest.mark.parametrize("thinking", [0.0, 0.4e-3])
def test_what_the_controller_takes_is_no_price_of_the_step(thinking: float) -> None:
    costs = CostModel()
    costs.overlap()
    for _ in range(1 + POLICY.host_samples):
        costs.observe_step(1, 0.7e-3 + thinking, passes=0.5e-3, depth=3, thinking=thinking)
    assert costs.step(1, 0.5e-3, depth=3) == pytest.approx(0.7e-3)
