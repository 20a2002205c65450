"""The target's hidden states of chosen layers, kept in the same blocks as its keys and values.

Invariant: where a token's keys and values are valid, so are its states. Every pass that writes the former writes the
latter: a prefix that several requests share has one copy, and what the prefix cache gives to a request comes with its
states.

Shapes: N tokens of a pass, C slots of all blocks and of the null block, T tokens of a request, X concatenated states.
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
        """Beside the keys and values of `cache`."""
        self.layer_ids = check_aux_layer_ids(layer_ids, target.facts.num_hidden_layers)
        self._block_size, width = cache.block_size, len(self.layer_ids) * target.facts.hidden_size
        with torch.inference_mode(False):  # else it could be written in inference mode only
            self._states_CX = torch.empty(cache.slots, width, dtype=target.dtype, device=target.device)

    def write(self, slot_mapping_N: Tensor, states_NX: Tensor) -> None:
        """Keep the states of a pass."""
        self._states_CX.index_copy_(0, slot_mapping_N, states_NX.to(self._states_CX.dtype))

    def move(self, from_M: Tensor, to_M: Tensor) -> None:
        """Copy slots; all are read before any is written."""
        self._states_CX.index_copy_(0, to_M, self._states_CX.index_select(0, from_M))

    def read(self, blocks: Sequence[int], count: int) -> Tensor:
        """The states [T, X] of a request's first `count` tokens."""
        size = self._block_size
        slots = [blocks[position // size] * size + position % size for position in range(count)]
        return self._states_CX[torch.tensor(slots, dtype=torch.int64, device=self._states_CX.device)]
