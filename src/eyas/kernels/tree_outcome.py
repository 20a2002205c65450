"""The outcome of a round of trees: a walk along the target's own tokens, and which slots to move.

From the newest token on, the child that is the target's token is accepted, then its child, as far as there is one.
Siblings are different tokens, so there is one at most. A coin may replace that rule, as in `round_outcome.py`: at each
depth the first child, by the coin of that depth.

Accepted nodes lie among rejected ones, in the target's cache and among its states. They are moved to where a chain
would have left them.

Shapes: R rows, B nodes, Q = 1 + B places, D depth, W candidates of a node, N = R * Q, V vocabulary, M moved slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton
from eyas.kernels.noise import uniform
from eyas.kernels.round_layout import Rows
from eyas.kernels.round_tensors import BlockShape, RoundTensors
from eyas.kernels.tree_nodes import TreeNodes


class TreeOutcome(NamedTuple):
    """The outcome of a round, and what is left to do."""

    line_RC: Tensor
    """Per row: numbers of new tokens and of accepted nodes, 1 + D tokens, number and depth of the verified nodes, and D
    * W candidates after the accepted ones and the last: tokens, -1 if unknown, and the drafter's confidence as the bits
    of float64."""
    path_RT: Tensor
    """The places of the newest token and the accepted nodes, T = 1 + D; then the last one repeated."""
    ring_RT: Tensor
    """Places for their states in the ring of all slots."""
    from_M: Tensor
    to_M: Tensor
    """Cache slots to move, M = R * D; the null slot to itself where there is nothing to move."""


def settle_trees(
    state: RoundTensors,
    trees: TreeNodes,
    shape: BlockShape,
    *,
    logits_NV: Tensor | None = None,
    token_RQ: Tensor | None = None,
    chance: Tensor | None = None,
) -> TreeOutcome:
    """Advance the rows by the target's tokens: those of the largest logits, or those given."""
    assert (logits_NV is None) != (token_RQ is None)
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.tree_outcome_triton import settle_trees_by_triton  # torch for CPUs comes without triton

        made = settle_trees_by_triton(state, trees, shape, logits_NV=logits_NV, token_RQ=token_RQ, chance=chance)
        return TreeOutcome(*made)
    rows, places = trees.kept_token_RQ.shape
    if token_RQ is None:
        assert logits_NV is not None
        token_RQ = logits_NV.argmax(dim=-1).view(rows, places)
    who = Rows(state, rows, shape)
    depth, device = trees.depth, token_RQ.device
    length_R, room_R, slot_R = who.length_R, who.room_R, who.slot_R
    offset_T, place_Q = torch.arange(1 + depth, device=device), torch.arange(places, device=device)

    parent_RQ, kept_RQ = trees.kept_parent_RQ, trees.kept_token_RQ
    taken_RQ = kept_RQ == token_RQ.gather(1, parent_RQ)
    if chance is not None:
        lucky_RD = uniform(slot_R, length_R, offset_T[:depth]) < chance
        # Places ascend with ranks among siblings.
        elder_RQB = (parent_RQ[:, :, None] == parent_RQ[:, None, 1:]) & (place_Q[1:] < place_Q[:, None])
        taken_RQ = ~elder_RQB.any(dim=2) & lucky_RD.gather(1, (trees.kept_depth_RQ - 1).clamp(min=0))
    taken_RQ = taken_RQ & (place_Q <= trees.kept_count_R[:, None])
    taken_RQ[:, 0] = True
    bits_R1 = (taken_RQ.long() << place_Q).sum(dim=1, keepdim=True)
    # Accepted are nodes whose ancestors are all taken.
    accepted_RQ = (trees.kept_sees_RQ & ~bits_R1 == 0) & (place_Q <= trees.kept_count_R[:, None])
    accepted_R = accepted_RQ.sum(dim=1) - 1
    path_RT = torch.where(accepted_RQ & (trees.kept_depth_RQ == offset_T[:, None, None]), place_Q, 0).amax(dim=2).T
    path_RT = path_RT.cummax(dim=1).values
    on_path_RT = offset_T <= accepted_R[:, None]
    own_RT = token_RQ.gather(1, path_RT)
    if chance is not None:
        next_RD = kept_RQ.gather(1, path_RT[:, 1:])
        own_RT = torch.cat([torch.where(on_path_RT[:, 1:], next_RD, own_RT[:, :depth]), own_RT[:, depth:]], dim=1)
    new_R = torch.minimum(accepted_R + 1, room_R) * state.row_samples[:rows]

    # Before the rows advance.
    ring_RT = who.in_ring(length_R[:, None] + offset_T, on_path_RT & (room_R > 0)[:, None])
    size, null_slot = shape.block_size, shape.null_slot
    moves_RD = on_path_RT[:, 1:] & (path_RT[:, 1:] != offset_T[1:])

    def in_cache(offset_RD: Tensor) -> Tensor:
        slot_RD = length_R[:, None] + offset_RD
        block_RD = who.table_RP.gather(1, (slot_RD // size).clamp(max=shape.blocks - 1)).long()
        return torch.where(moves_RD, block_RD * size + slot_RD % size, null_slot).flatten()

    from_M, to_M = in_cache(path_RT[:, 1:]), in_cache(offset_T[1:].expand(rows, -1))
    tokens_RT = who.in_ring(length_R[:, None] + 1 + offset_T, offset_T < new_R[:, None])
    state.tokens_SL.flatten().index_copy_(0, tokens_RT.flatten(), own_RT.flatten())
    state.length_S.index_copy_(0, slot_R, length_R + new_R)

    group_RD = torch.where(on_path_RT, trees.kept_group_RQ.gather(1, path_RT), -1)[:, :depth]
    at_RDW = group_RD.clamp(min=0)[..., None].expand(-1, -1, trees.width)
    candidate_RDW = torch.where(group_RD[..., None] >= 0, trees.token_RGW.gather(1, at_RDW), -1)
    sure_RDW = trees.sure_RGW.gather(1, at_RDW).double().view(torch.int64)
    deepest_R = torch.where(place_Q <= trees.kept_count_R[:, None], trees.kept_depth_RQ, 0).amax(dim=1)
    counts = (x[:, None] for x in (trees.kept_count_R, deepest_R))
    line_RC = torch.cat(
        [new_R[:, None], accepted_R[:, None], own_RT, *counts, candidate_RDW.flatten(1), sure_RDW.flatten(1)], dim=1
    )
    return TreeOutcome(line_RC=line_RC, path_RT=path_RT, ring_RT=ring_RT, from_M=from_M, to_M=to_M)
