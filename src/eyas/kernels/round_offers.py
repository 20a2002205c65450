"""Drafts that the host has looked up, put where they belong: it may have been a step behind when it did.

The host says of a row how many tokens it knew of the request, and which it expects behind them. Meanwhile the step
before may have given the request one token or many. If those are the expected ones, what is expected behind them is
drafted; if not, nothing is, or what a drafter has drafted stands.

Nothing here looks at a number on the host and no shape depends on one, so it can be captured in a CUDA graph.

Shapes: R rows, K drafts of a row, C expected tokens.
"""

import torch
from torch import Tensor

from eyas.kernels.round_tensors import RoundTensors


def place_offers(state: RoundTensors, *, rows: int, depth: int, keep: bool) -> Tensor:
    """Leave drafts and how deep each row is drafted for in the state; `keep` what is there where an offer is void.

    Gives for each row whether its offer stands.
    """
    offers_RC, slot_R = state.offers_RC[:rows], state.row_slot[:rows]
    known_R, count_R, expected_RC = offers_RC[:, 0], offers_RC[:, 1], offers_RC[:, 2:]
    length_R = state.length_S[slot_R]
    place_C = torch.arange(expected_RC.shape[1], device=slot_R.device)
    came_R = length_R + 1 - known_R
    came_RC = state.tokens_SL[slot_R[:, None], (known_R[:, None] + place_C) % state.ring]
    as_expected_R = ((came_RC == expected_RC) | (place_C >= came_R[:, None])).all(dim=1)
    room_R = state.limit_S[slot_R] - length_R - 2
    deep_R = torch.minimum(torch.minimum(count_R - came_R, state.row_depth[:rows]), room_R)
    stands_R = as_expected_R & (came_R >= 0) & (deep_R > 0)
    index_RK = (came_R[:, None] + place_C[:depth]).clamp(min=0, max=expected_RC.shape[1] - 1)
    drafts_RK, sure_RK = state.drafts_RK[:rows, :depth], state.sure_RK[:rows, :depth]
    stands_RK = stands_R[:, None]
    drafts_RK.copy_(torch.where(stands_RK, expected_RC.gather(1, index_RK), drafts_RK))
    sure_RK.copy_(torch.where(stands_RK, torch.ones_like(sure_RK), sure_RK))
    before_R = state.depth_R[:rows] if keep else torch.zeros_like(deep_R)
    state.depth_R[:rows] = torch.where(stands_R, deep_R, before_R)
    return stands_R
