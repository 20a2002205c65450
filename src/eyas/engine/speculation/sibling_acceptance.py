"""How likely the drafter's second, third, ... candidate is the target's token, when the first is not. No torch.

    by rank         how often each of them was. What a tree would gain is told from this, before anything is drafted
    by confidence   the same, by the drafter's probability in parts of what it leaves to all but the first. Which nodes
                    of a tree are worth verifying is told from this, once it has grown

Candidates stand in the order in which they would be proposed: by probability for greedy requests, by the race that the
noise decides for others (`verify.draw_many`). Ranks are of that order, so what is learnt of them is what a tree gets.
"""

from collections.abc import Sequence

from eyas.engine.speculation.decayed_counts import DecayedCounts

RANKS = 8
"""Candidates of the drafter whose rank is told apart."""
MEMORY = 400
"""Looks after which one has faded to a third."""
BINS = 10
"""Bins of confidence."""
BIN_TRIES = 4.0
"""Candidates of a bin that weigh as much as the drafter's own word."""
CAUTION = 6.0
"""Misses that weigh against every share although nobody saw them: few looks must not make a tree look good."""


class SiblingAcceptance:
    """What was seen of candidates that are not the first."""

    def __init__(self) -> None:
        self._shares = DecayedCounts(RANKS - 1)
        """Of the second candidate on, where the first was not the token."""
        self._sure = DecayedCounts(BINS)

    def observe(self, ranks: Sequence[int], candidates: Sequence[Sequence[float]] = ()) -> None:
        """Take a round: which candidates were the target's tokens, 0 for none of those looked at.

        `candidates` say how sure the drafter was of each that was looked at; without them that were RANKS.
        """
        for place, rank in enumerate(ranks):
            if rank == 1:
                continue
            sure = candidates[place] if candidates else ()
            hits = [rank == other for other in range(2, 1 + (len(sure) or RANKS))]
            self._shares.add(range(RANKS - 1), hits)
            self._sure.add(map(_bin, _parts(sure)), hits)
        if ranks:
            self._shares.fade(MEMORY)
            self._sure.fade(MEMORY)

    def shares(self) -> list[float]:
        """The chance that the target's token is the drafter's second, third, ... when it is not the first."""
        return [self._shares.rate(cell, 0.0, CAUTION) for cell in range(RANKS - 1)]

    def chances(self, first: float, confidences: Sequence[float]) -> list[float]:
        """The chances of all candidates but the first, whose own is `first`."""
        parts = _parts(confidences)
        return [(1 - first) * self._sure.rate(_bin(part), part, BIN_TRIES) for part in parts]


def _parts(confidences: Sequence[float]) -> list[float]:
    """Of what is left to all but the first candidate, each one's part."""
    left = 1 - confidences[0] if confidences else 1.0
    return [min(1.0, sure / max(left, 1e-9)) for sure in confidences[1:]]


def _bin(part: float) -> int:
    return int(part * BINS) if part < 1 else BINS - 1
