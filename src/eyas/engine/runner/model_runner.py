"""Runs the target, by fused code (`kernels/llama/`) where possible, otherwise by transformers.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, X concatenated auxiliary states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.kv_cache.hidden_states import HiddenStateCache
from eyas.engine.runner.fused_target import fused_target
from eyas.engine.runner.target import TargetRunner
from eyas.kernels.attention.choose import choose_backend
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.target.capture import capture, select_states
from eyas.target.model import Target


class ModelRunner:
    """A target over its KV cache."""

    def __init__(self, target: Target, cache: KVCache, kept_states: HiddenStateCache | None = None) -> None:
        """States of the layers in `kept_states` are stored for every token."""
        self.cache, self.kept_states = cache, kept_states
        self.layer_ids: tuple[int, ...] = ()
        """Layers whose states the drafter reads."""
        self._target, self.device = target, target.device
        self._own = TargetRunner(target, cache)
        self._fused = fused_target(target)

    @property
    def vocab_size(self) -> int:
        return self._target.facts.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target's states."""
        return self._target.dtype

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of a pass's logits; a model's own code may compute them in higher precision."""
        return self._target.dtype if self._fused is not None else torch.float32

    def run_pass(
        self,
        ids_N: Tensor,
        metadata: AttentionMetadata,
        keep_M: Tensor | None,
        logits_out_MV: Tensor | None = None,
        *,
        states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target; returns logits of the tokens `keep_M`, or all, and states for the drafter if requested."""
        layer_ids = self.layer_ids if states else ()
        if self.kept_states is None:
            return self.run(ids_N, metadata, keep_M, layer_ids, logits_out_MV)
        both = tuple(sorted({*layer_ids, *self.kept_states.layer_ids}))
        logits_MV, states_NX = self.run(ids_N, metadata, keep_M, both, logits_out_MV)
        assert states_NX is not None
        self.kept_states.write(metadata.slot_mapping_N, select_states(states_NX, both, self.kept_states.layer_ids))
        return logits_MV, select_states(states_NX, both, layer_ids) if layer_ids else None

    def move(self, from_M: Tensor, to_M: Tensor, rows: int) -> None:
        """Move KV cache entries of each tree's accepted path to where a chain would have left them."""
        self.cache.move_by_row(from_M, to_M, rows)
        if self.kept_states is not None:
            self.kept_states.move(from_M, to_M)

    def run(
        self,
        ids_N: Tensor,
        metadata: AttentionMetadata,
        keep_M: Tensor | None,
        layer_ids: Sequence[int],
        logits_out_MV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of the tokens `keep_M`, or all, and the states of these layers, if any.

        A fused pass writes logits to `logits_out_MV`; a model's own code allocates them.
        """
        if self._fused is not None:
            attention = choose_backend(metadata)
            return self._fused.forward(ids_N, attention, self.cache.layers, keep_M, layer_ids, logits_out_MV)
        if not layer_ids:
            return self._own.forward(ids_N, metadata, keep_M), None
        with capture(self._target.model, layer_ids) as captured:
            logits_MV = self._own.forward(ids_N, metadata, keep_M)
        return logits_MV, captured.aux_hidden()[0]
