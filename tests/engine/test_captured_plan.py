"""The depth policy with captured passes and a step in flight: useless drafts cost nothing, good ones pay, trees too."""

import json
from statistics import mean

from each import each
from engine.depth_cells import DEVICES, GOOD, USELESS
from engine.depth_cells import on as controller_on
from engine.simulated_device import (
    LARGE,
    SHAPES,
    SMALL_WITH_LEAN_HOST,
    WITH_TREES,
    Device,
    Fixed,
    Served,
    serve_on,
)
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import RowFacts
from eyas.plan.shapes import CAPTURED_TREES


# --- chains --------------------------------------------------------------------------------------------------------
@each("users", [1, 16, 64, 128, 256])
@each("name", ["135M, lean host", "8B"])
def test_auto_reaches_the_gain_of_the_best_depth_within_200_steps(name: str, users: int) -> None:
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


@each("rehearsed", [True, False])
@each("users", [1, 16, 64, 256])
@each("name", ["135M, lean host", "8B"])
def test_a_useless_drafter_costs_no_more_than_two_percent(name: str, users: int, rehearsed: bool) -> None:
    device = DEVICES[name]
    plain = serve_on(Fixed(0), device, lambda _: USELESS, users=users, steps=50).rate()
    run = serve_on(controller_on(device, rehearsed=rehearsed), device, lambda _: USELESS, users=users, steps=300)
    assert run.rate() > 0.98 * plain, "what it tries first included"
    assert run.rate(100) > 0.99 * plain


@each("name", DEVICES)
def test_one_user_starts_to_draft_after_a_rehearsal(name: str) -> None:
    controller = controller_on(DEVICES[name])
    choice = controller.choose([RowFacts(key=0, context=50)])
    assert choice.depths[0] > 0, choice.reason


def test_a_collapse_and_a_recovery_are_noticed() -> None:
    def chances(step: int) -> list[float]:
        return USELESS if 150 <= step < 400 else GOOD

    plain = serve_on(Fixed(0), LARGE, lambda _: GOOD, users=16, steps=50).rate()
    run = serve_on(controller_on(LARGE), LARGE, chances, users=16, steps=700)
    assert run.rate(0, 150) > 1.6 * plain
    assert run.rate(200, 400) > 0.98 * plain
    assert run.rate(550) > 1.6 * plain


@each("users", [1, 16])
def test_answers_that_turn_from_hard_to_easy_and_back_beat_plain_decoding_and_depth_3(users: int) -> None:
    """Small models repeat themselves: what was hard to draft is followed by what is easy."""

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


def test_passes_use_the_next_captured_shape() -> None:
    shapes = CapturedShapes(rows=(1, 4, 64, 100), depths=(1, 3), most_tokens=256)
    assert [shapes.rows_for(rows) for rows in (1, 2, 64, 65, 100)] == [1, 4, 64, 100, 100]
    assert [shapes.depth_for(depth) for depth in range(5)] == [0, 1, 3, 3, 4]
    assert shapes.depths_for(60) == [1, 3]
    assert shapes.depths_for(70) == [1], "400 tokens are too many"


# --- trees ---------------------------------------------------------------------------------------------------------

MIDDLING = [0.6, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5]
CAUGHT = (0.4, 0.15, 0.08)
"""Probabilities that the next candidates are right where the first is wrong."""


def served(
    device: Device, *, users: int, siblings: tuple[float, ...], trees: bool, steps: int = 400, seeds: int = 4
) -> list[Served]:
    runs = []
    for seed in range(seeds):
        controller = controller_on(device)
        if trees:
            controller.captures(WITH_TREES)
        runs.append(
            serve_on(controller, device, lambda _: MIDDLING, users=users, steps=steps, seed=seed, siblings=siblings)
        )
    return runs


@each("users", [1, 4])
def test_trees_are_grown_where_they_pay(users: int) -> None:
    chains = served(LARGE, users=users, siblings=CAUGHT, trees=False)
    trees = served(LARGE, users=users, siblings=CAUGHT, trees=True)
    assert mean(run.rate(100) for run in trees) > 1.04 * mean(run.rate(100) for run in chains)
    grown = [sum(shape.kind == "tree" for shape in run.shapes[100:]) for run in trees]
    assert min(grown) > 200


@each("device", [LARGE, SMALL_WITH_LEAN_HOST])
def test_trees_cost_almost_nothing_where_siblings_are_never_right(device: Device) -> None:
    # One user's luck is a few percent of 400 steps.
    chains = served(device, users=1, siblings=(), trees=False, seeds=16)
    trees = served(device, users=1, siblings=(), trees=True, seeds=16)
    assert mean(run.rate(50) for run in trees) > 0.985 * mean(run.rate(50) for run in chains)
    assert all(sum(shape.kind == "tree" for shape in run.shapes) < 25 for run in trees), "looks alone"


def test_many_requests_draft_chains() -> None:
    (run, *_) = served(LARGE, users=8, siblings=CAUGHT, trees=True, steps=60)
    assert {shape.kind for shape in run.shapes} == {"chain"}


def test_beside_a_fixed_depth_all_draft_chains() -> None:
    controller = controller_on(LARGE)
    controller.captures(WITH_TREES)
    rows = [RowFacts(key=0, context=50), RowFacts(key=1, context=50, mode="fixed", depth=2)]
    assert controller.choose(rows).shape.kind == "chain"
    assert controller.choose(rows[:1]).shape in CAPTURED_TREES, "what trees give is not known to be less"


def test_trees_come_in_their_shapes_for_few_requests() -> None:
    shapes = CapturedShapes(rows=(1, 2, 4, 8), depths=(1, 3), most_tokens=40, trees=CAPTURED_TREES)
    assert [len(shapes.trees_for(rows)) for rows in (1, 2, 3, 5)] == [2, 2, 1, 0]
    small, large = CAPTURED_TREES
    assert [shapes.trees_for(rows) for rows in (2, 4)] == [[small, large], [small]]
