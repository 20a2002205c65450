# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The largest logit of each row in two stages on a GPU: many programs for a row, where torch has one.

The first stage is here: every part of a row gives its largest logit, where that stands and, if asked for, the sum of
exp(logit - largest). What merges the parts goes on with the token (`draft_choice_triton.py`,
`round_outcome_triton.py`), so there is no third launch. Of equals the first wins, as torch has it on a CPU. What is
undefined counts as infinite, so somebody of the vocabulary wins always.

Shapes: N rows, V tokens, B parts of the vocabulary.
"""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_PART = 4096
_SMALL_PART = 1024
"""Where there are few rows, so that they fill the device."""
_FEW_PROGRAMS = 256


class LogitParts(NamedTuple):
    """What is known of each part of each row."""

    best_NB: Tensor
    """Its largest logit, float32."""
    index_NB: Tensor
    """Where in the vocabulary that stands first, int32."""
    total_NB: Tensor
    """The sum of exp(logit - largest), float32; means nothing unless it was asked for."""

    @property
    def padded(self) -> int:
        """A power of two that holds the parts."""
        padded: int = triton.next_power_of_2(self.best_NB.shape[1])
        return padded


@triton.jit
def _part_kernel(logits, best_of, index_of, total_of, row_stride, SIZE, PARTS, PART: tl.constexpr, TOTAL: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, axis=0)
    # A place behind the vocabulary may equal the best only where all are -inf, and then stands behind one that is not.
    tl.store(best_of + row * PARTS + part, best)
    tl.store(index_of + row * PARTS + part, tl.min(tl.where(x == best, at, 2147483647), axis=0))
    if TOTAL:
        safe = tl.where(best == float("-inf"), 0.0, best)
        tl.store(total_of + row * PARTS + part, tl.sum(tl.exp(x - safe), axis=0))


def logit_parts(logits_NV: Tensor, *, total: bool = False) -> LogitParts:
    """The first stage over logits whose rows are contiguous."""
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
