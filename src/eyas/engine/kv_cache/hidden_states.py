"""Hidden states of chosen target layers, stored in the KV cache's blocks.

Invariant: every pass that writes a token's keys and values writes its states too. So shared prefixes have one copy, and
prefix cache hits come with their states.

Shapes: N tokens of a pass, C slots including the null block, T tokens of a request, X concatenated states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.target.capture import check_aux_layer_ids
from eyas.target.model import Target


class HiddenStateCache:
    """States [C, X] by slot."""

    def __init__(self, layer_ids: tuple[int, ...], cache: KVCache, target: Target) -> None:
        """`cache` is the KV cache whose slots are mirrored."""
        self.layer_ids = check_aux_layer_ids(layer_ids, target.facts.num_hidden_layers)
        self._block_size, width = cache.block_size, len(self.layer_ids) * target.facts.hidden_size
        with torch.inference_mode(False):  # otherwise writes outside of inference mode would fail
            self._states_CX = torch.empty(cache.slots, width, dtype=target.dtype, device=target.device)

    def write(self, slot_mapping_N: Tensor, states_NX: Tensor) -> None:
        self._states_CX.index_copy_(0, slot_mapping_N, states_NX.to(self._states_CX.dtype))

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        """Copy slots; all reads come before all writes."""
        self._states_CX.index_copy_(0, to_M, self._states_CX.index_select(0, from_M))

    def read(self, blocks: Sequence[int], count: int) -> Tensor:
        """Return the states [T, X] of a request's first `count` tokens."""
        size = self._block_size
        slots = [blocks[position // size] * size + position % size for position in range(count)]
        return self._states_CX[torch.tensor(slots, dtype=torch.int64, device=self._states_CX.device)]
