"""A teacher from the target's final states: exact, over any draft vocabulary.

Of the target's scores only two numbers per token are kept, the normaliser and the most likely token; scores over the
draft vocabulary are made again from the final states for the few rows being scored.

Shapes: T tokens, E target hidden size, V target vocabulary, X joined auxiliary states, C rows, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.target.head import TargetHead
from eyas.train.batch import TrainingBatch
from eyas.train.features import ExactDistribution, Features


@dataclass(frozen=True, kw_only=True)
class FinalStateTeacher:
    """Scores rows again from the target's final states."""

    state_TE: Tensor
    normaliser_T: Tensor
    best_T: Tensor
    head: TargetHead

    def distribution(self, row_C: Tensor) -> ExactDistribution:
        """Scores over the draft vocabulary."""
        return ExactDistribution(
            logits_CW=self.head.scores(self.state_TE[row_C]),
            normaliser_C=self.normaliser_T[row_C],
            best_C=self.best_T[row_C],
        )


@dataclass(frozen=True, kw_only=True)
class FinalStateTeachers:
    """Teachers over any vocabulary from the same final states."""

    state_TE: Tensor
    normaliser_T: Tensor
    best_T: Tensor
    scorer: "FinalStateScorer"

    def __call__(self, target_ids_W: Tensor) -> FinalStateTeacher:
        """A teacher over these target ids."""
        return FinalStateTeacher(
            state_TE=self.state_TE,
            normaliser_T=self.normaliser_T,
            best_T=self.best_T,
            head=self.scorer.head_over(target_ids_W),
        )


class FinalStateScorer:
    """Makes features of states, wherever they were computed."""

    def __init__(self, head: TargetHead, *, compiled: bool, chunk: int) -> None:
        self._head, self._chunk = head, chunk
        self._heads: dict[int, tuple[Tensor, TargetHead]] = {}
        self._reduce = torch.compile(_reduce, dynamic=True) if compiled else _reduce

    @torch.no_grad()
    def features(
        self, batch: TrainingBatch, state_TE: Tensor, aux_TX: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        """Of final states, behind the last norm, and auxiliary ones."""
        # Only rows that teach are scored; the others are never asked for.
        normaliser_T = state_TE.new_zeros(len(state_TE), dtype=torch.float32)
        best_T = torch.zeros(len(state_TE), dtype=torch.int64, device=state_TE.device)
        for row_C in torch.split(batch.row_M, self._chunk):
            normaliser_T[row_C], best_T[row_C] = self._reduce(self._head.scores(state_TE[row_C]))
        teachers = FinalStateTeachers(state_TE=state_TE, normaliser_T=normaliser_T, best_T=best_T, scorer=self)
        return Features(aux_TX=aux_TX, aux_layer_ids=tuple(aux_layer_ids), teachers=teachers)

    def head_over(self, target_ids_W: Tensor) -> TargetHead:
        """The target's head over a draft vocabulary, cut out once."""
        if id(target_ids_W) not in self._heads:
            # The tensor is kept beside its head so that its id stays its own.
            self._heads[id(target_ids_W)] = (target_ids_W, self._head.only(target_ids_W))
        return self._heads[id(target_ids_W)][1]


def _reduce(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_CV.float().logsumexp(dim=-1), logits_CV.argmax(dim=-1)
