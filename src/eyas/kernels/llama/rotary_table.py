"""Cosines and sines by position, computed once: in a short pass, computing them takes longer than looking them up.

Shapes: N tokens, K rotary dim, T positions, B rotations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FIRST_POSITIONS = 1024
NEXT_POSITIONS = 64

Rope = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Cosines and sines [T, 1, K] of the rotation at positions [T]."""


class RotaryTable:
    """Cosines and sines of every position up to the largest one asked for."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self.cos_TK, self.sin_TK = self._worked_out(FIRST_POSITIONS)

    def at(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, K] at these positions."""
        self.reach(1 + int(position_N.max()))
        return self.cos_TK.index_select(0, position_N), self.sin_TK.index_select(0, position_N)

    def reach(self, positions: int) -> None:
        """Extend the table to this many positions."""
        if positions > len(self.cos_TK):
            self.cos_TK, self.sin_TK = self._worked_out(2 * positions)

    def forget(self) -> None:
        """Shrink to the initial size."""
        self.cos_TK, self.sin_TK = self._worked_out(FIRST_POSITIONS)

    def _worked_out(self, count: int) -> tuple[Tensor, Tensor]:
        cos_TGK, sin_TGK = self._rope(torch.arange(count), torch.float32)
        return cos_TGK[:, 0].contiguous(), sin_TGK[:, 0].contiguous()


Turns = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines [B, N, K] of all rotations of a model at positions [N]."""


class RotaryWindow:
    """Cosines and sines of the next positions, for a request that decodes alone; a whole table would take memory."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._first = turns, 0
        self._window: tuple[Tensor, Tensor] | None = None

    def at(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, K] of `count` positions from `first` on, at most `NEXT_POSITIONS`."""
        start = first - self._first
        if self._window is None or start < 0 or start + count > NEXT_POSITIONS:
            self._window = self._turns(torch.arange(first, first + NEXT_POSITIONS))
            self._first, start = first, 0
        cos_BTK, sin_BTK = self._window
        return cos_BTK[:, start : start + count].contiguous(), sin_BTK[:, start : start + count].contiguous()
