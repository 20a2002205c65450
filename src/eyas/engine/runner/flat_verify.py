"""Verification of a budget of drafts: the target over fewer tokens than rows x (1 + depth), filled with the likeliest.

The draft before it has made as many drafts for every row as the shape has. Here each row keeps as many as are worth
their place among those of all rows (`verify_budget.py`), and what is kept lies side by side, rows of different lengths
in one flat pass. Logits are brought to where a padded pass would leave them, so that all that follows is the same;
what stands there for drafts that were not kept is old and finite, and nobody looks at it.

How sure the drafter was of a draft that is not kept becomes -1 - sure: the host learns from it what was verified.

Shapes: R rows, K drafts of a row, N tokens of the pass, V vocabulary.
"""

import torch
from torch import Tensor

from eyas.engine.runner.graph_capture import Numbers
from eyas.engine.runner.round_passes import RoundTarget
from eyas.engine.runner.round_state import RoundState
from eyas.engine.runner.verify_budget import calibrated_chances, share_budget_on_device
from eyas.kernels.attention.metadata import AttentionMetadata


def verify_flat(
    _: Numbers,
    *,
    state: RoundState,
    target: RoundTarget,
    rows: int,
    depth: int,
    tokens: int,
    blocks: int,
) -> Tensor:
    """The target over the newest token of each row and the drafts that it keeps: `tokens` in all, at least rows."""
    slot_R, width = state.row_slot[:rows], 1 + depth
    length_R = state.length_S[slot_R]
    runs_R = state.limit_S[slot_R] - length_R > 1
    sure_RK = state.sure_RK[:rows, :depth]
    most_R = torch.where(runs_R, state.depth_R[:rows], 0)
    depth_R = share_budget_on_device(calibrated_chances(sure_RK, state.calibration_C2), most_R, tokens - runs_R.sum())
    state.depth_R[:rows] = depth_R
    kept_RK = torch.arange(depth, device=slot_R.device) < depth_R[:, None]
    state.sure_RK[:rows, :depth] = torch.where(kept_RK, sure_RK, -1 - sure_RK)

    live_R = torch.where(runs_R, 1 + depth_R, 0)
    start_R = torch.cat([live_R.new_zeros(1), live_R.cumsum(0)]).int()
    token_N = torch.arange(tokens, dtype=torch.int32, device=slot_R.device)
    # A token behind the last row counts as one of it, behind its live ones.
    row_N = torch.searchsorted(start_R[1:], token_N, right=True).clamp(max=rows - 1)
    offset_N = token_N.long() - start_R[row_N]
    live_N = offset_N < live_R[row_N]
    ring, position_N = state.ring, length_R[row_N] + offset_N
    newest_N = state.tokens_SL[slot_R, length_R % ring][row_N]
    draft_N = state.drafts_RK[row_N, (offset_N - 1).clamp(0, depth - 1)]
    layout = AttentionMetadata.ragged(
        state.table_SP[:, :blocks].index_select(0, slot_R).int(),
        torch.where(live_R > 0, length_R, 0).int(),
        start_R,
        count=tokens,
        block_size=target.cache.block_size,
        null_slot=target.cache.null_slot,
        live_R=live_R.int(),
        longest=width,
    )
    left_SV = target.logits_SV
    flat_NV = left_SV.new_empty(tokens, left_SV.shape[1])
    logits_NV, aux_NX = target.run(torch.where(offset_N == 0, newest_N, draft_N), layout, None, flat_NV, True)
    # The last row of logits is nobody's.
    place_N = torch.where(live_N, row_N * width + offset_N, len(left_SV) - 1)
    left_SV.index_copy_(0, place_N, logits_NV.to(left_SV.dtype))
    if state.states_SLX is not None and aux_NX is not None:
        place_N = torch.where(live_N, slot_R[row_N] * ring + position_N % ring, state.nobody * ring)
        state.states_SLX.flatten(0, 1).index_copy_(0, place_N, aux_NX.to(state.states_SLX.dtype))
    return depth_R
