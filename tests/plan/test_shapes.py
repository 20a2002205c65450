"""The drafts that are chosen give the most tokens per second of all sets of drafts, whatever the curve of costs."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from math import ceil, prod
from operator import mul

import pytest

from each import each
from eyas.plan.shapes import Batch, Prices, best_count, plan_chains, plan_nothing, plan_tree, tree_gains

DEPTH = 3


def batch_of(survivals: Sequence[Sequence[float]], fixed: Sequence[int] = (0,) * DEPTH) -> Batch:
    """Requests that are all different."""
    return Batch(
        rows=len(survivals),
        levels=dict.fromkeys(range(len(survivals)), 1),
        survivals=dict(enumerate(survivals)),
        fixed=fixed,
        fixed_tokens=0.0,
    )


def prices_of(verify: Callable[[int], float], draft: float, reads: float = 1.0) -> Prices:
    return Prices(verify=verify, draft=lambda passes, first, further: passes * draft, reads=reads)


CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda tokens: 5.0,
    "linear": lambda tokens: 2.0 + tokens,
    "tiled": lambda tokens: 4.0 + 3 * ceil(tokens / 4),
    "convex": lambda tokens: 4.0 + 0.1 * tokens**2,
    "concave": lambda tokens: 4.0 * tokens**0.5,
}


@each("curve", CURVES)
@each("seed", range(8))
def test_no_set_of_depths_is_better_than_the_one_chosen(curve: str, seed: int) -> None:
    chance = random.Random(seed)
    rows, draft = chance.randint(1, 4), chance.choice((0.05, 0.4, 1.5))
    survivals = [list(accumulate((chance.random() for _ in range(DEPTH)), mul)) for _ in range(rows)]

    def verify(drafts: int) -> float:
        return CURVES[curve](rows + drafts)

    def rate(depths: Sequence[int]) -> float:
        tokens = rows + sum(sum(row[:depth]) for row, depth in zip(survivals, depths, strict=True))
        return tokens / (verify(sum(depths)) + max(depths) * draft)

    plan = plan_chains(batch_of(survivals), prices_of(verify, draft))
    depths = plan.depths(range(rows))
    assert plan.rate == pytest.approx(rate(depths))
    assert plan.drafts == sum(depths)
    assert plan.rate == pytest.approx(max(rate(each) for each in product(range(DEPTH + 1), repeat=rows) if any(each)))


def test_one_more_draft_pays_exactly_if_its_chance_exceeds_the_rate_times_its_seconds() -> None:
    for chance in (0.1, 0.19, 0.21, 0.5):
        batch = batch_of([[chance, 0.0, 0.0]])
        prices = prices_of(lambda drafts: 1.0 + 0.1 * drafts, draft=0.1)
        pays = plan_chains(batch, prices).rate > plan_nothing(batch, prices).rate
        assert pays == (chance > 0.2), "a plain step gives 1 token per second, a draft costs 0.2 seconds"


def test_requests_that_are_alike_share_a_tile_that_has_no_room_for_all() -> None:
    batch = Batch(rows=8, levels={0: 8}, survivals={0: [0.8, 0.1, 0.05]}, fixed=(0, 0, 0), fixed_tokens=0.0)
    plan = plan_chains(batch, prices_of(lambda drafts: 1.0 if drafts <= 4 else 9.0, draft=0.1))
    assert sorted(plan.depths([0] * 8)) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_drafts_of_fixed_requests_are_paid_anyway() -> None:
    alone = plan_chains(batch_of([[0.3, 0.0, 0.0]]), prices_of(lambda drafts: 1.0, draft=0.5))
    assert alone.rate < 1.0
    joined = batch_of([[0.3, 0.0, 0.0]], fixed=(4, 0, 0))
    prices = prices_of(lambda drafts: 1.0, draft=0.5)
    assert plan_chains(joined, prices).rate > plan_nothing(joined, prices).rate, "the pass runs for the others already"


def test_a_plan_fits_requests_that_it_was_not_made_for() -> None:
    batch = Batch(rows=3, levels={-4: 1, 2: 2}, survivals={-4: [0.0] * 3, 2: [0.9] * 3}, fixed=(0,) * 3, fixed_tokens=0)
    plan = plan_chains(batch, prices_of(lambda drafts: 1.0 + 0.01 * drafts, draft=0.01))
    assert plan.depths([2, -4, 2]) == [3, 0, 3]
    assert plan.depths([1, 2, 2, 2, -9]) == [3, 3, 3, 3, 0], (
        "an unknown level is the nearest one; more come than planned"
    )


def test_the_best_count_weighs_values_against_seconds() -> None:
    assert best_count([0.9, 0.5, 0.2], lambda count: 0.3 * count, rate=1.0) == 2
    assert best_count([0.9, 0.5, 0.2], lambda count: 0.3 * count, rate=0.0) == 3
    assert best_count([0.2, 0.2, 0.2], lambda count: 0.5 if count else 0.0, rate=1.0) == 3, (
        "together they pay for a tile"
    )
    assert best_count([], lambda count: 1.0, rate=1.0) == 0


def test_a_tree_without_siblings_is_a_chain() -> None:
    assert tree_gains((0.8, 0.5, 0.25), ()) == pytest.approx([0.8, 1.2, 1.3])


@each("seed", range(4))
def test_a_tree_holds_the_likeliest_nodes_of_those_that_grow(seed: int) -> None:
    """Against all paths, spelt out: a depth's three likeliest nodes get three candidates each."""
    chance = random.Random(seed)
    firsts = tuple(chance.random() for _ in range(3))
    siblings = (0.4, 0.3)

    def chance_of(path: tuple[int, ...]) -> float:
        steps = zip(path, firsts, strict=False)
        return prod(first if rank == 0 else (1 - first) * siblings[rank - 1] for rank, first in steps)

    nodes: list[float] = []
    parents: list[tuple[int, ...]] = [()]
    for _ in range(3):
        level = [(*parent, rank) for parent in parents for rank in range(3)]
        nodes += map(chance_of, level)
        parents = sorted(level, key=chance_of, reverse=True)[:3]
    assert len(nodes) == 3 + 9 + 9
    nodes.sort(reverse=True)
    assert tree_gains(firsts, siblings) == pytest.approx(list(accumulate(nodes)))


def test_a_tree_pays_when_tokens_are_free_and_first_candidates_often_miss() -> None:
    batch = Batch(rows=1, levels={0: 1}, survivals={0: [0.5, 0.25, 0.125]}, fixed=(0, 0, 0), fixed_tokens=0.0)
    siblings = [0.6, 0.2, 0.1]
    free = prices_of(lambda drafts: 5.0, draft=0.5)
    tree = plan_tree(batch, free, [0.5] * 3, siblings)
    assert tree is not None
    assert tree.rate > 1.1 * plan_chains(batch, free).rate
    assert (tree.shape.kind, tree.depths([0])) == ("tree", [3])
    dear = prices_of(lambda drafts: 5.0 + 2 * drafts, draft=0.5)
    tree = plan_tree(batch, dear, [0.5] * 3, siblings)
    assert tree is not None
    assert tree.rate < plan_chains(batch, dear).rate


def test_trees_are_not_considered_without_knowledge_of_siblings_nor_for_many_requests() -> None:
    prices = prices_of(lambda drafts: 5.0, draft=0.5)
    few = Batch(rows=1, levels={0: 1}, survivals={0: [0.5] * 3}, fixed=(0, 0, 0), fixed_tokens=0.0)
    many = Batch(rows=32, levels={0: 32}, survivals={0: [0.5] * 3}, fixed=(0, 0, 0), fixed_tokens=0.0)
    assert plan_tree(few, prices, [0.5] * 3, [0.0] * 3) is None
    assert plan_tree(many, prices, [0.5] * 3, [0.5] * 3) is None
