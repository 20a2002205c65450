# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Sums over programs that share outputs: products with few outputs are split along their inputs, too, to fill a GPU.

Every program writes its partial sums, and the last one to arrive adds them up, always in the same order. So results are
reproducible, and no further launch is needed.

Arrivals are counted in memory that is 0 before and after a launch. Launches that share it must not overlap.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor


@triton.jit
def split_sums(acc, inside, partial, arrived, SPLITS: tl.constexpr):
    """The sums of the programs along axis 2, and whether this program has them: only the last one does.

    `acc` is two-dimensional float32. Where `inside` is false, nothing is read or written.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    at = partial + tile.to(tl.int64) * (SPLITS * SIZE) + at
    # Bypass the L1 cache: other programs read this, and their sums are read.
    tl.store(at + tl.program_id(2) * SIZE, acc, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # all threads' stores must precede the count
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        acc = tl.zeros_like(acc)
        for split in tl.static_range(SPLITS):
            acc += tl.load(at + split * SIZE, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return acc, last


def split_memory(like: Tensor, arrived: Tensor | None, tiles: int, tile: int, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for `split_sums`: partial sums, and counters, which may be given."""
    if splits == 1:
        return like, like
    partial = like.new_empty(tiles * splits * tile, dtype=torch.float32)
    if arrived is None or len(arrived) < tiles:
        arrived = like.new_zeros(tiles, dtype=torch.int32)
    return partial, arrived
