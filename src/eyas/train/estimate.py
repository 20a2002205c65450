"""Acceptance length estimated on text, the way rounds really go.

Averaging hits over every position flatters a drafter: real rounds start right behind a token it missed, where the text
is hard. So the text is walked: a round starts, its hits are counted until the first miss, and the next one starts
behind that. On text the target itself would generate greedily this is exact, since a round that hits sees precisely the
tokens it drafted.

Shapes: S depths, M teacher rows (batch.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from eyas.drafter.recorded_acceptance import FILE, RecordedAcceptance
from eyas.train.batch import TrainingBatch


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


def acceptance_file(counts: RoundCounts) -> dict[str, str]:
    """What stands beside a drafter's weights about them: text by file name; nothing where no round was walked."""
    if not counts.rounds:
        return {}
    recorded = RecordedAcceptance(
        rounds=counts.rounds, accepted_at=counts.accepted_at, source="estimated on held-out text"
    )
    return {FILE: recorded.to_json()}


def walk_rounds(batch: TrainingBatch, hit_SM: Tensor) -> RoundCounts:
    """Walk every answer of a batch, given the hits of each depth."""
    nothing = RoundCounts(rounds=0, accepted_at=(0,) * len(hit_SM))
    return sum((counts for _, counts in walk_answers(batch, hit_SM)), start=nothing)


def walk_answers(batch: TrainingBatch, hit_SM: Tensor) -> Iterator[tuple[int, RoundCounts]]:
    """The same answer by answer, each with its first teacher row."""
    depths, rows = hit_SM.shape
    hits = hit_SM.tolist()
    run_M = batch.run_lengths
    # Rows of one answer stand one behind the other; where a run does not go on, another answer begins.
    begins_M = np.concatenate([[True], run_M[1:] != run_M[:-1] + 1]) if rows else np.zeros(0, dtype=bool)
    borders = [*np.nonzero(begins_M)[0].tolist(), rows]
    for first, end in pairwise(borders):
        row, rounds, accepted_at = first, 0, [0] * depths
        while row < end:
            # A round that starts here drafts row + k at depth k; an answer may end before the round does.
            accepted = 0
            while accepted < depths and row + accepted < end and hits[accepted][row + accepted]:
                accepted_at[accepted] += 1
                accepted += 1
            rounds += 1
            row += accepted + 1
        yield first, RoundCounts(rounds=rounds, accepted_at=tuple(accepted_at))
