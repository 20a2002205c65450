"""What drift is, in formulas over depths: the doctor's and the engine's alike. Neither torch nor numpy.

growth       the slope of ln(RMS of the fed-back state) by depth: 0 is flat, 0.05 five per cent more at every depth
conditional  rounds that accept draft d, of those that accept all d - 1 before it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log, nan

SMALLEST = 1e-30
"""A state of nothing but zeros has a logarithm too."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number and where it may lie."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float | None]:
        """For the record."""
        return {"value": plain(self.value), "low": plain(self.low), "high": plain(self.high)}


def plain(value: float) -> float | None:
    """A number as JSON knows them: there is no NaN."""
    return round(float(value), 6) if isfinite(value) else None


def slope(by_depth: Sequence[float]) -> float:
    """Change per depth: least squares over the depths that have a value."""
    known = [(depth, value) for depth, value in enumerate(by_depth, start=1) if isfinite(value)]
    if len(known) < 2:
        return nan
    middle = sum(depth for depth, _ in known) / len(known)
    return sum((depth - middle) * value for depth, value in known) / sum((depth - middle) ** 2 for depth, _ in known)


def log_sizes(rms_by_depth: Sequence[float]) -> list[float]:
    """The logarithm of sizes, so that drafters of any scale compare."""
    return [log(max(size, SMALLEST)) for size in rms_by_depth]


def conditional_acceptance(rounds: Sequence[float]) -> list[float]:
    """Of all rounds, then of those that accepted 1, 2, ... drafts at least: which part accepts each next depth."""
    return [after / before if before > 0 else nan for before, after in pairwise(rounds)]
