"""Places drafts that the host has looked up, although it may have been a step behind.

For each row the host sends how many tokens of the request it knew, and which it expects after them. Meanwhile the
previous step may have added one token or many. If those are the expected ones, the rest of the expected tokens become
drafts; if not, the offer is void, and a drafter's own drafts stay.

A drafter may have drafted less deep than the pass verifies. Some rows need the drafter to confirm what is expected: if
its drafts are the same, as far as they go, the expected tokens continue them; otherwise they stay alone.

Nothing here reads device data on the host and no shape depends on it, so it can be captured in a CUDA graph.

Shapes: R rows, K drafts of a row, C expected tokens.
"""

import torch
from torch import Tensor

from eyas.kernels.round_tensors import RoundTensors

LOOKED_UP = 2.0
"""The confidence of looked-up drafts: higher than a drafter's can be."""


def place_offers(state: RoundTensors, *, rows: int, depth: int, own_depth: int) -> Tensor:
    """Fill in drafts and each row's number of drafts, at most a drafter's `own_depth` where an offer is void.

    Returns for each row whether its offer holds.
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
    first_R = own_R * confirmed_R  # the drafter's own drafts come first
    placed_RK = stands_R[:, None] & (place_K >= first_R[:, None]) & (place_K < deep_R[:, None])
    drafts_RK.copy_(torch.where(placed_RK, expected_RK, drafts_RK))
    sure_RK.masked_fill_(placed_RK, LOOKED_UP)
    state.depth_R[:rows] = torch.where(stands_R, deep_R, own_R)
    return stands_R
