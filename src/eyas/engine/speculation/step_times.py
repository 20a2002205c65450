"""What whole steps took beside what the costs said of them, by depth and requests. No torch.

Where both differ for one depth and not for another, a price is wrong: costs are of parts, the host's part is known by
few steps of some depths, and between the parts there is time that belongs to none. So where captured shapes are weighed
against each other, each is taken at its price times what steps like it took in parts of theirs.
"""

from collections import deque
from math import isfinite
from statistics import median
from typing import Any

from eyas.engine.speculation.cost_model import bucket_of
from eyas.engine.speculation.policy import POLICY


class _StepsOfKind:
    """Those of a kind: sums over all, and how the latest compare."""

    def __init__(self) -> None:
        self.count, self.seconds, self.expected = 0, 0.0, 0.0
        self.at = 0
        """Number of the latest, among those of all kinds."""
        self._latest = deque[float](maxlen=POLICY.step_window)
        self._ratio: float | None = None
        """Kept until there is another step: a plan asks for the price of every shape."""

    def add(self, seconds: float, expected: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.expected += expected
        self._latest.append(seconds / expected)
        self._ratio = None

    @property
    def ratio(self) -> float:
        """The median, since some steps wait for something else; drawn to 1 while there are few."""
        if self._ratio is None:
            seen = len(self._latest) / (len(self._latest) + POLICY.step_trust)
            self._ratio = 1 + seen * (median(self._latest) - 1)
        return self._ratio


class WholeStepTimes:
    """Steps that were timed as a whole."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int], _StepsOfKind] = {}
        """By kind and requests."""
        self._observed = 0

    def observe(self, requests: int, seconds: float, expected: float, *, depth: int, trees: bool) -> None:
        """Take a step, unless there was no price for it yet; the controller's own time is not in it."""
        if isfinite(expected) and expected > 0:
            self._observed += 1
            steps = self._kinds.setdefault(_kind(requests, depth, trees), _StepsOfKind())
            steps.add(seconds, expected)
            steps.at = self._observed

    def ratio(self, requests: int, *, depth: int, trees: bool = False) -> float:
        """What such steps took of late, in parts of what was expected; 1, if there were none or long ago."""
        steps = self._kinds.get(_kind(requests, depth, trees))
        if steps is None or self._observed - steps.at > POLICY.host_stale_after:
            return 1.0
        return steps.ratio

    def report(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Means by kind and by requests, up to so many."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for (kind, requests), steps in sorted(self._kinds.items()):
            told = {"steps": steps.count, "seconds": steps.seconds / steps.count}
            found.setdefault(kind, {})[requests] = told | {"expected": steps.expected / steps.count}
        return found


def _kind(requests: int, depth: int, trees: bool) -> tuple[str, int]:
    return f"tree {depth}" if trees else f"depth {depth}", bucket_of(requests, 1)
