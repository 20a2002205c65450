# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`draft_choice.py` on a GPU: two launches for argmax, softmax, gather and stores.

Shapes: R rows, W draft vocabulary, K drafts of a row, B parts of the vocabulary.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.argmax_triton import logit_parts


@triton.jit(do_not_specialize=["at"])
def _choose_kernel(
    logits,
    best_of,
    index_of,
    total_of,
    chosen,
    token_of,
    tokens,
    drafts,
    sure,
    row_stride,
    drafts_stride,
    sure_stride,
    at,
    PARTS,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose the draft of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = part < PARTS
    best = tl.load(best_of + row * PARTS + part, mask=inside, other=float("-inf"))
    top = tl.max(best, axis=0)
    if CHOSEN:
        index = tl.load(chosen + row)
    else:
        found = tl.load(index_of + row * PARTS + part, mask=inside, other=2147483647)
        index = tl.min(tl.where(best == top, found, 2147483647), axis=0).to(tl.int64)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(total_of + row * PARTS + part, mask=inside, other=0.0) * tl.exp(best - safe), axis=0)
    x = tl.load(logits + row * row_stride + index).to(tl.float32)
    token = tl.load(token_of + index)
    tl.store(tokens + row, token)
    tl.store(drafts + row * drafts_stride + at, token)
    tl.store(sure + row * sure_stride + at, tl.exp(x - safe) / total)


def choose_drafts_by_triton(
    logits_RW: Tensor, token_W: Tensor, drafts_RK: Tensor, sure_RK: Tensor, at: int, index_R: Tensor | None = None
) -> Tensor:
    """`draft_choice.choose_drafts`."""
    parts = logit_parts(logits_RW, total=True)
    rows = len(logits_RW)
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RW.device)
    _choose_kernel[(rows,)](
        logits_RW,
        parts.best_NB,
        parts.index_NB,
        parts.total_NB,
        token_R if index_R is None else index_R.contiguous(),
        token_W,
        token_R,
        drafts_RK,
        sure_RK,
        logits_RW.stride(0),
        drafts_RK.stride(0),
        sure_RK.stride(0),
        at,
        parts.best_NB.shape[1],
        PADDED=parts.padded,
        CHOSEN=index_R is not None,
        num_warps=1,
    )
    return token_R
