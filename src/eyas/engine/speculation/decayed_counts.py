"""Hits among tries, the old ones fading. No torch."""

from collections.abc import Iterable


class DecayedCounts:
    """Successes among tries by cell. New ones weigh ever more, which is old ones fading, without touching them."""

    def __init__(self, cells: int) -> None:
        self.weight = 1.0
        self._tries = [0.0] * cells
        self._hits = [0.0] * cells

    def add(self, cells: Iterable[int], hits: Iterable[float], weight: float = 1.0) -> None:
        """Count tries; a hit may be a share of one."""
        weight *= self.weight
        for cell, hit in zip(cells, hits, strict=False):
            self._tries[cell] += weight
            self._hits[cell] += weight * hit

    def fade(self, memory: float) -> None:
        """Let all that was counted so far weigh less by a factor of 1 + 1 / memory."""
        self.weight *= 1 + 1 / memory
        if self.weight > 1e12:
            self._tries = [tries / self.weight for tries in self._tries]
            self._hits = [hits / self.weight for hits in self._hits]
            self.weight = 1.0

    def limit(self, cell: int, tries: float) -> None:
        """Let all that was counted weigh less, until a cell has no more than so many tries of today."""
        self.weight = max(self.weight, self._tries[cell] / tries)

    def rate(self, cell: int, belief: float, tries: float) -> float:
        """Hits per try, with a belief that weighs as much as so many tries of today."""
        extra = tries * self.weight
        return (self._hits[cell] + extra * belief) / max(self._tries[cell] + extra, 1e-300)
