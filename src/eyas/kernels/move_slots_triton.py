# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Moves KV cache slots of all layers in one launch, where torch would take four per layer.

Shapes: L tensors of keys or values, G heads, C slots, K head dim, R rows, D moves of a row.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""Integer types to move numbers as, by size."""


@triton.jit
def _move_kernel(
    memory,
    from_of,
    to_of,
    head_stride,
    MOVES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """One tensor, row and head. No slot moves to where a later one comes from, so moving in order is safe: a lane reads
    and writes one place of the slots only.
    """
    row, head, k = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.arange(0, PADDED)
    address = tl.load(memory + tl.program_id(0))
    x = address.to(tl.pointer_type(ELEMENT))
    for move in tl.static_range(MOVES):
        source, goal = tl.load(from_of + row * MOVES + move), tl.load(to_of + row * MOVES + move)
        moves = (k < SIZE) & (source != goal)
        value = tl.load(x + head * head_stride + source * SIZE + k, mask=moves, other=0)
        tl.store(x + head * head_stride + goal * SIZE + k, value, mask=moves)


def move_slots_by_triton(memory_L: Tensor, like_GCK: Tensor, from_M: Tensor, to_M: Tensor, rows: int) -> None:
    """Move slots in tensors of equal shape, given by address: D of each row, each towards the front."""
    heads, _, size = like_GCK.shape
    _move_kernel[len(memory_L), rows, heads](
        memory_L,
        from_M,
        to_M,
        like_GCK.stride(0),
        MOVES=len(from_M) // rows,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        ELEMENT=_WORDS[like_GCK.element_size()],
        num_warps=1,
    )


def addresses(tensors: list[Tensor]) -> Tensor:
    """Addresses of tensors, on their device."""
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64).to(tensors[0].device)
