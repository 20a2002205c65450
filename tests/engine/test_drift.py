"""The drift alarm fires on planted drift and nothing else, and its depth limit is kept."""

import random
from collections.abc import Sequence
from math import exp

import pytest

from each import each
from engine.simulated import GPU, GREAT, serve
from eyas.drafter.drift import conditional_acceptance, log_sizes, slope
from eyas.engine.speculation.controller import Controller, RowFacts
from eyas.engine.speculation.drift import BEARABLE, CHECKUPS, FEWEST_CHECKUPS, DriftAlarm

DEPTH = 7
MASS = {"sink": [0.05] * DEPTH, "own": [0.1 * d for d in range(DEPTH)]}


def show(alarm: DriftAlarm, growth: float, count: int, *, noise: float = 0.1, seed: int = 0) -> None:
    """Check-ups of a state that grows by this per depth, with noise in each round."""
    chance = random.Random(seed)
    for _ in range(count):
        each, scale = growth + chance.gauss(0, noise), chance.uniform(1, 40)
        alarm.observe_checkup([scale * exp(each * d + chance.gauss(0, noise)) for d in range(DEPTH)], MASS)


def draft(alarm: DriftAlarm, chances: Sequence[float], rounds: int, *, depth: int = DEPTH, seed: int = 0) -> None:
    """Rounds with these conditional acceptance probabilities."""
    chance = random.Random(seed)
    for _ in range(rounds):
        accepted = next((d for d in range(depth) if chance.random() >= chances[d]), depth)
        alarm.observe_round(depth, accepted)


# --- formulas ------------------------------------------------------------------------------------------------------


def test_formulas() -> None:
    assert slope(log_sizes([2.0 * 1.05**d for d in range(16)])) == pytest.approx(0.0487902)
    assert slope([1.0, float("nan"), 3.0, float("inf")]) == pytest.approx(1.0)
    assert slope([1.0]) != slope([1.0]), "one depth has no slope"
    assert log_sizes([0.0])[0] < -60
    assert conditional_acceptance([10, 8, 2]) == pytest.approx([0.8, 0.25])
    assert conditional_acceptance([4, 0, 0])[1] != conditional_acceptance([4, 0, 0])[1], "never reached"


# --- growth --------------------------------------------------------------------------------------------------------


@each("seed", range(20))
def test_flat_states_raise_no_alarm_however_noisy(seed: int) -> None:
    alarm = DriftAlarm(DEPTH)
    show(alarm, 0.0, 600, noise=0.2, seed=seed)
    assert alarm.take() == []
    assert alarm.report().fired == 0
    assert alarm.deepest == DEPTH


@each("growth", [0.15, 0.3, 0.6])
def test_growth_fires_once_with_its_evidence_and_leaves_the_tolerable_depths(growth: float) -> None:
    alarm = DriftAlarm(DEPTH)
    show(alarm, growth, FEWEST_CHECKUPS - 1, noise=0.05)
    assert alarm.take() == [], "too few check-ups"
    show(alarm, growth, 2 * CHECKUPS, noise=0.05)
    (event,) = alarm.take()
    assert "the fed-back state grows by" in event
    assert "no deeper than" in event
    assert exp(growth * (alarm.deepest - 1)) <= BEARABLE * 1.1 < exp(growth * DEPTH)
    report = alarm.report()
    assert (report.firing, report.fired, list(report.signs)) == (True, 1, ["growth"])
    assert report.growth.low < growth < report.growth.high
    assert report.rms[-1] / report.rms[0] == pytest.approx(exp(6 * growth), rel=0.3)
    assert report.mass["own"] == pytest.approx(MASS["own"])


def test_a_state_that_overflows_has_grown() -> None:
    alarm = DriftAlarm(DEPTH)
    for _ in range(FEWEST_CHECKUPS):
        alarm.observe_checkup([1.0, 9.0, float("inf"), *[float("nan")] * 4], MASS)
    assert alarm.report().firing
    assert alarm.deepest == 1


def test_growth_at_the_bound_does_not_flicker() -> None:
    alarm, bound = DriftAlarm(DEPTH), log_sizes([BEARABLE])[0] / (DEPTH - 1)
    show(alarm, 2 * bound, CHECKUPS, noise=0.03)
    fired = alarm.take()
    show(alarm, bound, 40 * CHECKUPS, noise=0.03)
    assert len(fired) == 1
    assert alarm.report().fired <= 2, "a thousand check-ups at the bound itself"
    alarm.take()
    show(alarm, 0.0, CHECKUPS, noise=0.03)
    assert not alarm.report().firing
    assert alarm.deepest == DEPTH
    assert "as deep as pays again" in alarm.take()[-1]


# --- fading --------------------------------------------------------------------------------------------------------


@each("seed", range(10))
@each("chances", [[0.5] * 7, [0.8, 0.76, 0.72, 0.69, 0.65, 0.62, 0.59], [0.3] * 7])
def test_a_gentle_decline_raises_no_alarm(chances: list[float], seed: int) -> None:
    alarm = DriftAlarm(DEPTH)
    draft(alarm, chances, 3000, seed=seed)
    assert alarm.take() == []
    assert alarm.deepest == DEPTH


def test_acceptance_that_ends_at_a_depth_fires_there_and_clears_by_check_ups() -> None:
    alarm = DriftAlarm(DEPTH)
    draft(alarm, [0.8, 0.8, 0.8, 0.1, 0.5, 0.5, 0.5], 400)
    (event,) = alarm.take()
    assert "drafts of depth 4" in event
    assert alarm.deepest == 3
    draft(alarm, [0.8] * 7, 3000, depth=3, seed=1)
    assert alarm.deepest == 3, "nothing new is known about depth 4"
    draft(alarm, [0.8] * 7, 800, seed=2)  # as check-ups report in the end
    assert alarm.deepest == DEPTH
    assert "fading has passed" in alarm.take()[0]


# --- the controller ------------------------------------------------------------------------------------------------


def test_requests_on_auto_keep_to_the_healthy_depth_and_fixed_ones_to_their_own() -> None:
    controller = Controller(DEPTH)
    before = serve(controller, GPU, GREAT, users=4, steps=400)
    assert max(before.depths[-1]) > 3, "there is something to limit"
    show(controller.drift, 0.3, CHECKUPS, noise=0.02)
    assert controller.drift.deepest == 3
    rows = [RowFacts(key=key, context=100, pending=2) for key in range(4)]
    fixed = RowFacts(key=9, context=100, mode="fixed", depth=6, pending=2)
    for _ in range(50):
        choice = controller.choose([*rows, fixed])
        assert max(choice.depths[:4]) <= 3
        assert choice.depths[4] == 6
    assert "no deeper than 3, since the drift alarm has fired" in choice.reason
    assert "drift alarm" in controller.events()[0]
    assert controller.events() == []
    assert controller.report()["drift"]["signs"]["growth"]
    show(controller.drift, 0.0, CHECKUPS, noise=0.02)
    assert max(serve(controller, GPU, GREAT, users=4, steps=50).depths[-1]) > 3, "lifted"


def test_the_report_is_json_from_the_beginning() -> None:
    import json

    alarm = DriftAlarm(DEPTH)
    empty = json.loads(json.dumps(alarm.report().as_json(), allow_nan=False))
    assert empty["growth"] == {"value": None, "low": None, "high": None}
    show(alarm, 0.0, 2)
    json.dumps(alarm.report().as_json(), allow_nan=False)


def test_equal_rounds_may_be_observed_at_once() -> None:
    one_by_one, at_once = DriftAlarm(DEPTH), DriftAlarm(DEPTH)
    for accepted, times in ((3, 40), (0, 25), (DEPTH, 7), (1, 200)):
        for _ in range(times):
            one_by_one.observe_round(DEPTH, accepted)
        at_once.observe_round(DEPTH, accepted, times)
    assert at_once.report().acceptance == pytest.approx(one_by_one.report().acceptance)
    assert [at_once.fading(depth).low for depth in range(2, DEPTH + 1)] == pytest.approx(
        [one_by_one.fading(depth).low for depth in range(2, DEPTH + 1)]
    )
