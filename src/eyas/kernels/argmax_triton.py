# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The largest logit of each row on a GPU in two stages: many programs per row, where torch has one.

The first stage is here: every part of a row yields its largest logit, its index and, if asked for, the sum of
exp(logit - largest). The kernel that merges the parts also uses the token (`draft_choice_triton.py`,
`round_outcome_triton.py`), so there is no third launch. Of equals the first wins, as in torch on a CPU. NaN counts as
infinite, so the winner is always within the vocabulary.

Shapes: N rows, V tokens, B parts of the vocabulary.
"""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_PART = 4096
_SMALL_PART = 1024
"""The part size for few rows, small enough to fill the device."""
_FEW_PROGRAMS = 256


class LogitParts(NamedTuple):
    """The first stage's results for each part of each row."""

    best_NB: Tensor
    """The largest logit of each part, float32."""
    index_NB: Tensor
    """The vocabulary index of the first largest logit, int32."""
    total_NB: Tensor
    """The sum of exp(logit - largest), float32; undefined unless it was asked for."""

    @property
    def padded(self) -> int:
        """The number of parts, rounded up to a power of two."""
        padded: int = triton.next_power_of_2(self.best_NB.shape[1])
        return padded


@triton.jit
def _part_kernel(logits, best_of, index_of, total_of, row_stride, SIZE, PARTS, PART: tl.constexpr, TOTAL: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, axis=0)
    # Past the vocabulary, a place can equal the best only if all are -inf, and then comes after one that is not past
    # it.
    tl.store(best_of + row * PARTS + part, best)
    tl.store(index_of + row * PARTS + part, tl.min(tl.where(x == best, at, 2147483647), axis=0))
    if TOTAL:
        safe = tl.where(best == float("-inf"), 0.0, best)
        tl.store(total_of + row * PARTS + part, tl.sum(tl.exp(x - safe), axis=0))


def logit_parts(logits_NV: Tensor, *, total: bool = False) -> LogitParts:
    """Run the first stage over logits with contiguous rows."""
    assert logits_NV.stride(1) == 1
    rows, size = logits_NV.shape
    part = _SMALL_PART if rows * triton.cdiv(size, _PART) < _FEW_PROGRAMS else _PART
    count = triton.cdiv(size, part)
    best_NB = torch.empty(rows, count, dtype=torch.float32, device=logits_NV.device)
    index_NB = torch.empty(rows, count, dtype=torch.int32, device=logits_NV.device)
    total_NB = torch.empty_like(best_NB) if total else best_NB
    _part_kernel[rows, count](
        logits_NV,
        best_NB,
        index_NB,
        total_NB,
        logits_NV.stride(0),
        size,
        count,
        PART=part,
        TOTAL=total,
        num_warps=4,
    )
    return LogitParts(best_NB, index_NB, total_NB)
