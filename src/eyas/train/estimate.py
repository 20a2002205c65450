"""Acceptance length estimated on text by walking it round by round.

Averaging hits over all positions overestimates: real rounds start right after a token that the drafter missed, where
the text is hard. So the text is walked: a round starts, its hits are counted until the first miss, and the next round
starts after that. On text that the target generates greedily this is exact, since a round that hits sees precisely the
tokens that it drafted.

Shapes: S depths, M teacher rows (batch.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.drafter.recorded_acceptance import FILE, RecordedAcceptance
from eyas.train.batch import CorpusPacks, TrainingBatch
from eyas.train.corpus.corpus import Corpus
from eyas.train.features import FeatureSource
from eyas.train.loss import LOSSES, forward_loss


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """Number of rounds and of accepted drafts."""

    rounds: int
    accepted_at: tuple[int, ...]
    """Rounds that accepted their draft at this depth and all before it."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / rounds, pooled."""
        return 1 + sum(self.accepted_at) / max(1, self.rounds)

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": self.acceptance_length,
            "rounds": self.rounds,
            "accepted_at": list(self.accepted_at),
        }

    def __add__(self, other: "RoundCounts") -> "RoundCounts":
        return RoundCounts(
            rounds=self.rounds + other.rounds,
            accepted_at=tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)),
        )


def acceptance_file(counts: RoundCounts) -> dict[str, str]:
    """Files written beside a drafter's weights: text by name, none if there was no round."""
    if not counts.rounds:
        return {}
    recorded = RecordedAcceptance(
        rounds=counts.rounds, accepted_at=counts.accepted_at, source="estimated on held-out text"
    )
    return {FILE: recorded.to_json()}


def answer_borders(batch: TrainingBatch) -> list[int]:
    """First teacher row of each answer, and the end of the last one."""
    run_M = batch.run_lengths
    if not len(run_M):
        return [0]
    # Rows of one answer are consecutive; where a run does not go on, another answer begins.
    begins_M = np.concatenate([[True], run_M[1:] != run_M[:-1] + 1])
    return [*np.nonzero(begins_M)[0].tolist(), len(run_M)]


def walk_rounds(batch: TrainingBatch, hit_SM: Tensor) -> RoundCounts:
    """Walk all answers of a batch, given the hits of each depth."""
    nothing = RoundCounts(rounds=0, accepted_at=(0,) * len(hit_SM))
    return sum((counts for _, counts in walk_answers(batch, hit_SM)), start=nothing)


def walk_answers(batch: TrainingBatch, hit_SM: Tensor) -> Iterator[tuple[int, RoundCounts]]:
    """Walk the answers of a batch one by one; each comes with its first teacher row."""
    depths = len(hit_SM)
    hits = hit_SM.tolist()
    for first, end in pairwise(answer_borders(batch)):
        row, rounds, accepted_at = first, 0, [0] * depths
        while row < end:
            # A round that starts here drafts row + k at depth k; the answer may end before the round does.
            accepted = 0
            while accepted < depths and row + accepted < end and hits[accepted][row + accepted]:
                accepted_at[accepted] += 1
                accepted += 1
            rounds += 1
            row += accepted + 1
        yield first, RoundCounts(rounds=rounds, accepted_at=tuple(accepted_at))


@torch.no_grad()
def hits_of_corpus(
    drafters: Mapping[str, Drafter],
    layer_ids: Mapping[str, Sequence[int]],
    source: FeatureSource,
    corpus: Corpus,
    *,
    depths: int,
    pack_length: int,
    chunk: int,
    device: torch.device,
) -> Iterator[tuple[TrainingBatch, dict[str, Tensor]]]:
    """Hits of each drafter at every depth [S, M], on the host, pack by pack.

    The target runs once for all drafters. Each drafter is unrolled once, to the deepest depth; its first k depths are
    the same as drafting k tokens. Documents longer than `pack_length` get a pack of their own.
    """
    # Made once, because the source keeps the target's head for each of these tensors.
    kept = {name: drafter.vocab().target_ids_W for name, drafter in drafters.items()}
    length = max(pack_length, corpus.longest)
    packs = CorpusPacks(corpus=corpus, length=length, seed=0, device=device, padded=False)
    for batch in (planned.build() for planned in packs.epoch(0)):
        features = source(batch)
        yield (
            batch,
            {
                name: forward_loss(
                    drafter,
                    batch,
                    features,
                    target_ids_W=kept[name],
                    layer_ids=layer_ids[name],
                    weights=[1.0] * depths,
                    row_loss=LOSSES["total_variation"],
                    chunk=chunk,
                ).hit_SM.cpu()
                for name, drafter in drafters.items()
            },
        )
