"""Variants are ranked by tokens per second, which counts the cost of a larger drafter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from variants import DEPTHS, bootstrap, loops, rank, shape_of, table

from eyas.train.recipe_file import load_recipe
from train.batches import batch_of

RECIPES = Path(__file__).parents[2] / "recipes" / "smollm2"
SMALL = {"num_hidden_layers": 1, "intermediate_size": 2048, "draft_vocab_size": 16384}
LARGE = {**SMALL, "num_hidden_layers": 2}


def judged(lengths: dict[int, float]) -> dict[str, Any]:
    """Four answers of ten rounds each, all alike."""
    return {
        str(k): {
            "acceptance_length": length,
            "accepted_at": [(length - 1) / k] * k,
            "rounds": [10.0] * 4,
            "accepted": [10 * (length - 1)] * 4,
        }
        for k, length in lengths.items()
    }


def record_of(**variants: tuple[dict[str, Any], float]) -> dict[str, Any]:
    """Variants by shape and share of accepted drafts; a draft of the larger shape takes twice as long."""
    lengths = {name: {k: 1 + share * k for k in DEPTHS} for name, (_, share) in variants.items()}
    seconds = {shape_of(SMALL): 0.001, shape_of(LARGE): 0.002}
    shapes = {shape: {str(k): 0.010 + k * own for k in DEPTHS} for shape, own in seconds.items()}
    return {
        "configs": {name: config for name, (config, _) in variants.items()},
        "variants": {name: {"0": {"greedy": judged(own)}, "1": {"race": judged(own)}} for name, own in lengths.items()},
        "machines": {"here": {"target": "float32", "plain": 0.010, "shapes": shapes}},
    }


def test_a_longer_acceptance_that_costs_more_than_it_gains_loses() -> None:
    record = record_of(base=(SMALL, 0.5), large=(LARGE, 0.6), better=(SMALL, 0.55))
    rank(record, "here")
    speeds = record["machines"]["here"]["speeds"]
    # At depth 7: 4.5 tokens in 17 ms, 5.2 in 24 ms, 4.85 in 17 ms.
    assert speeds["base"]["0"]["tokens_per_second"] == pytest.approx(4.5 / 0.017)
    assert speeds["large"]["0"]["ratio"][0] == pytest.approx((5.2 / 0.024) / (4.5 / 0.017))
    assert speeds["better"]["1"]["ratio"] == pytest.approx([4.85 / 4.5] * 3)
    rows = [line.split(" | ")[0] for line in table(record, "here").splitlines()[4:]]
    assert rows == ["| better", "| base", "| large"]


def test_each_variant_drafts_as_deep_as_is_best_for_it() -> None:
    record = record_of(base=(SMALL, 0.5), hopeless=(LARGE, 0.1))
    rank(record, "here")
    speeds = record["machines"]["here"]["speeds"]
    assert speeds["base"]["0"]["depth"] == 7
    assert speeds["hopeless"]["0"]["depth"] == 1


def test_intervals_are_bootstrapped_over_answers() -> None:
    generator = np.random.default_rng(1)
    rounds = generator.integers(20, 60, size=200).astype(float)
    base = {"rounds": rounds.tolist(), "accepted": (1.5 * rounds).tolist()}
    noisy = {"rounds": rounds.tolist(), "accepted": (rounds * generator.normal(1.6, 0.5, size=200)).tolist()}
    assert bootstrap(base, base) == pytest.approx(np.ones(1000))
    low, high = np.percentile(bootstrap(noisy, base), (2.5, 97.5))
    assert low < 2.6 / 2.5 < high
    assert high - low < 0.1


def test_answers_that_end_in_a_loop_are_detected() -> None:
    import torch

    varied, looping = list(range(2, 60)), [7, 8] * 40
    ids = torch.tensor([0, *varied, 0, *looping])
    mask = [0, *[1] * len(varied), 0, *[1] * len(looping)]
    batch = batch_of([1 + len(varied), 1 + len(looping)], mask=mask, ids=ids)
    assert loops(batch).tolist() == [False, True]


def test_the_recipes_compare_eight_variants_and_more_each_in_one_thing() -> None:
    recipe = load_recipe(RECIPES / "variants.toml")
    warm = load_recipe(RECIPES / "variants-warm.toml")
    assert len(recipe.drafters) >= 8
    for each in (recipe, warm):
        names = list(each.drafters)
        assert names[0] == "base"
        assert [len(each.drafters[name].model_fields_set) for name in names] == [0] + [1] * (len(names) - 1)
    assert {drafter.drafter.init_from for drafter in warm.drafter_recipes()} == {"smollm2-eagle3.1"}
