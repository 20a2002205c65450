"""Features from the target itself, in this process: nothing on disk, nothing stale."""

from collections.abc import Sequence

import torch

from eyas.target.head import read_head
from eyas.target.model import Target
from eyas.target.packed import PackedTarget, runs_in_one_pass
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.sources.final_states import FinalStateScorer


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
        """Run the target over the batch."""
        state_TE, aux_TX = self._packed(batch.ids_T, batch.position_T, batch.starts, batch.longest)
        return self._scorer.features(batch, state_TE, aux_TX, self._layer_ids)
