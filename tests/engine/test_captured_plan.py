"""Where passes are captured and a step is in flight: useless drafts cost nothing, and good ones gain."""

import json
from statistics import mean

import pytest

from engine.depth_cells import DEVICES, GOOD, USELESS
from engine.depth_cells import on as controller_on
from engine.simulated_device import LARGE, SHAPES, SMALL_WITH_LEAN_HOST, Fixed, serve_on
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import RowFacts


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


@pytest.mark.parametrize("users", [1, 16])
def test_answers_that_turn_from_hard_to_easy_and_back_gain_more_than_plainly_or_three_deep(users: int) -> None:
    """Small models repeat themselves: what nobody could guess is followed by what everybody can."""

    def chances(step: int) -> list[float]:
        return [0.1 if step % 200 < 100 else 0.99] * 7

    device = SMALL_WITH_LEAN_HOST
    fixed = [serve_on(Fixed(depth), device, chances, users=users, steps=1000).rate() for depth in (0, 3)]
    runs = [serve_on(controller_on(device), device, chances, users=users, steps=1000, seed=seed) for seed in range(3)]
    assert sum(run.rate() for run in runs) / 3 > max(fixed)


def test_the_report_is_json() -> None:
    controller = controller_on(LARGE)
    serve_on(controller, LARGE, lambda _: GOOD, users=16, steps=300)
    json.dumps(controller.report(), allow_nan=False)  # it goes to /status


# --- shapes --------------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_next_bucket() -> None:
    shapes = CapturedShapes(rows=(1, 4, 64, 100), depths=(1, 3), most_tokens=256)
    assert [shapes.rows_for(rows) for rows in (1, 2, 64, 65, 100)] == [1, 4, 64, 100, 100]
    assert [shapes.depth_for(depth) for depth in range(5)] == [0, 1, 3, 3, 4]
    assert shapes.depths_for(60) == [1, 3]
    assert shapes.depths_for(70) == [1], "400 tokens are too many"
