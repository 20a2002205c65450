"""The draft of every row, and how likely the drafter holds it: from logits into the round's buffers.

Shapes: R rows, W draft vocabulary, K drafts of a row.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton


def choose_drafts(
    logits_RW: Tensor, token_W: Tensor, drafts_RK: Tensor, sure_RK: Tensor, at: int, index_R: Tensor | None = None
) -> Tensor:
    """Tokens [R] of the largest logits, or of those at index_R; with their probabilities also written to column `at`.

    token_W are the ids of the draft vocabulary. The last two tables may have more rows.
    """
    if logits_RW.is_cuda and has_triton():
        from eyas.kernels.draft_choice_triton import choose_drafts_by_triton  # torch for CPUs comes without triton

        return choose_drafts_by_triton(logits_RW, token_W, drafts_RK, sure_RK, at, index_R)
    rows = len(logits_RW)
    index_R = logits_RW.argmax(dim=-1) if index_R is None else index_R
    token_R = token_W[index_R]
    drafts_RK[:rows, at] = token_R
    sure_RK[:rows, at] = logits_RW.softmax(dim=-1, dtype=torch.float32).gather(-1, index_R[:, None])[:, 0]
    return token_R
