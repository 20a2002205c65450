"""Formulas of drift over depths, for the doctor and the engine. Imports neither torch nor numpy.

growth       slope of ln(RMS of the feedback state) over depth: 0 is flat, 0.05 is five per cent more at every depth
conditional  share of rounds that accept draft d among those that accept all d - 1 before it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log, nan

SMALLEST = 1e-30
"""Lower bound, so that a state of zeros has a logarithm."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its confidence interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        return {"value": plain(self.value), "low": plain(self.low), "high": plain(self.high)}


def plain(value: float) -> float | None:
    """Round a number for JSON; NaN becomes None."""
    return round(float(value), 6) if isfinite(value) else None


def slope(by_depth: Sequence[float]) -> float:
    """Return the change per depth by least squares, over depths that have a value."""
    known = [(depth, value) for depth, value in enumerate(by_depth, start=1) if isfinite(value)]
    if len(known) < 2:
        return nan
    middle = sum(depth for depth, _ in known) / len(known)
    return sum((depth - middle) * value for depth, value in known) / sum((depth - middle) ** 2 for depth, _ in known)


def log_sizes(rms_by_depth: Sequence[float]) -> list[float]:
    """Return logarithms of sizes, which compare drafters of any scale."""
    return [log(max(size, SMALLEST)) for size in rms_by_depth]


def conditional_acceptance(rounds: Sequence[float]) -> list[float]:
    """Return the share that accepts each next depth, from counts of all rounds and rounds with 1, 2, ... accepted."""
    return [after / before if before > 0 else nan for before, after in pairwise(rounds)]
