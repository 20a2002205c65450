"""Lays out the passes of a round on the device, from `RoundTensors` alone.

Nothing here reads device data on the host and no shape depends on it, so it can be captured in a CUDA graph.

Rows of the padding slot, requests at their limit, and tokens after a row's live ones are written to the null slot and
to the padding slot's ring. Their results are meaningless.

Shapes: R rows, Q tokens of a row, K = Q - 1 drafts, C states of a row that are read, N tokens of a pass, P blocks of a
row.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.round_tensors import BlockShape, DraftLayout, RoundTensors, VerifyLayout


class Rows:
    """The state of a pass's requests when it begins."""

    def __init__(self, state: RoundTensors, rows: int, shape: BlockShape) -> None:
        self.state, self.shape = state, shape
        self.slot_R = slot_R = state.row_slot[:rows]
        self.length_R = state.length_S[slot_R]
        self.table_RP = state.table_SP[:, : shape.blocks].index_select(0, slot_R).int()
        self.room_R = (state.limit_S[slot_R] - self.length_R - 1).clamp(min=0)
        """Tokens that may still be generated."""

    def chains(self, base_R: Tensor, live_R: Tensor, count: int) -> AttentionMetadata:
        """Chains of `count` tokens from base_R on, the first live_R of which are real."""
        base_R = torch.where(live_R > 0, base_R, 0).int()
        size, null_slot = self.shape.block_size, self.shape.null_slot
        return AttentionMetadata.padded(
            self.table_RP, base_R, live_R.int(), count=count, block_size=size, null_slot=null_slot
        )

    def in_ring(self, position_RQ: Tensor, live_RQ: Tensor | None = None) -> Tensor:
        """Places of positions in the ring of all slots; dead ones go to the padding slot."""
        ring = self.state.ring
        place_RQ = self.slot_R[:, None] * ring + position_RQ % ring
        return place_RQ if live_RQ is None else torch.where(live_RQ, place_RQ, self.state.nobody * ring)


def lay_out_verify(state: RoundTensors, shape: BlockShape, *, rows: int, depth: int) -> VerifyLayout:
    """Lay out the newest token of each row and its drafts, as many as `depth_R` says."""
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.round_layout_triton import lay_out_verify_by_triton  # torch for CPUs comes without triton

        return lay_out_verify_by_triton(state, shape, rows=rows, depth=depth)
    who = Rows(state, rows, shape)
    newest_R1 = state.tokens_SL.flatten()[who.in_ring(who.length_R[:, None])]
    ids_RQ = torch.cat([newest_R1, state.drafts_RK[:rows, :depth]], dim=1)
    drafts_R = state.depth_R[:rows] if depth else torch.zeros_like(who.length_R)
    live_R = torch.where(who.room_R > 0, 1 + drafts_R, 0)
    offset_Q = torch.arange(1 + depth, device=live_R.device)
    place_RQ = who.in_ring(who.length_R[:, None] + offset_Q, offset_Q < live_R[:, None])
    return VerifyLayout(
        tokens=who.chains(who.length_R, live_R, 1 + depth), ids_N=ids_RQ.flatten(), place_N=place_RQ.flatten()
    )


def lay_out_draft(
    state: RoundTensors, shape: BlockShape, *, rows: int, reads: int, depth: int, kept: int = 0
) -> DraftLayout:
    """Lay out the states that wait for the drafter, up to `reads` of each row, and up to `depth` drafts after them.

    The last `kept` of them keep waiting; nothing can be drafted then. The state is updated as if all of this had run:
    drafts per row in `depth_R`, states read in `drafted_S`.
    """
    assert not (kept and depth)
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.round_layout_triton import lay_out_draft_by_triton  # torch for CPUs comes without triton

        return lay_out_draft_by_triton(state, shape, rows=rows, reads=reads, depth=depth, kept=kept)
    who = Rows(state, rows, shape)
    drafted_R = state.drafted_S[who.slot_R]
    follows_R = (who.room_R > 0) & (state.follows_S[who.slot_R] > 0)
    live_R = torch.where(follows_R, who.length_R - kept - drafted_R, 0).clamp(min=0)
    position_RC = drafted_R[:, None] + torch.arange(reads, device=drafted_R.device)
    deeper = list[AttentionMetadata]()
    if depth:
        limit_R = torch.where(live_R > 0, torch.minimum(state.row_depth[:rows], who.room_R - 1), 0)
        state.depth_R[:rows] = limit_R
        deeper = [who.chains(who.length_R + at - 1, (limit_R > at).long(), 1) for at in range(1, depth)]
    state.drafted_S.index_copy_(0, who.slot_R, drafted_R + live_R)
    return DraftLayout(
        tokens=who.chains(drafted_R, live_R, reads),
        ids_N=state.tokens_SL.flatten()[who.in_ring(position_RC + 1).flatten()],
        place_N=who.in_ring(position_RC).flatten(),
        last_R=torch.arange(rows, device=drafted_R.device) * reads + (live_R - 1).clamp(min=0),
        deeper=deeper,
    )
