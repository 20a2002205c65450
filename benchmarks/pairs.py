"""Median ratios of paired runs, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 3
"""Minimum number of pairs for an interval."""
DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median over pairs, with a 95 % interval if there are enough."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.median:.3f}{bounds}"


def interval(ratios: Sequence[float], *, seed: int = 0) -> Interval:
    """The median and its 95 % bootstrap interval."""
    if not ratios:
        raise ValueError("no pair was measured")
    values = np.asarray(ratios, dtype=np.float64)
    low = high = None
    if len(values) >= LEAST:
        drawn = np.random.default_rng(seed).choice(values, size=(DRAWS, len(values)))
        low, high = map(float, np.percentile(np.median(drawn, axis=1), (2.5, 97.5)))
    return Interval(median=float(np.median(values)), low=low, high=high, pairs=len(values))


def turns(modes: Sequence[str], number: int) -> list[str]:
    """The order of modes in a round: it starts at another mode each round and alternates in direction."""
    start = (number // 2) % len(modes)
    order = [*modes[start:], *modes[:start]]
    return order if number % 2 == 0 else order[::-1]
