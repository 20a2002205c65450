"""Acceptance length estimated on text, the way rounds really go.

Averaging hits over every position flatters a drafter: real rounds start right behind a token it missed, where the text
is hard. So the text is walked: a round starts, its hits are counted until the first miss, and the next one starts
behind that. On text the target itself would generate greedily this is exact, since a round that hits sees precisely the
tokens it drafted. On sampled text a draft is accepted with some probability (chances.py), and the walk is an
expectation.

Shapes: S depths, M teacher rows (batch.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
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


@dataclass(frozen=True, kw_only=True)
class ExpectedRounds:
    """The same as expectations, answer by answer: A answers, S depths."""

    rounds_A: NDArray[np.float64]
    accepted_AS: NDArray[np.float64]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification, pooled."""
        return float(1 + self.accepted_AS.sum() / max(1e-9, self.rounds_A.sum()))

    def __add__(self, other: "ExpectedRounds") -> "ExpectedRounds":
        return ExpectedRounds(
            rounds_A=np.concatenate([self.rounds_A, other.rounds_A]),
            accepted_AS=np.concatenate([self.accepted_AS, other.accepted_AS]),
        )


def expect_rounds(batch: TrainingBatch, chance_SM: Tensor) -> ExpectedRounds:
    """Walk every answer of a batch along all ways at once, given how likely the draft of each depth is accepted.

    Exact: a round begins at a row with some probability, and hands it on to where the rounds behind it may begin.
    """
    depths = len(chance_SM)
    chances = chance_SM.double().cpu().numpy()
    answers = list(pairwise(answer_borders(batch)))
    longest = max((end - first for first, end in answers), default=0)
    chance_SAL = np.zeros((depths, len(answers), longest + depths))
    inside_AL = np.zeros((len(answers), longest + depths))
    for answer, (first, end) in enumerate(answers):
        chance_SAL[:, answer, : end - first] = chances[:, first:end]
        inside_AL[answer, : end - first] = 1.0
    begins_AL = np.zeros((len(answers), longest + depths + 1))
    begins_AL[:, 0] = 1.0
    rounds_A, accepted_AS = np.zeros(len(answers)), np.zeros((len(answers), depths))
    for row in range(longest):
        goes_on_A = begins_AL[:, row] * inside_AL[:, row]
        rounds_A += goes_on_A
        for depth in range(depths):
            here = row + depth
            # Behind the end of an answer nothing is drafted, and no round begins.
            goes_on_A = goes_on_A * inside_AL[:, here]
            accepted_A = goes_on_A * chance_SAL[depth, :, here]
            accepted_AS[:, depth] += accepted_A
            begins_AL[:, here + 1] += goes_on_A - accepted_A
            goes_on_A = accepted_A
        begins_AL[:, row + depths + 1] += goes_on_A
    return ExpectedRounds(rounds_A=rounds_A, accepted_AS=accepted_AS)


def answer_borders(batch: TrainingBatch) -> list[int]:
    """Where among the teacher rows each answer begins and, last, where the last one ends."""
    run_M = batch.run_lengths
    if not len(run_M):
        return [0]
    # Rows of one answer stand one behind the other; where a run does not go on, another answer begins.
    begins_M = np.concatenate([[True], run_M[1:] != run_M[:-1] + 1])
    return [*np.nonzero(begins_M)[0].tolist(), len(run_M)]


def walk_rounds(batch: TrainingBatch, hit_SM: Tensor) -> RoundCounts:
    """Walk every answer of a batch, given the hits of each depth."""
    nothing = RoundCounts(rounds=0, accepted_at=(0,) * len(hit_SM))
    return sum((counts for _, counts in walk_answers(batch, hit_SM)), start=nothing)


def walk_answers(batch: TrainingBatch, hit_SM: Tensor) -> Iterator[tuple[int, RoundCounts]]:
    """The same answer by answer, each with its first teacher row."""
    depths = len(hit_SM)
    hits = hit_SM.tolist()
    for first, end in pairwise(answer_borders(batch)):
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
