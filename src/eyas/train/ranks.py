"""Several processes training one drafter: each takes a part of every step's packs, gradients are summed.

The loss of a step is a mean over all its predictions, wherever they were computed, so counts are summed before and
gradients after; the result is that of one process up to the order of additions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers; alone by default."""

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def sum_counts(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Counts over all processes."""
        if self.world == 1:
            return list(counts)
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return [int(count) for count in total.tolist()]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of all processes, in place and in one message."""
        if self.world == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        torch._foreach_copy_(
            list(tensors),
            [part.view_as(t) for part, t in zip(torch.split(flat, [t.numel() for t in tensors]), tensors, strict=True)],
        )

    def any_true(self, flag: bool, device: torch.device) -> bool:
        """Whether any process raises the flag."""
        return any(self.sum_counts([int(flag)], device))

    def barrier(self) -> None:
        """Go on together."""
        if self.world > 1:
            dist.barrier()
