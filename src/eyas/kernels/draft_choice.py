"""Chooses the draft of every row from logits, with the drafter's probability of it.

Shapes: R rows, W draft vocabulary, K drafts of a row.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton


def choose_drafts(
    logits_RW: Tensor, token_W: Tensor, drafts_RK: Tensor, sure_RK: Tensor, at: int, index_R: Tensor | None = None
) -> Tensor:
    """Return the tokens [R] of the largest logits, or of those at index_R; write tokens and probabilities to column
    `at`.

    token_W maps draft ids to target ids. The two tables may have more rows.
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
