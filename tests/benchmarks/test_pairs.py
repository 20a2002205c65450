"""Intervals over pairs, and the order of rounds."""

from collections import Counter

import pytest
from pairs import interval, turns

from each import each


def test_the_interval_holds_the_median_and_narrows_with_pairs() -> None:
    few, many = interval([0.9, 1.0, 1.1, 1.0]), interval([0.9, 1.0, 1.1, 1.0] * 16)
    for found in (few, many):
        assert found.median == pytest.approx(1.0)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.median <= found.high
    assert (few.low, few.high) == (pytest.approx(0.9), pytest.approx(1.1))
    assert (many.high or 0) - (many.low or 0) < 0.05
    assert interval([0.9, 1.0, 1.1, 1.0]) == few  # drawn by a seed


def test_one_outlier_does_not_move_the_median() -> None:
    found = interval([0.99, 1.0, 1.01, 1.0, 0.99, 1.0, 1.01, 5.0])
    assert found.median == pytest.approx(1.0)
    assert (found.high or 9) < 1.02


@each("ratios", [[1.2], [1.0, 1.4]])
def test_too_few_pairs_have_no_interval(ratios: list[float]) -> None:
    found = interval(ratios)
    assert (found.median, found.low, found.high) == (pytest.approx(1.2), None, None)
    assert str(found) == "1.200"


def test_no_pair_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        interval([])


def test_every_mode_runs_equally_often_in_every_position() -> None:
    modes = ["a", "b", "c", "d"]
    orders = [turns(modes, number) for number in range(8)]
    assert all(sorted(order) == modes for order in orders)
    for place in range(4):
        assert Counter(order[place] for order in orders) == dict.fromkeys(modes, 2)
