"""The numbers of a step, side by side in memory: one copy brings all of them to the device.

Every number is an int64, and real ones are the bits of a float64, so that one piece of memory holds all of them. The
host writes into pinned memory, which a copy reads without waiting; the device's part never moves, so operations that
read it can be captured. Whoever writes a buffer again must have waited for what was computed from it.

Shapes: R rows, P blocks of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.engine.request import SequenceState


class InputBuffers:
    """Named tables of numbers, on the host to be written and on the device to be read."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        total = sum(prod(shape) for shape in shapes.values())
        self._from = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
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
        self._tables = numbers[:0].reshape(0, 0)
        if "table" in shapes:
            self._tables = self._host["table"].reshape(shapes["table"])
        self._owners: list[tuple[int, int]] = [(-1, -1)] * len(self._tables)
        self._settled: list[int] = [0] * len(self._tables)

    def write(self, name: str, numbers: Sequence[int]) -> None:
        """Fill a table from its beginning, row by row; what is behind becomes 0."""
        table = self._host[name]
        table[: len(numbers)] = numbers
        table[len(numbers) :] = 0

    def write_reals(self, name: str, numbers: Sequence[float]) -> None:
        """The same for real numbers."""
        table = self._host[name].view(np.float64)
        table[: len(numbers)] = numbers
        table[len(numbers) :] = 0

    def write_blocks(self, seqs: Sequence[SequenceState], block_size: int) -> None:
        """Let `table` [R, P] hold the blocks of these requests; rows behind them keep what they had.

        A block all of whose tokens are read stays a request's own until it is preempted, so only those behind are
        written again.
        """
        for row, seq in enumerate(seqs):
            owner = seq.key, seq.preemptions
            known = self._settled[row] if self._owners[row] == owner else 0
            blocks: Any = seq.blocks[known:]
            self._tables[row, known : known + len(blocks)] = blocks
            self._owners[row], self._settled[row] = owner, seq.target_length // block_size

    def staged(self) -> Callable[[], None]:
        """What is written now, to be brought to the device by calling this; the tables may be written again at once."""
        kept = self._from.clone()
        if self._to.is_cuda:
            kept = kept.pin_memory()

        def bring() -> None:
            self._to.copy_(kept, non_blocking=True)

        return bring

    def send(self) -> None:
        """Bring everything to the device."""
        self._to.copy_(self._from, non_blocking=True)

    def clear(self) -> None:
        """All zeros on the device: numbers that harm nobody."""
        self._to.zero_()
