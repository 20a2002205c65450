"""Features of a target that vLLM servers run: its states come by files, its head and last norm are here.

The final state is the last norm over the last layer's output, so a server hands out one state more than drafters read.
Documents are fetched ahead (served/fetcher.py); one that cannot be fetched teaches nothing.

Shapes: T tokens, A captured layers, E target hidden size, X concatenated auxiliary states.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from eyas.target.parts import TargetParts
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features
from eyas.train.served.fetcher import PackRequest, StateFetcher
from eyas.train.sources.live import FinalStateScorer


class ServedSource:
    """Makes features of states that a fetcher brings."""

    def __init__(
        self,
        fetcher: StateFetcher,
        target: TargetParts,
        captured: Sequence[int],
        aux_layer_ids: Sequence[int],
        *,
        compiled: bool = False,
        chunk: int = 4096,
    ) -> None:
        self._fetcher, self._target = fetcher, target
        self._layer_ids, self._captured = tuple(aux_layer_ids), tuple(captured)
        self._places = [tuple(captured).index(k) for k in aux_layer_ids]
        self._scorer = FinalStateScorer(target.head, compiled=compiled, chunk=chunk)
        # The batch is kept with its request so that its id is not used again.
        self._under_way: dict[int, tuple[TrainingBatch, PackRequest]] = {}

    def prefetch(self, batch: TrainingBatch) -> None:
        if id(batch) not in self._under_way:
            self._under_way[id(batch)] = (batch, self._fetcher.request(_documents(batch)))

    def available(self, batch: TrainingBatch) -> TrainingBatch:
        self.prefetch(batch)
        _, request = self._under_way[id(batch)]
        self._fetcher.wait(request)
        rest = batch.without(request.failed)
        if rest is not batch:
            del self._under_way[id(batch)]
            self._under_way[id(rest)] = (rest, request)
        return rest

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> Features:
        self.prefetch(batch)
        _, request = self._under_way[id(batch)]
        self._fetcher.wait(request)
        del self._under_way[id(batch)]
        states_TAE = self._together(request, batch)
        self._fetcher.release(request)
        assert self._target.norm is not None
        state_TE = self._target.norm(states_TAE[:, -1].to(self._target.dtype))
        aux_TX = states_TAE[:, self._places].flatten(1)
        return self._scorer.features(batch, state_TE, aux_TX, self._layer_ids)

    def _together(self, request: PackRequest, batch: TrainingBatch) -> Tensor:
        """States [T, A, E] of the whole batch on its device; zeros for what is not read."""
        first = next((states for states in request.states if states is not None), None)
        shape = (len(batch.ids_T), len(self._captured), self._target.facts.hidden_size)
        dtype = self._target.dtype if first is None else first.dtype
        whole = torch.zeros(shape, dtype=dtype, pin_memory=batch.ids_T.is_cuda)
        starts = batch.starts.tolist()
        for place, states_TAE in enumerate(request.states):
            if states_TAE is not None:
                whole[starts[place] : starts[place] + len(states_TAE)] = states_TAE
        return whole.to(batch.ids_T.device, non_blocking=True)


def _documents(batch: TrainingBatch) -> list[list[int]]:
    """Token ids of the documents, in order, without the padding at the end."""
    ids, starts = batch.ids_T.tolist(), batch.starts.tolist()
    borders = list(pairwise(starts))
    if len(borders) > 1 and not bool((batch.row_M >= borders[-1][0]).any()):
        borders.pop()
    return [ids[first:end] for first, end in borders]
