"""Acceptance length estimated on text, the way rounds really go.

Averaging hits over every position flatters a drafter: real rounds start right behind a token it missed, where the text
is hard. So the text is walked: a round starts, its hits are counted until the first miss, and the next one starts
behind that. On text the target itself would generate greedily this is exact, since a round that hits sees precisely the
tokens it drafted.

Shapes: B sequences, T slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.train.unroll import DepthScore


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Rounds walked and what they accepted."""

    rounds: int
    accepted_at: tuple[int, ...]
    """Rounds that accepted their token at this depth and all before it."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / rounds, pooled."""
        return 1 + sum(self.accepted_at) / max(1, self.rounds)

    def __add__(self, other: "RoundCounts") -> "RoundCounts":
        return RoundCounts(
            rounds=self.rounds + other.rounds,
            accepted_at=tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)),
        )


def walk_rounds(depths: Sequence[DepthScore]) -> RoundCounts:
    """Walk every turn of a batch, given the hits of each depth."""
    valid_STs = [score.valid_BT.tolist() for score in depths]
    hit_STs = [score.hit_BT.tolist() for score in depths]
    rounds, accepted_at = 0, [0] * len(depths)
    for row in range(len(valid_STs[0])):
        slot = 0
        while slot < len(valid_STs[0][row]):
            if not valid_STs[0][row][slot]:
                slot += 1
                continue
            accepted = 0
            while accepted < len(depths) and valid_STs[accepted][row][slot] and hit_STs[accepted][row][slot]:
                accepted_at[accepted] += 1
                accepted += 1
            rounds += 1
            slot += accepted + 1
    return RoundCounts(rounds=rounds, accepted_at=tuple(accepted_at))
