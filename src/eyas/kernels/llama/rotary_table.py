"""Rotations by position, worked out once: for a pass of few tokens, to work them out takes longer than to look them up.

Shapes: N tokens, K numbers of a head that are rotated, T positions,
B rotations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FIRST_POSITIONS = 1024
NEXT_POSITIONS = 64

Rope = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Cosines and sines [T, 1, K] of the rotation at positions [T]."""


class RotaryTable:
    """Cosines and sines of the rotation, worked out once for every position, and as far as they were asked for."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self.cos_TK, self.sin_TK = self._worked_out(FIRST_POSITIONS)

    def at(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Those of positions, [N, K]."""
        self.reach(1 + int(position_N.max()))
        return self.cos_TK.index_select(0, position_N), self.sin_TK.index_select(0, position_N)

    def reach(self, positions: int) -> None:
        """Have so many."""
        if positions > len(self.cos_TK):
            self.cos_TK, self.sin_TK = self._worked_out(2 * positions)

    def forget(self) -> None:
        """Have as many as at first."""
        self.cos_TK, self.sin_TK = self._worked_out(FIRST_POSITIONS)

    def _worked_out(self, count: int) -> tuple[Tensor, Tensor]:
        cos_TGK, sin_TGK = self._rope(torch.arange(count), torch.float32)
        return cos_TGK[:, 0].contiguous(), sin_TGK[:, 0].contiguous()


Turns = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines [B, N, K] of all rotations of a model at positions [N]."""


class RotaryWindow:
    """Cosines and sines of the next positions, for a request that decodes alone; a table of all would take memory."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._first = turns, 0
        self._window: tuple[Tensor, Tensor] | None = None

    def at(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Those of so many positions, no more than `NEXT_POSITIONS`, from the first on: [B, N, K]."""
        start = first - self._first
        if self._window is None or start < 0 or start + count > NEXT_POSITIONS:
            self._window = self._turns(torch.arange(first, first + NEXT_POSITIONS))
            self._first, start = first, 0
        cos_BTK, sin_BTK = self._window
        return cos_BTK[:, start : start + count].contiguous(), sin_BTK[:, start : start + count].contiguous()
