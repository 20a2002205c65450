"""Intervals, least sample sizes and calibration."""

import numpy as np
import pytest

from doctor.findings import sure
from each import each
from eyas.doctor.record import to_json
from eyas.doctor.statistics import (
    FADES,
    LEAST_PAIRS,
    LEAST_PROMPTS,
    calibrate,
    depth_curve,
    estimate,
    too_few,
    wilson,
    with_wilson,
)
from eyas.drafter.drift import slope


@each(
    ("hits", "of", "low", "high"),
    [(3, 3, 0.4385, 1.0), (0, 3, 0.0, 0.5615), (60, 100, 0.5020, 0.6906), (1, 2, 0.0945, 0.9055)],
)
def test_wilsons_interval_is_as_published(hits: int, of: int, low: float, high: float) -> None:
    found = wilson(hits, of)
    assert found.value == pytest.approx(hits / of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_without_trials_there_is_no_share() -> None:
    assert np.isnan([wilson(0, 0).value, wilson(0, 0).low, wilson(0, 0).high]).all()


def test_least_sample_sizes_follow_from_interval_widths() -> None:
    assert LEAST_PROMPTS == 16
    assert wilson(16, 16).low >= FADES > wilson(15, 15).low
    assert LEAST_PAIRS == 5
    assert 0.5**5 <= 0.05 < 0.5**4
    assert too_few(3, LEAST_PROMPTS) == "too few prompts to judge (3; at least 16)"


def test_agreeing_prompts_still_have_an_interval() -> None:
    """Three prompts whose every round accepted: resampling them gives 100 % each time, and Wilson does not."""
    counts_PS = np.array([[4.0, 4.0, 0.0]] * 3)
    curve = depth_curve(counts_PS, lambda rows: rows.sum(axis=0)[1:] / np.maximum(rows.sum(axis=0)[:-1], 1))
    assert curve.low[0] == curve.high[0] == 1.0
    widened = with_wilson(curve, counts_PS.sum(axis=0)[1:], counts_PS.sum(axis=0)[:-1])
    assert widened.low[0] == pytest.approx(wilson(12, 12).low)
    assert widened.low[1] == 0.0
    assert widened.high[1] == pytest.approx(wilson(0, 12).high)


def test_intervals_contain_the_true_value() -> None:
    held = 0
    for seed in range(30):
        rows = np.random.default_rng(seed).normal(5.0, 1.0, size=(40, 3)) + np.array([0.0, 1.0, 2.0])
        found = depth_curve(rows)
        assert all(low < value < high for low, value, high in zip(found.low, found.value, found.high, strict=True))
        held += found.slope.low < 1.0 < found.slope.high
    assert held >= 25
    assert slope([1.0, float("nan"), 3.0]) == pytest.approx(1.0)
    assert estimate(np.ones((5, 1)), lambda rows: float(rows.mean())) == sure(1.0)
    gaps = depth_curve(np.array([[1.0, np.nan], [3.0, np.nan]]))
    assert to_json(gaps)["value"] == [2.0, None]


def test_calibration_weighs_the_gap_of_every_bin() -> None:
    found = calibrate([0.95, 0.95, 0.15, 0.15], [True, False, False, False])
    assert found.ece == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)
    assert found.count[1] == found.count[9] == 2
    assert calibrate([], []).ece is None
