"""How many are enough: the least sample with which a claim can be told from its opposite.

A sample is small when its interval still holds the opposite of what it shows. So every least number follows from an
interval's width and from the bound that the verdict draws:

rounds   A share of rounds has a Wilson interval, which stays open where all or none hit: 3 of 3 may be 44 %. A depth is
         judged if its interval is no wider than the loss that counts as fading.
prompts  Health is said of prompts in general. If all of n prompts are as they should be, Wilson's interval begins at
         n / (n + 3.84). It must not reach below the share that counts as fading: n is 16.
pairs    Whether a condition or a repair changes anything is told by the same prompts with and without it. If it changed
         nothing, all of n would move the same way by chance once in 2^n, which must be at most 5 %: n is 5.
"""

from math import nan, sqrt
from statistics import NormalDist

from eyas.drafter.drift import Estimate

LEVEL = 0.95
"""Of all intervals of the doctor."""
FADES = 0.8
"""Conditional acceptance at a depth in parts of that of the first depths, below which a drafter fades."""

_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def wilson(hits: float, of: float) -> Estimate:
    """A share of independent trials and Wilson's interval around it; NaN where there was no trial."""
    if of <= 0:
        return Estimate(value=nan, low=nan, high=nan)
    share, extra = hits / of, _Z * _Z / of
    middle = (share + extra / 2) / (1 + extra)
    half = _Z * sqrt(share * (1 - share) / of + extra / (4 * of)) / (1 + extra)
    return Estimate(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half))


def least_to_hold(share: float) -> int:
    """The smallest n of which all must hit so that the interval lies above `share`."""
    return next(n for n in range(1, 10_000) if wilson(n, n).low >= share)


def least_to_agree() -> int:
    """The smallest n that all move the same way by chance in at most 1 - LEVEL of all cases."""
    return next(n for n in range(1, 100) if 0.5**n <= 1 - LEVEL)


LEAST_PROMPTS = least_to_hold(FADES)
"""Prompts to be called healthy."""
LEAST_PAIRS = least_to_agree()
"""Prompts to say that a condition or a repair changes something, or that it changes nothing."""


def too_few(prompts: int, least: int) -> str:
    """What is said instead of a judgement."""
    return f"too few prompts to judge ({prompts}; at least {least})"
