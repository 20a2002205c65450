"""Data-parallel processes: each takes a part of every step's packs, and gradients are summed.

The loss of a step is a mean over all its predictions on all processes, so counts are summed before and gradients after;
the result is that of one process up to the order of additions.

Processes meet in two ways. Sums are collectives with a timeout, because all processes get there at about the same time.
A barrier follows work that one process does for all (tokenising, writing checkpoints), which may take hours: it counts
arrivals in the store by which the processes found each other, and waits as long as it takes. If a process dies,
torchrun ends the others.
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
"""Timeout of a sum over all processes: longer than processes may differ in compiling, shorter than a night."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank of this process and number of processes; alone by default."""

    rank: int = 0
    world: int = 1
    store: Store | None = None
    """Store shared by all processes; None if there is one process."""

    @classmethod
    def join(cls, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> "Ranks":
        """Join the other processes if torchrun started this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, world = next(iter(rendezvous("env://")))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        return cls(rank=rank, world=world, store=PrefixStore("eyas", store))

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_counts(self, counts: Sequence[int], device: torch.device) -> list[int]:
        if self.world == 1:
            return list(counts)
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return [int(count) for count in total.tolist()]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all processes, in place."""
        if self.world > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Copy the main process's tensors to all processes, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor.data, src=0)

    def any_true(self, flag: bool, device: torch.device) -> bool:
        return any(self.sum_counts([int(flag)], device))

    def from_main(self, number: float, device: torch.device) -> float:
        """Broadcast a number of the main process."""
        if self.world == 1:
            return number
        shared = torch.tensor([number], dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared.item())

    def barrier(self) -> None:
        """Wait for all processes, however long one of them takes."""
        if self.world == 1:
            return
        assert self.store is not None
        store = self.store
        # No process reaches the next barrier before all have reached this one, so one counter serves all barriers.
        number = (store.add("arrived", 1) - 1) // self.world
        _wait_until(lambda: store.add("arrived", 0) >= (number + 1) * self.world)
        # The main process may own the store, so it waits until the others have read it.
        if self.is_main:
            _wait_until(lambda: store.add("passed", 0) >= (number + 1) * (self.world - 1))
        else:
            store.add("passed", 1)


def _wait_until(reached: Callable[[], bool]) -> None:
    pause = 0.001
    while not reached():
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
