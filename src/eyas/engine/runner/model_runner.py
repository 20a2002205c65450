"""Runs the target over what the scheduler has chosen: launches a pass, and hands back what waits for it.

There are three ways, and they say the same: captured graphs for chunks of prompts and for decoding, and eager passes
for all else (long chunks, trees, passes above the token budget, machines without CUDA graphs). Eager passes run fused
code where the target is the plain Llama block, and transformers' own code where it is not.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.cuda_graphs import CUDAGraphRunner
from eyas.engine.runner.fused_target import fused_target
from eyas.engine.runner.target import TargetRunner
from eyas.engine.scheduler import ScheduledRow
from eyas.engine.speculation.draft import NO_DRAFT, Draft
from eyas.engine.verify import TargetOutput, lay_out
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata, integers
from eyas.target.capture import capture, select_states
from eyas.target.model import Target

Collect = Callable[[], TargetOutput]
"""Waits for a pass that is under way."""


class ModelRunner:
    """A target over its KV cache."""

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.cache = cache
        self.layer_ids: tuple[int, ...] = ()
        """Whose states the drafter reads; those are kept of every pass that it follows."""
        self.kept_layer_ids: tuple[int, ...] = ()
        """Whose states every pass gives besides, for whoever asked for them; such passes are eager."""
        self.graphs: CUDAGraphRunner | None = None
        """Captured passes; None where all are eager."""
        self._target, self._device = target, target.device
        self._own = TargetRunner(target, cache)
        self._fused = fused_target(target)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of a pass; a model's own code may compute logits more finely than the rest."""
        return self._target.dtype if self._fused is not None else torch.float32

    def passes(self, rows: Sequence[ScheduledRow]) -> list[Sequence[ScheduledRow]]:
        """Which rows the target reads together: all of them, unless chunks of prompts have graphs of their own."""
        if not rows:
            return []
        if self.graphs is None or all(row.count == 1 for row in rows):
            return [rows]
        chunks, others = list[Sequence[ScheduledRow]](), list[ScheduledRow]()
        for row in rows:
            if self.graphs.reads(row):
                chunks.append([row])
            else:
                others.append(row)
        return [others, *chunks] if others else chunks

    def launch(self, rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], *, states: bool) -> Collect:
        """Start one pass: logits behind every token that chooses and, if asked for, the states of all tokens."""
        if self.graphs is not None:
            collect = self.graphs.launch_read(rows[0]) if len(rows) == 1 and self.graphs.reads(rows[0]) else None
            collect = collect or self.graphs.launch_verify(rows, [drafts.get(row.seq.key, NO_DRAFT) for row in rows])
            if collect is not None:
                return collect
        output = self._run_eagerly(rows, drafts, self.layer_ids if states else ())
        return lambda: output

    def _run_eagerly(
        self, rows: Sequence[ScheduledRow], drafts: Mapping[int, Draft], layer_ids: Sequence[int]
    ) -> TargetOutput:
        ids: list[int] = []
        keep: list[int] = []
        shares = []
        for row in rows:
            draft = drafts.get(row.seq.key, NO_DRAFT)
            newest = len(ids) + row.count - 1
            ids += [*row.seq.tokens[row.start : row.start + row.count], *draft.tokens]
            keep += range(newest, len(ids)) if row.samples else ()
            shares.append(lay_out(row, draft))
        metadata = AttentionMetadata.of(shares, block_size=self.cache.block_size, device=self._device)
        both = tuple(sorted({*layer_ids, *self.kept_layer_ids}))
        logits_MV, states_NX = self.run(integers(ids, self._device), metadata, integers(keep, self._device), both)
        aux_NX, hidden_NX = (
            select_states(states_NX, both, some) if some and states_NX is not None else None
            for some in (layer_ids, self.kept_layer_ids)
        )
        return TargetOutput(logits_MV=logits_MV, aux_NX=aux_NX, hidden_NX=hidden_NX)

    def run(
        self, ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor | None, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits behind the tokens `keep_M`, or all, and the states of these layers, if any."""
        if self._fused is not None:
            return self._fused.forward(ids_N, choose_backend(metadata), self.cache.layers, keep_M, layer_ids)
        if not layer_ids:
            return self._own.forward(ids_N, metadata, keep_M), None
        with capture(self._target.model, layer_ids) as captured:
            logits_MV = self._own.forward(ids_N, metadata, keep_M)
        return logits_MV, captured.aux_hidden()[0]
