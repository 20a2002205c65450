"""Small samples are called small: intervals that stay open, and least numbers that follow from their width."""

import numpy as np
import pytest

from each import each
from eyas.doctor.sample_size import FADES, LEAST_PAIRS, LEAST_PROMPTS, least_to_hold, too_few, wilson
from eyas.doctor.statistics import depth_curve, with_wilson


@each(
    ("hits", "of", "low", "high"),
    [(3, 3, 0.4385, 1.0), (0, 3, 0.0, 0.5615), (60, 100, 0.5020, 0.6906), (1, 2, 0.0945, 0.9055)],
)
def test_wilsons_interval_is_as_published(hits: int, of: int, low: float, high: float) -> None:
    found = wilson(hits, of)
    assert found.value == pytest.approx(hits / of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_no_trial_has_no_share() -> None:
    assert np.isnan([wilson(0, 0).value, wilson(0, 0).low, wilson(0, 0).high]).all()


def test_the_least_numbers_follow_from_the_widths() -> None:
    assert LEAST_PROMPTS == least_to_hold(FADES) == 16
    assert wilson(16, 16).low >= FADES > wilson(15, 15).low
    assert LEAST_PAIRS == 5
    assert 0.5**5 <= 0.05 < 0.5**4
    assert too_few(3, LEAST_PROMPTS) == "too few prompts to judge (3; at least 16)"


def test_prompts_that_agree_still_have_a_band() -> None:
    """Three prompts whose every round accepted: resampling them gives 100 % each time, and Wilson does not."""
    counts_PS = np.array([[4.0, 4.0, 0.0]] * 3)
    curve = depth_curve(counts_PS, lambda rows: rows.sum(axis=0)[1:] / np.maximum(rows.sum(axis=0)[:-1], 1))
    assert curve.low[0] == curve.high[0] == 1.0
    widened = with_wilson(curve, counts_PS.sum(axis=0)[1:], counts_PS.sum(axis=0)[:-1])
    assert widened.low[0] == pytest.approx(wilson(12, 12).low)
    assert widened.low[1] == 0.0
    assert widened.high[1] == pytest.approx(wilson(0, 12).high)
