"""What measured passes take in parts of what the roofline says of them.

Kernels of a processor work in tiles, and have others for few rows: the time of a pass is a stair, which no constants
follow. It is a function of the tokens of the pass and of little else, so that is what it is kept by: the target's by
the tokens that are verified together, however many users they are of, the drafter's by users, its first pass, which
reads what the last round gave, apart from those behind it.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from math import log


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Measured against fitted time, by a count; in between in line with the count's logarithm, level outside."""

    points: tuple[tuple[int, float], ...] = ()
    """By count; none: 1."""

    def at(self, count: float) -> float:
        """For so many."""
        place = bisect_left(self.points, count, key=lambda point: point[0])
        if not self.points:
            return 1.0
        if place in (0, len(self.points)):
            return self.points[min(place, len(self.points) - 1)][1]
        (low, below), (high, above) = self.points[place - 1 : place + 1]
        share = log(count / low) / log(high / low)
        return below + share * (above - below)


@dataclass(frozen=True, kw_only=True)
class PassFactors:
    """Of the passes of a step."""

    verify: Factors = Factors()
    """The target's, with all that the host does, by tokens."""
    first_draft: Factors = Factors()
    """By users."""
    further_drafts: Factors = Factors()
    """By users."""


AS_FITTED = PassFactors()


def mean_factors(found: Iterable[tuple[int, float]]) -> Factors:
    """One factor for each count: the mean of those that were found."""
    by_count: dict[int, list[float]] = {}
    for count, factor in found:
        by_count.setdefault(count, []).append(factor)
    return Factors(points=tuple((count, sum(each) / len(each)) for count, each in sorted(by_count.items())))
