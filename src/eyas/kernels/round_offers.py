"""Drafts that the host has looked up, put where they belong: it may have been a step behind when it did.

The host says of a row how many tokens it knew of the request, and which it expects behind them. Meanwhile the step
before may have given the request one token or many. If those are the expected ones, what is expected behind them is
drafted; if not, nothing is, or what a drafter has drafted stands.

A drafter may have drafted less deep than the pass verifies. Of some rows the drafter is to confirm what is expected:
where its drafts are the same, as far as it has any, what is expected goes on behind them; else they stand alone.

Nothing here looks at a number on the host and no shape depends on one, so it can be captured in a CUDA graph.

Shapes: R rows, K drafts of a row, C expected tokens.
"""

import torch
from torch import Tensor

from eyas.kernels.round_tensors import RoundTensors

LOOKED_UP = 2.0
"""How sure the drafter was of drafts that are not its own: more than it can be."""


def place_offers(state: RoundTensors, *, rows: int, depth: int, own_depth: int) -> Tensor:
    """Leave drafts and how deep each row is drafted for in the state; a drafter's `own_depth` where an offer is void.

    Gives for each row whether its offer stands.
    """
    offers_RC, slot_R = state.offers_RC[:rows], state.row_slot[:rows]
    known_R, count_R, confirmed_R, expected_RC = offers_RC[:, 0], offers_RC[:, 1], offers_RC[:, 2], offers_RC[:, 3:]
    length_R = state.length_S[slot_R]
    place_C = torch.arange(expected_RC.shape[1], device=slot_R.device)
    place_K = place_C[:depth]
    came_R = length_R + 1 - known_R
    came_RC = state.tokens_SL[slot_R[:, None], (known_R[:, None] + place_C) % state.ring]
    as_expected_R = ((came_RC == expected_RC) | (place_C >= came_R[:, None])).all(dim=1)
    room_R = state.limit_S[slot_R] - length_R - 2
    deep_R = torch.minimum(torch.minimum(count_R - came_R, state.row_depth[:rows]), room_R)
    stands_R = as_expected_R & (came_R >= 0) & (deep_R > 0)
    expected_RK = expected_RC.gather(1, (came_R[:, None] + place_K).clamp(min=0, max=expected_RC.shape[1] - 1))
    drafts_RK, sure_RK = state.drafts_RK[:rows, :depth], state.sure_RK[:rows, :depth]
    own_R = state.depth_R[:rows].clamp(min=0, max=own_depth) if own_depth else torch.zeros_like(deep_R)
    same_R = ((drafts_RK == expected_RK) | (place_K >= own_R[:, None])).all(dim=1)
    goes_on_R = same_R & (own_R > 0) & (deep_R > own_R)
    stands_R = stands_R & ((confirmed_R == 0) | goes_on_R)
    first_R = own_R * confirmed_R  # of the drafts that are not the drafter's
    placed_RK = stands_R[:, None] & (place_K >= first_R[:, None]) & (place_K < deep_R[:, None])
    drafts_RK.copy_(torch.where(placed_RK, expected_RK, drafts_RK))
    sure_RK.masked_fill_(placed_RK, LOOKED_UP)
    state.depth_R[:rows] = torch.where(stands_R, deep_R, own_R)
    return stands_R
