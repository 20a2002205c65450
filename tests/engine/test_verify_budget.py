"""Verified tokens go to the drafts that are likeliest to survive, on the host and on a device alike."""

import random
from itertools import accumulate
from math import inf
from operator import mul

import pytest
import torch

from eyas.engine.runner.verify_budget import calibrated_chances, share_budget_on_device
from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.observations import RoundOutcome
from eyas.engine.speculation.verify_budget import share_budget


def test_a_budget_goes_to_the_likeliest() -> None:
    survivals = [[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.05]]
    assert share_budget(survivals, lambda count: inf if count > 3 else 0.0) == [[0, 1], [0], []]
    assert share_budget(survivals, lambda count: 0.35 * count) == [[0, 1], [0, 1], []]
    assert share_budget(survivals, lambda count: 0.0) == [[0, 1, 2], [0, 1, 2], [0]]
    assert share_budget(survivals, lambda count: inf if count > 3 else 0.0, bound=[False, True, False]) == [
        [],
        [0, 1, 2],
        [],
    ]


def test_a_jump_in_cost_is_crossed_where_what_lies_behind_it_is_worth_it() -> None:
    in_tiles = [0.0, 1.0, 1.0, 1.0, 1.0]
    assert share_budget([[0.6, 0.5], [0.3, 0.1]], lambda count: in_tiles[count]) == [[0, 1], [0, 1]]
    assert share_budget([[0.6], [0.3]], lambda count: in_tiles[count]) == [[], []]


@pytest.mark.parametrize("seed", range(40))
def test_the_device_says_the_same(seed: int) -> None:
    source = random.Random(seed)
    rows, depths = source.choice([1, 2, 5, 16]), source.choice([1, 3, 7])
    # Coarse chances, so that ties come up.
    chances = [[source.choice([0.0, 0.25, 0.5, 0.75, 1.0]) for _ in range(depths)] for _ in range(rows)]
    most = [source.randint(0, depths) for _ in range(rows)]
    budget = source.randint(0, rows * depths)
    survivals = [list(accumulate(row[:n], mul)) for row, n in zip(chances, most, strict=True)]
    on_host = share_budget(survivals, lambda count: inf if count > budget else -1e-9 * count)
    assert all(drafts == list(range(len(drafts))) for drafts in on_host), "no draft without those that lead to it"
    depth_R = share_budget_on_device(torch.tensor(chances), torch.tensor(most), torch.tensor(budget))
    assert depth_R.tolist() == [len(drafts) for drafts in on_host]


def test_chances_on_the_device_are_those_of_the_host() -> None:
    source, acceptance = random.Random(0), Acceptance(7)
    for _ in range(200):
        sure = [source.random() for _ in range(5)]
        acceptance.observe(RoundOutcome(key=0, drafted=5, accepted=source.randint(0, 5), confidences=sure))
    acceptance.refresh()
    confidences = [[source.random() for _ in range(7)] for _ in range(6)] + [[0.0] * 7, [1.0] * 7]
    table_C2 = torch.tensor(acceptance.calibration(), dtype=torch.float64)
    chance_RK = calibrated_chances(torch.tensor(confidences, dtype=torch.float64), table_C2)
    for row_K, confidence in zip(chance_RK, confidences, strict=True):
        assert row_K.tolist() == pytest.approx(acceptance.chances_of(confidence))
