"""The outcome of a round: drafts that equal the target's own tokens are accepted, and the requests advance.

To measure at a chosen acceptance rate, a coin may replace that rule: a hash of slot, length and depth, so that it is
tossed anew in every round and unknown to the host. Nothing else changes.

Shapes: R rows, K drafts of a row, Q = 1 + K its tokens, N = R * Q, V vocabulary.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton
from eyas.kernels.noise import uniform
from eyas.kernels.round_tensors import RoundTensors


def accepted_drafts(token_RQ: Tensor, drafts_RK: Tensor, depth_R: Tensor) -> Tensor:
    """The number of leading drafts, of the first depth_R, that are the target's own tokens [R]."""
    depth = drafts_RK.shape[1]
    real_RK = torch.arange(depth, device=depth_R.device) < depth_R[:, None]
    return ((token_RQ[:, :depth] == drafts_RK) & real_RK).cumprod(dim=-1).sum(dim=-1)


def settle(
    state: RoundTensors,
    *,
    rows: int,
    depth: int,
    logits_NV: Tensor | None = None,
    token_RQ: Tensor | None = None,
    chance: Tensor | None = None,
) -> Tensor:
    """Advance the rows by the target's tokens: those of the largest logits, or those given.

    Returns a line per row: numbers of new tokens and of accepted drafts, Q tokens, K drafts, and the drafter's
    confidence in each as the bits of float64. A row at its limit gets fewer tokens than were accepted, and a row that
    does not sample none. With `chance`, one float64, each draft is accepted by a coin instead.
    """
    assert (logits_NV is None) != (token_RQ is None)
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.round_outcome_triton import settle_by_triton  # torch for CPUs comes without triton

        return settle_by_triton(state, rows=rows, depth=depth, logits_NV=logits_NV, token_RQ=token_RQ, chance=chance)
    if token_RQ is None:
        assert logits_NV is not None
        token_RQ = logits_NV.argmax(dim=-1).view(rows, 1 + depth)
    slot_R, drafts_RK, depth_R = state.row_slot[:rows], state.drafts_RK[:rows, :depth], state.depth_R[:rows]
    length_R = state.length_S[slot_R]
    offset_Q = torch.arange(1 + depth, device=slot_R.device)
    if chance is not None:
        lucky_RK = uniform(slot_R, length_R, offset_Q[:depth]) < chance
        tossed_RK = torch.where(lucky_RK, drafts_RK, -1)
        accepted_R = accepted_drafts(tossed_RK, drafts_RK, depth_R)
        drafted_RK = torch.where(offset_Q[:depth] < accepted_R[:, None], drafts_RK, token_RQ[:, :depth])
        token_RQ = torch.cat([drafted_RK, token_RQ[:, depth:]], dim=1)
    else:
        accepted_R = accepted_drafts(token_RQ, drafts_RK, depth_R)
    room_R = (state.limit_S[slot_R] - length_R - 1).clamp(min=0)
    new_R = torch.minimum(accepted_R + 1, room_R) * state.row_samples[:rows]
    place_RQ = slot_R[:, None] * state.ring + (length_R[:, None] + 1 + offset_Q) % state.ring
    # Places after the new tokens go to the padding slot.
    place_RQ = torch.where(offset_Q < new_R[:, None], place_RQ, state.nobody * state.ring)
    state.tokens_SL.flatten().index_copy_(0, place_RQ.flatten(), token_RQ.flatten())
    state.length_S.index_copy_(0, slot_R, length_R + new_R)
    sure_RK = state.sure_RK[:rows, :depth].double().view(torch.int64)
    return torch.cat([new_R[:, None], accepted_R[:, None], token_RQ, drafts_RK, sure_RK], dim=1)
