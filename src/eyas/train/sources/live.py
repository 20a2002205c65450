"""Features from a target's final states: exact, over any draft vocabulary. `LiveSource` runs the target itself.

Of the target's logits two numbers per token are kept, the normaliser and the most likely token. Logits over the draft
vocabulary are computed again from the final states for the few rows that are scored.

Shapes: T tokens, E target hidden size, V target vocabulary, X concatenated auxiliary states, C rows, W draft
vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.target.model import Target
from eyas.target.packed import PackedTarget, runs_in_one_pass
from eyas.target.parts import TargetHead, read_head
from eyas.train.batch import TrainingBatch
from eyas.train.features import ExactDistribution, Features, Teacher


class FinalStateScorer:
    """Makes features of final states, wherever they were computed."""

    def __init__(self, head: TargetHead, *, compiled: bool, chunk: int) -> None:
        self._head, self._chunk = head, chunk
        self._heads: dict[int, tuple[Tensor, TargetHead]] = {}
        self._reduce = torch.compile(_reduce, dynamic=True) if compiled else _reduce

    @torch.no_grad()
    def features(
        self, batch: TrainingBatch, state_TE: Tensor, aux_TX: Tensor, aux_layer_ids: Sequence[int]
    ) -> Features:
        """Features of final states (after the last norm) and auxiliary states."""
        # Only teacher rows are scored.
        normaliser_T = state_TE.new_zeros(len(state_TE), dtype=torch.float32)
        best_T = torch.zeros(len(state_TE), dtype=torch.int64, device=state_TE.device)
        for row_C in torch.split(batch.row_M, self._chunk):
            normaliser_T[row_C], best_T[row_C] = self._reduce(self._head.scores(state_TE[row_C]))

        def teacher_of(target_ids_W: Tensor) -> Teacher:
            head = self._head_over(target_ids_W)
            return lambda row_C: ExactDistribution(
                logits_CW=head.scores(state_TE[row_C]), normaliser_C=normaliser_T[row_C], best_C=best_T[row_C]
            )

        return Features(aux_TX=aux_TX, aux_layer_ids=tuple(aux_layer_ids), teachers=teacher_of)

    def _head_over(self, target_ids_W: Tensor) -> TargetHead:
        """The target's head over a draft vocabulary, made once."""
        if id(target_ids_W) not in self._heads:
            # The tensor is kept with its head so that its id is not used again.
            self._heads[id(target_ids_W)] = (target_ids_W, self._head.only(target_ids_W))
        return self._heads[id(target_ids_W)][1]


class LiveSource:
    """Runs the target on every batch."""

    def __init__(
        self, target: Target, aux_layer_ids: Sequence[int], *, compiled: bool = False, chunk: int = 4096
    ) -> None:
        self._layer_ids = tuple(aux_layer_ids)
        self._packed = PackedTarget(target, aux_layer_ids, one_pass=runs_in_one_pass(target), compiled=compiled)
        self._scorer = FinalStateScorer(read_head(target), compiled=compiled, chunk=chunk)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> Features:
        state_TE, aux_TX = self._packed(batch.ids_T, batch.position_T, batch.starts, batch.longest)
        return self._scorer.features(batch, state_TE, aux_TX, self._layer_ids)


def _reduce(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_CV.float().logsumexp(dim=-1), logits_CV.argmax(dim=-1)
