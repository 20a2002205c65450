"""Tiling of decoding products: how outputs and inputs are divided among the programs of a GPU."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

OUTPUTS = 64
"""Outputs per program."""
PROCESSORS = 132
"""Streaming multiprocessors of an H200, on which these numbers were tuned."""
LEAST_INPUTS = 512
"""The fewest inputs per program, where inputs are split."""


@dataclass(frozen=True)
class DecodeTiling:
    """The tile of one program, and its launch parameters."""

    outputs: int
    inputs: int
    """Inputs per step."""
    rows: int
    warps: int
    stages: int
    """Pipeline stages: steps whose weights are loaded at once."""
    splits: int = 1
    """The number of programs that share outputs, each over a part of the inputs."""

    def grid(self, rows: int, outputs: int) -> tuple[int, int, int]:
        return -(-rows // self.rows), -(-outputs // self.outputs), self.splits

    def stages_of(self, step_bytes: int, device: torch.device) -> int:
        """Stages that fit into a program's shared memory, if a step takes `step_bytes`."""
        return max(2, min(self.stages, _shared_memory(device) // step_bytes))


@cache
def _shared_memory(device: torch.device) -> int:
    """Shared memory that a program may use, less a reserve."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - (4 << 10)  # type: ignore[attr-defined, unused-ignore]


def splits_for(outputs: int, inputs: int, programs: int) -> int:
    """Parts that the inputs of a weight are split into: the fewest that give this many programs.

    More splits gain little at one row and are slower at 16: sums over programs take time, too.
    """
    tiles, splits = -(-outputs // OUTPUTS), 1
    while splits < 8 and tiles * splits < programs and inputs >= 2 * splits * LEAST_INPUTS:
        splits *= 2
    return splits


def decode_counts(weight: Tensor) -> Tensor:
    """Memory for the program counters of `split_sums_triton.py`, enough for many rows."""
    return torch.zeros(16 * -(-len(weight) // OUTPUTS), dtype=torch.int32, device=weight.device)
