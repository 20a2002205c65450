"""The target's hidden states of chosen layers, kept in the same blocks as its keys and values.

Invariant: where a token's keys and values are valid, so are its states. They are written when the token is committed
and never again, so what is true of blocks is true of them: a prefix that several requests share has one copy, and what
the prefix cache gives to a request comes with its states.

Shapes: C slots of all blocks, T tokens of a request, X concatenated states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenStateCache:
    """States [C, X] by slot."""

    def __init__(self, *, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        with torch.inference_mode(False):  # else it could be written in inference mode only
            self._states_CX = torch.empty(blocks * block_size, width, dtype=dtype, device=device)

    def write(self, blocks: Sequence[int], first: int, states_TX: Tensor) -> None:
        """Keep the states of a request's tokens from position `first` on."""
        self._states_CX[self._slots(blocks, first, first + len(states_TX))] = states_TX

    def read(self, blocks: Sequence[int], count: int) -> Tensor:
        """The states [T, X] of a request's first `count` tokens."""
        return self._states_CX[self._slots(blocks, 0, count)]

    def _slots(self, blocks: Sequence[int], first: int, end: int) -> Tensor:
        size = self._block_size
        slots = [blocks[position // size] * size + position % size for position in range(first, end)]
        return torch.tensor(slots, dtype=torch.int64, device=self._states_CX.device)
