"""The numbers of a step, side by side in memory: one copy brings all of them to the device.

Every number is an int64, so that one piece of memory holds all of them. What was written is staged in pinned memory,
which a copy reads without waiting; the device's part never moves, so operations that read it can be captured.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class InputBuffers:
    """Named tables of numbers, on the host to be written and on the device to be read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        total = sum(prod(shape) for shape in shapes.values())
        self._from = torch.zeros(total, dtype=torch.int64)
        self._to = torch.zeros(total, dtype=torch.int64, device=device)
        numbers: NDArray[np.int64] = self._from.numpy()
        self._host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, Tensor] = {}
        """What was sent last."""
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + prod(shape)
            self._host[name] = numbers[start:end]
            self.device[name] = self._to[start:end].view(shape)

    def write(self, name: str, numbers: Sequence[int]) -> None:
        """Fill a table from its beginning, row by row; what is behind becomes 0."""
        table = self._host[name]
        table[: len(numbers)] = numbers
        table[len(numbers) :] = 0

    def staged(self) -> Callable[[], None]:
        """What is written now, to be brought to the device by calling this; the tables may be written again at once."""
        kept = self._from.clone()
        if self._to.is_cuda:
            kept = kept.pin_memory()

        def bring() -> None:
            self._to.copy_(kept, non_blocking=True)

        return bring

    def clear(self) -> None:
        """All zeros on the device: numbers that harm nobody."""
        self._to.zero_()
