"""What whole steps took beside what the costs said of them, by depth and requests: for people who ask why. No torch.

Nothing is chosen by it. Where both differ for one depth and not for another, a price is wrong.
"""

from math import isfinite
from typing import Any

from eyas.engine.speculation.cost_model import bucket_of


class WholeStepTimes:
    """Sums over steps that were timed as a whole."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], list[float]] = {}
        """By kind and requests: steps, seconds, expected seconds."""

    def observe(self, requests: int, seconds: float, expected: float, *, depth: int, trees: bool) -> None:
        """Take a step, unless there was no price for it yet."""
        if not isfinite(expected):
            return
        kind = f"tree {depth}" if trees else f"depth {depth}"
        sums = self._sums.setdefault((kind, bucket_of(requests, 1)), [0, 0.0, 0.0])
        for place, value in enumerate((1, seconds, expected)):
            sums[place] += value

    def report(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Means by kind and by requests, up to so many."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for (kind, requests), (steps, seconds, expected) in sorted(self._sums.items()):
            told = {"steps": steps, "seconds": seconds / steps, "expected": expected / steps}
            found.setdefault(kind, {})[requests] = told
        return found
