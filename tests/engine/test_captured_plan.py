"""Where passes are captured and a step is in flight: useless drafts cost nothing, and good ones gain."""

import json
import random
from itertools import pairwise
from math import inf
from statistics import mean

import pytest

from engine.simulated_device import LARGE, SHAPES, SMALL, SMALL_WITH_LEAN_HOST, Device, Fixed, serve_on
from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedPrices, CapturedShapes, plan_captured
from eyas.engine.speculation.controller import Controller, RowFacts
from eyas.engine.speculation.cost_model import CostCurve, CostModel
from eyas.engine.speculation.observations import DraftTiming, Rehearsal, RoundOutcome, TargetTiming
from eyas.engine.speculation.planner import Planner, Situation
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.step_report import StepReport
from eyas.engine.speculation.step_times import WholeStepTimes
from eyas.plan.shapes import Batch

GOOD, USELESS = [0.73, 0.71, 0.68, 0.66, 0.66, 0.66, 0.66], [0.0] * 7
DEVICES = {"135M": SMALL, "135M, lean host": SMALL_WITH_LEAN_HOST, "8B": LARGE}


def controller_on(device: Device, *, rehearsed: bool = True) -> Controller:
    controller = Controller()
    controller.runs_graphs()
    controller.overlaps()
    controller.captures(SHAPES)
    if rehearsed:
        controller.rehearse(device.rehearsal())
    return controller


@pytest.mark.parametrize("users", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("name", ["135M, lean host", "8B"])
def test_auto_comes_to_the_gain_of_the_best_depth_within_200_steps(name: str, users: int) -> None:
    device = DEVICES[name]
    steps = max(100, 800 // users)
    fixed = [serve_on(Fixed(d), device, lambda _: GOOD, users=users, steps=steps).rate() for d in (0, *SHAPES.depths)]
    plain, best = fixed[0], max(fixed)
    runs = [
        serve_on(controller_on(device), device, lambda _: GOOD, users=users, steps=200, seed=seed)
        for seed in range(max(1, 8 // users))
    ]
    rate = mean(run.rate() for run in runs)
    if best > 1.03 * plain:
        assert rate > plain + 0.95 * (best - plain) - 0.03 * best, "from the first step on; 3 % for luck"
    else:
        assert rate > 0.98 * plain


@pytest.mark.parametrize("rehearsed", [True, False], ids=["rehearsed", "unrehearsed"])
@pytest.mark.parametrize("users", [1, 16, 64, 256])
@pytest.mark.parametrize("name", ["135M, lean host", "8B"])
def test_a_useless_drafter_costs_no_more_than_two_percent(name: str, users: int, rehearsed: bool) -> None:
    device = DEVICES[name]
    plain = serve_on(Fixed(0), device, lambda _: USELESS, users=users, steps=50).rate()
    run = serve_on(controller_on(device, rehearsed=rehearsed), device, lambda _: USELESS, users=users, steps=300)
    assert run.rate() > 0.98 * plain, "what it tries first included"
    assert run.rate(100) > 0.99 * plain


@pytest.mark.parametrize("name", DEVICES)
def test_one_user_starts_at_depth_after_a_rehearsal(name: str) -> None:
    controller = controller_on(DEVICES[name])
    choice = controller.choose([RowFacts(key=0, context=50)])
    assert choice.depths[0] > 0, choice.reason


def test_a_collapse_and_a_return_are_noticed() -> None:
    def chances(step: int) -> list[float]:
        return USELESS if 150 <= step < 400 else GOOD

    plain = serve_on(Fixed(0), LARGE, lambda _: GOOD, users=16, steps=50).rate()
    run = serve_on(controller_on(LARGE), LARGE, chances, users=16, steps=700)
    assert run.rate(0, 150) > 1.6 * plain
    assert run.rate(200, 400) > 0.98 * plain
    assert run.rate(550) > 1.6 * plain


def test_a_budget_is_shared_where_verifying_all_is_dear() -> None:
    """Half of the drafts are nearly sure, and the device knows which."""
    fixed = [
        serve_on(Fixed(d), LARGE, lambda _: [0.5] * 7, users=128, steps=100, spread=0.49).rate() for d in (1, 2, 3)
    ]
    run = serve_on(controller_on(LARGE), LARGE, lambda _: [0.5] * 7, users=128, steps=150, spread=0.49)
    assert sum(budget is not None for budget in run.budgets[50:]) > 50
    assert run.rate(50) > 1.05 * max(fixed)


# --- shapes and plans ----------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_next_bucket() -> None:
    shapes = CapturedShapes(rows=(1, 4, 64, 100), depths=(1, 3), most_tokens=256, flat=True)
    assert [shapes.rows_for(rows) for rows in (1, 2, 64, 65, 100)] == [1, 4, 64, 100, 100]
    assert [shapes.depth_for(depth) for depth in range(5)] == [0, 1, 3, 3, 4]
    assert shapes.depths_for(60) == [1, 3]
    assert shapes.depths_for(70) == [1], "400 tokens are too many"
    assert shapes.flat_tokens(4, 3) == [], "16 tokens take as long as 4"
    assert shapes.flat_tokens(60, 3) == [112, 160, 208]
    assert shapes.tokens_for(60, 3, 50) == 112
    assert shapes.tokens_for(60, 3, 53) == 160
    assert shapes.tokens_for(60, 3, 150) is None
    assert shapes.tokens_for(60, 3, None) is None


def batch_of(rows: int, survivals: list[float], *, fixed: tuple[int, ...] = ()) -> Batch:
    return Batch(
        rows=rows,
        levels={0: rows - len(fixed)},
        survivals={0: survivals},
        fixed=[sum(depth >= at for depth in fixed) for at in range(1, 8)],
        fixed_tokens=0.0,
    )


def test_padding_is_paid_for() -> None:
    shapes = CapturedShapes(rows=(64, 128), depths=(1,), most_tokens=1024, flat=True)
    assert shapes.flat_tokens(65, 1) == [160, 192, 224]
    prices = CapturedPrices(verify=lambda tokens: float(tokens), draft=lambda depth: 0.0, step=lambda passes, _: passes)
    plain, best = plan_captured(batch_of(65, [0.9]), shapes, prices, lambda depth, part: part)
    assert plain.seconds == 128
    assert best is not None
    assert best.seconds == 160, "a flat pass has room for all 65 drafts"
    assert best.budget == 65


def test_where_a_depth_is_fixed_all_drafts_are_verified() -> None:
    shapes = CapturedShapes(rows=(64,), depths=(1, 3), most_tokens=1024, flat=True)
    prices = CapturedPrices(verify=lambda tokens: float(tokens), draft=lambda depth: 9.0, step=lambda passes, _: passes)
    plain, best = plan_captured(batch_of(64, [0.9] * 3, fixed=(2,)), shapes, prices, lambda depth, part: 1.0)
    assert plain.seconds == 64 * 4 + 9.0, "as deep as the pass that holds it"
    assert best is not None
    assert best.budget is None
    assert best.seconds == plain.seconds


def test_what_a_part_of_the_drafts_gives_is_told_by_their_confidence() -> None:
    acceptance = Acceptance(7)
    assert acceptance.kept(2, 1.0) == pytest.approx(1.0)
    assert acceptance.kept(2, 0.5) == pytest.approx(1 / (1 + 0.95 * 0.6)), "the shallow half"
    for number in range(64):
        sure = [0.99 if number % 2 else 0.01] * 2
        acceptance.observe(RoundOutcome(key=0, drafted=2, accepted=2 * (number % 2), confidences=sure))
    acceptance.refresh()
    assert acceptance.kept(2, 0.5) > 0.95
    assert acceptance.kept(2, 0.25) == pytest.approx(0.5, abs=0.05)


def test_what_a_part_gives_is_the_same_draft_by_draft() -> None:
    acceptance, chance = Acceptance(7), random.Random(3)
    for _ in range(60):
        sure = [chance.random() for _ in range(5)] if chance.random() < 0.9 else [1.0] * 5
        accepted = next((at for at, p in enumerate(sure) if chance.random() > p), 5)
        acceptance.observe(RoundOutcome(key=0, drafted=5, accepted=accepted, confidences=sure))
    acceptance.refresh()
    survivals = []
    for row in acceptance._offered:
        survival = 1.0
        for one in acceptance.chances_of(row):
            survival *= one
            survivals.append(survival)
    survivals.sort(reverse=True)
    for part in (0.2, 0.5, 0.8):
        most = round(part * len(survivals))
        assert acceptance.kept(5, most / len(survivals)) == pytest.approx(sum(survivals[:most]) / sum(survivals))


def test_a_plan_that_stays_the_same_is_made_ever_more_rarely_until_something_changes() -> None:
    costs, acceptance = CostModel(), Acceptance(7)
    costs.shapes = CapturedShapes(rows=(1, 4), depths=(1, 3), most_tokens=64)
    costs.verify.rehearse({1: 1.0, 16: 1.1})
    for depth in (1, 3):
        costs.chain_of(depth).rehearse({1: 0.1, 4: 0.1})
    planner, made = Planner(costs, acceptance, WholeStepTimes(), trees=False), []
    make = planner._make
    planner._make = lambda *asked: (made.append(step), make(*asked))[1]  # type: ignore[method-assign]
    for step in range(800):
        good = step < 600
        acceptance.observe(RoundOutcome(key=0, drafted=3, accepted=3 if good else 0, confidences=[0.9] * 3))
        planner.plan(Situation([RowFacts(0, 100), RowFacts(1, 100)]), step, 7)
    gaps = [after - before for before, after in pairwise(at for at in made if 150 < at < 600)]
    assert max(gaps) == POLICY.settled_plan_steps
    assert next(at for at in made if at >= 600) < 600 + POLICY.latest_rounds + POLICY.change_check_every


# --- rehearsals ----------------------------------------------------------------------------------------------------


def test_a_rehearsal_is_believed_until_there_are_times_and_moved_by_them() -> None:
    curve = CostCurve()
    assert not curve.tells_any
    curve.rehearse({1: 0.1, 64: 0.2, 256: 0.6})
    assert curve.tells_any
    assert curve.reaches(256)
    assert curve.at(64) == pytest.approx(0.2)
    assert curve.at(160) == pytest.approx(0.4)
    assert curve.at(448) == pytest.approx(1.0), "as from 64 to 256"
    for _ in range(3):
        curve.observe(64, 0.3)
    assert curve.at(64) == pytest.approx(0.3), "contexts are read in real passes"
    assert curve.at(256) == pytest.approx(0.7)
    for _ in range(3000):
        curve.observe(1, 0.1)
    assert curve.at(256) == pytest.approx(0.6, abs=0.11), "not forgotten with the times"


def test_passes_of_one_request_are_timed_apart() -> None:
    controller = controller_on(LARGE, rehearsed=False)
    for _ in range(4):
        for rows, seconds in ((1, 0.6), (4, 0.8)):
            timing = TargetTiming(tokens=4, context=0, seconds=seconds, rows=rows)
            controller.observe(StepReport(target=timing))
    prices = [controller._planner.captured_prices(Situation([RowFacts(k, 9) for k in range(rows)])) for rows in (1, 4)]
    assert [each.verify(4) for each in prices] == [pytest.approx(0.6), pytest.approx(0.8)]


def test_depths_that_were_never_timed_are_in_line_with_others() -> None:
    costs = CostModel()
    assert costs.chain(2, 16) == float("inf")
    for depth, seconds in ((1, 1.0), (3, 2.0)):
        for _ in range(3):
            costs.observe_draft(DraftTiming(passes=depth, tokens=0, seconds=seconds, rows=16))
    assert costs.chain(2, 16) == pytest.approx(1.5)
    assert costs.chain(5, 16) == pytest.approx(3.0)


def test_a_rehearsal_says_what_a_rest_costs() -> None:
    controller = controller_on(LARGE, rehearsed=False)
    controller.rehearse(Rehearsal(verify={1: 1.0}, draft={1: {1: 0.1}}, catch_up={1: 0.5, 64: 2.0}))
    assert controller._probing.debt([RowFacts(key=0, context=9, pending=20)]) == pytest.approx(0.5)
    assert controller._probing.debt([RowFacts(key=0, context=9, pending=2)]) == 0.0


@pytest.mark.parametrize("users", [1, 16])
def test_answers_that_turn_from_hard_to_easy_and_back_gain_more_than_plainly_or_three_deep(users: int) -> None:
    """Small models repeat themselves: what nobody could guess is followed by what everybody can."""

    def chances(step: int) -> list[float]:
        return [0.1 if step % 200 < 100 else 0.99] * 7

    device = SMALL_WITH_LEAN_HOST
    fixed = [serve_on(Fixed(depth), device, chances, users=users, steps=1000).rate() for depth in (0, 3)]
    runs = [serve_on(controller_on(device), device, chances, users=users, steps=1000, seed=seed) for seed in range(3)]
    assert sum(run.rate() for run in runs) / 3 > max(fixed)


def test_the_report_tells_what_whole_steps_took_beside_what_was_expected() -> None:
    controller = controller_on(LARGE)
    serve_on(controller, LARGE, lambda _: GOOD, users=16, steps=300, noise=0.0)
    by_depth = controller.report()["steps_by_depth_and_requests"]
    often = [told for by_requests in by_depth.values() for told in by_requests.values() if told["steps"] > 20]
    assert often
    assert all(told["seconds"] == pytest.approx(told["expected"], rel=0.15) for told in often)
    json.dumps(controller.report(), allow_nan=False)  # it goes to /status


def test_a_price_is_corrected_by_what_steps_like_it_took_whatever_single_ones_waited_for() -> None:
    costs, times = CostModel(), WholeStepTimes()
    planner = Planner(costs, Acceptance(7), times, trees=False)
    situation = Situation([RowFacts(0, 100)])
    price = planner.captured_prices(situation).step
    before = price(1e-3, 3), price(1e-3, 5)
    for number in range(100):
        times.observe(1, 40e-3 if number % 10 == 0 else 0.8e-3, 1e-3, depth=3, trees=False)
    assert 0.8 * before[0] < price(1e-3, 3) < 0.85 * before[0]
    assert price(1e-3, 5) == before[1]


def test_a_step_that_had_no_price_yet_stays_out_of_the_report() -> None:
    times = WholeStepTimes()
    times.observe(1, 0.1, inf, depth=0, trees=False)
    assert times.report() == {}
    times.observe(1, 0.1, 0.2, depth=0, trees=False)
    assert times.report() == {"depth 0": {1: {"steps": 1, "seconds": 0.1, "expected": 0.2}}}
