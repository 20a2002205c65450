"""How likely the drafter's second, third, ... candidate is the target's token, when the first is not. No torch.

    by rank         how often each of them was. What a tree would gain is told from this, before anything is drafted
    by confidence   the same, by the drafter's probability in parts of what it leaves to all but the first. Which nodes
                    of a tree are worth verifying is told from this, once it has grown

Candidates stand in the order in which they would be proposed: by probability for greedy requests, by the race that the
noise decides for others (`verify.draw_many`). Ranks are of that order, so what is learnt of them is what a tree gets.
"""

from collections.abc import Sequence

from eyas.engine.speculation.decayed_counts import DecayedCounts
from eyas.engine.speculation.policy import POLICY


class SiblingAcceptance:
    """What was seen of candidates that are not the first."""

    def __init__(self) -> None:
        self._shares = DecayedCounts(POLICY.ranks - 1)
        """Of the second candidate on, where the first was not the token."""
        self._sure = DecayedCounts(POLICY.sibling_bins)

    def observe(self, ranks: Sequence[int], candidates: Sequence[Sequence[float]] = ()) -> None:
        """Take a round: which candidates were the target's tokens, 0 for none of those looked at.

        `candidates` say how sure the drafter was of each that was looked at; without them that were RANKS.
        """
        for place, rank in enumerate(ranks):
            if rank == 1:
                continue
            sure = candidates[place] if candidates else ()
            hits = [rank == other for other in range(2, 1 + (len(sure) or POLICY.ranks))]
            self._shares.add(range(POLICY.ranks - 1), hits)
            self._sure.add(map(_bin, _parts(sure)), hits)
        if ranks:
            self._shares.fade(POLICY.sibling_memory)
            self._sure.fade(POLICY.sibling_memory)

    def shares(self) -> list[float]:
        """The chance that the target's token is the drafter's second, third, ... when it is not the first."""
        return [self._shares.rate(cell, 0.0, POLICY.sibling_caution) for cell in range(POLICY.ranks - 1)]

    def chances(self, first: float, confidences: Sequence[float]) -> list[float]:
        """The chances of all candidates but the first, whose own is `first`."""
        parts = _parts(confidences)
        return [(1 - first) * self._sure.rate(_bin(part), part, POLICY.sibling_bin_tries) for part in parts]


def _parts(confidences: Sequence[float]) -> list[float]:
    """Of what is left to all but the first candidate, each one's part."""
    left = 1 - confidences[0] if confidences else 1.0
    return [min(1.0, sure / max(left, 1e-9)) for sure in confidences[1:]]


def _bin(part: float) -> int:
    return int(part * POLICY.sibling_bins) if part < 1 else POLICY.sibling_bins - 1
