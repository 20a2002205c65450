"""Several processes training one drafter: each takes a part of every step's packs, gradients are summed.

The loss of a step is a mean over all its predictions, wherever they were computed, so counts are summed before and
gradients after; the result is that of one process up to the order of additions.

Processes meet in two ways. Sums are collectives and have a timeout, because all processes get there at about the same
time. A barrier stands behind work that one process does for all (tokenising, writing checkpoints), which may take
hours: it counts arrivals in the store by which the processes found each other, and waits as long as it takes. If a
process dies, torchrun ends the others.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Of a sum over all processes: longer than one of them compiles behind the others, shorter than a night."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers; alone by default."""

    rank: int = 0
    world: int = 1
    store: Store | None = None
    """Shared by all processes; there unless this one is alone."""

    @classmethod
    def join(cls, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> "Ranks":
        """Join the other processes when torchrun started this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(iter(rendezvous("env://")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        return cls(rank=rank, world=world, store=PrefixStore("eyas", store))

    def leave(self) -> None:
        """Part from the others."""
        if self.world > 1:
            dist.destroy_process_group()

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

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the main one's tensors, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    def start_sum(self, tensor: Tensor) -> "PendingSum":
        """Begin to add up a tensor of all processes, in place; it must not be touched before the sum is there."""
        if self.world == 1:
            return PendingSum(tensor=tensor, work=None)
        return PendingSum(tensor=tensor, work=dist.all_reduce(tensor, async_op=True))

    def any_true(self, flag: bool, device: torch.device) -> bool:
        """Whether any process raises the flag."""
        return any(self.sum_counts([int(flag)], device))

    def from_main(self, number: float, device: torch.device) -> float:
        """The main process's number, for all."""
        if self.world == 1:
            return number
        shared = torch.tensor([number], dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared.item())

    def barrier(self) -> None:
        """Go on together, however long one of the processes takes."""
        if self.world == 1:
            return
        assert self.store is not None
        store = self.store
        # Nobody arrives at the next barrier before all have arrived at this one, so one counter serves all barriers.
        number = (store.add("arrived", 1) - 1) // self.world
        _wait_until(lambda: store.add("arrived", 0) >= (number + 1) * self.world)
        # The main process may hold the store: it stays until the others have read it.
        if self.is_main:
            _wait_until(lambda: store.add("passed", 0) >= (number + 1) * (self.world - 1))
        else:
            store.add("passed", 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class PendingSum:
    """A sum over all processes that is under way."""

    tensor: Tensor
    work: "dist.Work | None"

    def wait(self) -> Tensor:
        """The sum."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def _wait_until(reached: Callable[[], bool]) -> None:
    pause = 0.001
    while not reached():
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
