"""Trees where passes are captured: grown where they pay, and no burden where they do not."""

from statistics import mean

import pytest

from engine.depth_cells import on as controller_on
from engine.simulated_device import LARGE, SMALL_WITH_LEAN_HOST, WITH_TREES, Device, Served, serve_on
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import RowFacts
from eyas.plan.shapes import CAPTURED_TREES

MIDDLING = [0.6, 0.55, 0.5, 0.5, 0.5, 0.5, 0.5]
CAUGHT = (0.4, 0.15, 0.08)
"""Of what first candidates miss, what the next ones catch."""


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


@pytest.mark.parametrize("users", [1, 4])
def test_trees_are_grown_where_they_pay(users: int) -> None:
    chains = served(LARGE, users=users, siblings=CAUGHT, trees=False)
    trees = served(LARGE, users=users, siblings=CAUGHT, trees=True)
    assert mean(run.rate(100) for run in trees) > 1.04 * mean(run.rate(100) for run in chains)
    grown = [sum(shape.kind == "tree" for shape in run.shapes[100:]) for run in trees]
    assert min(grown) > 200


@pytest.mark.parametrize("device", [LARGE, SMALL_WITH_LEAN_HOST], ids=["8B", "135M"])
def test_where_siblings_are_never_right_trees_cost_next_to_nothing(device: Device) -> None:
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
