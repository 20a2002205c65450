"""How a product of few rows is cut among the programs of a GPU."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

OUTPUTS = 64
"""Of one program."""
PROCESSORS = 132
"""Of an H200, on which these numbers were tuned."""
LEAST_INPUTS = 512
"""Of one program, where inputs are split."""


@dataclass(frozen=True)
class DecodeTiling:
    """What one program has of a product, and what runs it."""

    outputs: int
    inputs: int
    """Of one step."""
    rows: int
    warps: int
    stages: int
    """Steps whose weights are under way at once."""
    splits: int = 1
    """Programs that share outputs, each with a part of the inputs."""

    def grid(self, rows: int, outputs: int) -> tuple[int, int, int]:
        """The programs of a product: tiles of rows and of outputs, and splits."""
        return -(-rows // self.rows), -(-outputs // self.outputs), self.splits

    def stages_of(self, step_bytes: int, device: torch.device) -> int:
        """Stages for which a program has memory, if a step takes so much of it."""
        return max(2, min(self.stages, _shared_memory(device) // step_bytes))


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have, less a little that kernels take beside their stages."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - (4 << 10)  # type: ignore[attr-defined, unused-ignore]


def splits_for(outputs: int, inputs: int, programs: int) -> int:
    """Parts that the inputs of a weight are cut into: the fewest with which there are so many programs.

    More of them gain little at one row, and at 16 they are slower: sums over programs take time, too.
    """
    tiles, splits = -(-outputs // OUTPUTS), 1
    while splits < 8 and tiles * splits < programs and inputs >= 2 * splits * LEAST_INPUTS:
        splits *= 2
    return splits


def decode_counts(weight: Tensor) -> Tensor:
    """Memory in which the programs of a product are counted (`split_sums_triton.py`): enough for many rows."""
    return torch.zeros(16 * -(-len(weight) // OUTPUTS), dtype=torch.int32, device=weight.device)
