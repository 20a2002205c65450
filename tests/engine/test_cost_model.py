"""Costs are learnt from the times of passes, whatever their shape, and neither warm-ups nor outliers disturb them."""

import random
from collections.abc import Callable
from math import inf

import pytest

from eyas.engine.speculation.cost_model import CostCurve, CostModel, bucket_of
from eyas.engine.speculation.observations import DraftTiming
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.step_times import WholeStepTimes


def curve_of(times: dict[int, float]) -> CostCurve:
    """A curve that has seen each of these times often enough."""
    curve = CostCurve()
    for count, seconds in times.items():
        for _ in range(3):
            curve.observe(count, seconds)
    return curve


def test_what_was_never_timed_costs_infinity() -> None:
    curve = CostCurve()
    assert curve.at(1) == inf
    assert curve.at(0) == 0.0
    assert not curve.tells(1)


def test_the_first_time_of_a_shape_is_dropped() -> None:
    curve = CostCurve()
    curve.observe(4, 30.0)  # a compilation
    assert curve.at(4) == inf
    for _ in range(2):
        curve.observe(4, 0.01)
    assert curve.at(4) == 0.01


def test_buckets_are_single_counts_up_to_sixteen_and_end_at_powers_of_two() -> None:
    assert [bucket_of(count) for count in range(17)] == list(range(17))
    for count in range(1, 2000):
        assert count <= bucket_of(count) < count * 1.125 + 1
        assert bucket_of(bucket_of(count)) == bucket_of(count)
    assert {bucket_of(2**power) for power in range(12)} == {2**power for power in range(12)}
    assert {bucket_of(count, 1) for count in range(1, 65)} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("seed", range(5))
def test_outliers_do_not_move_a_curve(seed: int) -> None:
    chance, curve = random.Random(seed), CostCurve()
    for _ in range(200):
        late = chance.uniform(3, 50) if chance.random() < 0.1 else 1.0
        curve.observe(4, 0.1 * late * chance.lognormvariate(0, 0.03))
    assert curve.at(4) == pytest.approx(0.1, rel=0.03)


def test_one_outlier_among_the_first_times_does_no_harm() -> None:
    for place in range(3):
        curve = CostCurve()
        for number in range(3):
            curve.observe(1, 9.0 if number == place else 0.1)
        assert curve.at(1) == 0.1


def test_time_is_linear_between_buckets_and_goes_on_past_the_last() -> None:
    curve = curve_of({1: 0.1, 4: 0.16, 8: 0.28})
    assert curve.at(2) == pytest.approx(0.12)
    assert curve.at(6) == pytest.approx(0.22)
    assert curve.at(16) == pytest.approx(0.28 + 8 * 0.03), "as from 4 to 8"


def test_a_flat_curve_is_not_trusted_to_stay_flat() -> None:
    curve = curve_of({1: 0.1, 8: 0.1})
    assert curve.at(8) == pytest.approx(0.1)
    assert curve.at(16) == pytest.approx(0.11), "a tenth of what the tokens before cost on average"


def test_one_bucket_alone_says_that_time_is_proportional_to_tokens() -> None:
    curve = curve_of({4: 0.2})
    assert curve.at(2) == pytest.approx(0.1)
    assert curve.at(12) == pytest.approx(0.6)
    assert not curve.tells(12)
    assert curve_of({4: 0.2, 5: 0.3}).tells(12)


@pytest.mark.parametrize("seed", range(5))
def test_more_tokens_are_never_expected_to_take_less(seed: int) -> None:
    chance, curve = random.Random(seed), CostCurve()
    for _ in range(300):
        count = chance.randint(1, 80)
        curve.observe(count, (0.1 + 0.001 * count) * chance.lognormvariate(0, 0.2))
    expected = [curve.at(count) for count in range(1, 120)]
    assert expected == sorted(expected)


def test_jumps_are_kept() -> None:
    curve = curve_of({count: 0.1 if count <= 16 else 0.3 for count in (1, 4, 8, 12, 16, 18, 24, 32)})
    assert curve.at(16) == pytest.approx(0.1)
    assert curve.at(17) == pytest.approx(0.3)


def grow(curve: CostCurve, seconds: Callable[[int, int], float], chance: random.Random, requests: int = 20) -> None:
    """Requests one after the other, whose contexts grow step by step."""
    for _ in range(requests):
        context, left = chance.randint(50, 2000), chance.randint(50, 200)
        for step in range(left):
            tokens = chance.choice((1, 4))
            late = chance.uniform(3, 10) if chance.random() < 0.02 else 1.0
            curve.observe(
                tokens, seconds(tokens, context + step) * late * chance.lognormvariate(0, 0.03), context + step
            )


@pytest.mark.parametrize("seed", range(4))
def test_context_has_a_term_of_its_own(seed: int) -> None:
    curve = CostCurve()
    grow(curve, lambda tokens, context: 0.05 + 0.01 * tokens + 2e-5 * context, random.Random(seed))
    assert curve.per_context_token == pytest.approx(2e-5, rel=0.3)
    assert curve.at(4, 3000) == pytest.approx(0.09 + 0.06, rel=0.12)


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_not_taken_for_a_slope(seed: int) -> None:
    curve = CostCurve()
    grow(curve, lambda tokens, context: 0.05, random.Random(seed))
    assert curve.per_context_token * 2000 < 0.02 * 0.05


def test_a_machine_that_changes_is_followed() -> None:
    curve = curve_of({1: 0.1, 4: 0.4})
    for _ in range(POLICY.cost_window):
        curve.observe(1, 0.3)
    assert curve.at(1) == pytest.approx(0.3)


def test_a_bucket_that_nobody_visits_is_forgotten_and_its_neighbours_speak_for_it() -> None:
    curve = curve_of({1: 0.1, 4: 9.0, 8: 0.2})
    for _ in range(POLICY.cost_stale_after + 200):
        curve.observe(1, 0.1)
        curve.observe(8, 0.2)
    assert list(curve.known) == [1, 8]
    assert curve.at(4) == pytest.approx(0.1 + 0.1 * 3 / 7)


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_a_draft_costs_its_passes_also_at_depths_that_never_ran(depth: int) -> None:
    costs = CostModel()
    for _ in range(30):
        costs.observe_draft(DraftTiming(passes=4, tokens=4 * 16, seconds=4 * 0.005))
    assert costs.draft(depth, 16, (depth - 1) * 16) == pytest.approx(depth * 0.005)
    assert costs.draft(depth, 1, depth - 1) == pytest.approx(depth * 0.005), "fewer tokens are not taken to be cheaper"
    assert costs.draft(0, 0, 0) == 0.0


def test_a_first_pass_that_was_timed_by_itself_is_told_apart() -> None:
    costs = CostModel()
    for _ in range(8):
        costs.observe_draft(DraftTiming(passes=3, tokens=5, seconds=0.009, first=(3, 0.005)))
    assert costs.further(1, 1) == pytest.approx(0.002)
    assert costs.draft(1, 3, 0) == pytest.approx(0.005)
    assert costs.draft(3, 3, 2) == pytest.approx(0.009)


def test_a_first_pass_has_to_do_for_others_until_there_were_any() -> None:
    costs = CostModel()
    for _ in range(4):
        costs.observe_draft(DraftTiming(passes=1, tokens=2, seconds=0.005))
    assert costs.draft(2, 2, 2) == pytest.approx(0.010)
    for _ in range(4):
        costs.observe_draft(DraftTiming(passes=2, tokens=4, seconds=0.007, first=(2, 0.005)))
    assert costs.draft(2, 2, 2) == pytest.approx(0.007)


def test_what_a_step_takes_beside_its_passes_is_learnt_with_drafts_and_without() -> None:
    costs = CostModel()
    assert costs.rest(4, depth=1) == 0.0, "nothing was seen yet"
    for _ in range(4):
        costs.observe_step(4, 0.012, passes=0.01, depth=0)
    assert costs.rest(4, depth=0) == costs.rest(4, depth=1) == pytest.approx(0.002)
    for _ in range(4):
        costs.observe_step(4, 0.015, passes=0.01, depth=1)
    assert costs.rest(4, depth=1) == pytest.approx(0.005)
    assert costs.rest(4, depth=0) == pytest.approx(0.002)


def test_steps_that_overlap_take_as_long_as_the_slower_of_host_and_device() -> None:
    costs = CostModel()
    costs.overlapped = True
    assert costs.step(4, 0.003, depth=0) == 0.003, "nothing was seen yet"
    for _ in range(4):
        costs.observe_step(4, 0.01, passes=0.01, depth=0)
    assert costs.step(4, 0.003, depth=0) == 0.003, "the device was the slower: nothing is known of the host"
    for _ in range(4):
        costs.observe_step(4, 0.005, passes=0.003, depth=0)
    assert costs.step(4, 0.003, depth=0) == pytest.approx(0.005), "the device waited"
    assert costs.step(4, 0.008, depth=1) == pytest.approx(0.008), "drafts are free as long as it would wait"
    for _ in range(30):
        costs.observe_step(4, 0.002, passes=0.002, depth=0)
    assert costs.step(4, 0.001, depth=0) == pytest.approx(0.002), "the host has become faster"


def test_the_host_is_not_thought_slower_for_many_than_it_was_seen_to_be() -> None:
    costs = CostModel()
    costs.overlap()
    for _ in range(3):
        costs.observe_step(1, 0.5e-3, passes=0.4e-3, depth=0)
        costs.observe_step(2, 0.6e-3, passes=0.4e-3, depth=0)
    assert costs.rest(256, depth=0) == pytest.approx(0.6e-3), "what one or two take says nothing of hundreds"
    assert costs.step(256, 2e-3, depth=0) == pytest.approx(2e-3)


def test_the_host_takes_longer_for_deeper_drafts_and_unseen_depths_lie_between() -> None:
    costs = CostModel()
    costs.overlap()
    for depth, seconds in ((0, 1e-3), (7, 2.4e-3)):
        for _ in range(1 + POLICY.host_samples):
            costs.observe_step(64, seconds, passes=0.5e-3, depth=depth)
    assert costs.rest(64, depth=3) == pytest.approx(1.6e-3), "what deep drafts took is not held against shallow ones"
    for _ in range(1 + POLICY.host_samples):
        costs.observe_step(64, 0.9e-3, passes=0.5e-3, depth=1)
    assert costs.rest(64, depth=1) == pytest.approx(1e-3), "no less than without drafts"


def test_what_the_host_does_with_trees_says_nothing_about_chains() -> None:
    costs = CostModel()
    costs.overlap()
    for _ in range(1 + POLICY.host_samples):
        costs.observe_step(1, 0.5e-3, passes=0.4e-3, depth=0)
        costs.observe_step(1, 1.25e-3, passes=1.1e-3, depth=5, trees=True)
    assert costs.step(1, 0.85e-3, depth=3) == 0.85e-3
    assert costs.step(1, 0.9e-3, depth=5) == 0.9e-3
    assert costs.step(1, 1.1e-3, depth=5, trees=True) == pytest.approx(1.25e-3)
    for _ in range(1 + POLICY.host_samples):
        costs.observe_step(1, 1.0e-3, passes=0.8e-3, depth=5)
    assert costs.step(1, 0.8e-3, depth=5) == pytest.approx(1.0e-3)


def test_a_few_late_steps_forbid_no_depth() -> None:
    costs = CostModel()
    costs.overlap()
    for _ in range(4):
        costs.observe_step(1, 0.5e-3, passes=0.45e-3, depth=0)
        costs.observe_step(1, 1.6e-3, passes=0.8e-3, depth=3)  # held for four steps, all of them late
    assert costs.step(1, 0.8e-3, depth=3) == 0.8e-3
    for _ in range(8):
        costs.observe_step(1, 0.9e-3, passes=0.8e-3, depth=3)
    assert costs.step(1, 0.8e-3, depth=3) == pytest.approx(0.9e-3), "most of the times that count were late no longer"


def test_what_the_host_took_for_a_depth_is_forgotten_while_others_run() -> None:
    costs, times = CostModel(), WholeStepTimes()
    costs.overlap()
    for _ in range(1 + POLICY.host_samples):
        costs.observe_step(1, 1.6e-3, passes=0.8e-3, depth=3)
        times.observe(1, 1.6e-3, 0.8e-3, depth=3, trees=False)
    assert costs.step(1, 0.8e-3, depth=3) == pytest.approx(1.6e-3)
    assert times.ratio(1, depth=3) > 1.4
    for _ in range(POLICY.host_stale_after + POLICY.cost_refit_every):
        costs.observe_step(1, 0.6e-3, passes=0.5e-3, depth=1)
        times.observe(1, 0.6e-3, 0.6e-3, depth=1, trees=False)
    assert costs.step(1, 0.8e-3, depth=3) == 0.8e-3, "it is worth a try again"
    assert costs.step(1, 0.5e-3, depth=1) == pytest.approx(0.6e-3), "and what runs stays known"
    assert times.ratio(1, depth=3) == 1.0
