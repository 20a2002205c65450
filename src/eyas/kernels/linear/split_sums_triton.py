# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Sums over programs that share outputs: a product with few of them is cut along its inputs, too, to fill a GPU.

Every program writes its sums, and the one that comes last adds them all up, always in the same order: which one that is
changes nothing. So the numbers are the same at every run, and no launch is needed behind the product.

Who comes last is counted in memory that is 0 before a launch and after it. Launches that share it must not overlap.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor


@triton.jit
def split_sums(acc, inside, partial, arrived, SPLITS: tl.constexpr):
    """The sums of the programs along axis 2, and whether this one has them: it is the last.

    `acc` has two dimensions and is float32. Where it is not `inside`, nothing is read or written.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    at = partial + tile.to(tl.int64) * (SPLITS * SIZE) + at
    # Past the first cache: this is for others, and what others wrote is read.
    tl.store(at + tl.program_id(2) * SIZE, acc, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # all of the program's numbers, before it says that they are there
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        acc = tl.zeros_like(acc)
        for split in tl.static_range(SPLITS):
            acc += tl.load(at + split * SIZE, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return acc, last


def split_memory(like: Tensor, arrived: Tensor | None, tiles: int, tile: int, splits: int) -> tuple[Tensor, Tensor]:
    """What `split_sums` needs: memory for sums, and counts, which may be given; what is not needed is any memory."""
    if splits == 1:
        return like, like
    partial = like.new_empty(tiles * splits * tile, dtype=torch.float32)
    if arrived is None or len(arrived) < tiles:
        arrived = like.new_zeros(tiles, dtype=torch.int32)
    return partial, arrived
