"""Grows draft trees on the device: which candidates are expanded, and which nodes are verified.

The rule is that of EAGLE-2 (`tests/oracle/tree_growth.py`), number for number: products in float64, equals in order of
their numbers.

Shapes: R rows, W candidates of a node, M = R or R * W expanded nodes, F candidates of a row, Q places of a row, V draft
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.round_layout import Rows
from eyas.kernels.round_tensors import BlockShape, RoundTensors
from eyas.kernels.tree_nodes import TreeNodes


@dataclass(frozen=True, kw_only=True, eq=False)
class GrowLayout:
    """The drafter's pass over the nodes to expand next, W of each row."""

    tokens: AttentionMetadata
    ids_N: Tensor
    parent_N: Tensor
    """The parent of each node, as an index among the previous nodes of all rows."""


def choose_candidates(
    logits_MV: Tensor, token_V: Tensor, width: int, index_MW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The target ids of each node's largest logits, or of those at `index_MW`, and their probabilities [M, W]."""
    if logits_MV.is_cuda and has_triton():
        from eyas.kernels.tree_draft_triton import choose_candidates_by_triton  # torch for CPUs comes without triton

        return choose_candidates_by_triton(logits_MV, token_V, width, index_MW)
    logits_MV = logits_MV.float()
    if index_MW is None:
        index_MW = logits_MV.topk(width, dim=-1).indices
    sure_MW = (logits_MV.gather(-1, index_MW) - logits_MV.logsumexp(dim=-1, keepdim=True)).exp()
    return token_V[index_MW], sure_MW


def grow(
    state: RoundTensors,
    trees: TreeNodes,
    shape: BlockShape,
    *,
    at: int,
    token_MW: Tensor,
    sure_MW: Tensor,
    before: GrowLayout | None = None,
) -> GrowLayout | None:
    """Store the candidates of depth `at`, and choose those to expand next; None after the last depth.

    Rows have `depth_R` slots for drafts. `before` is the result of the previous depth.
    """
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.tree_draft_triton import grow_by_triton, new_table  # torch for CPUs comes without triton

        table_RP = before.tokens.tables.block_table_RP if before is not None else None
        if table_RP is None:
            table_RP = new_table(len(trees.kept_count_R), shape, state.table_SP.device)
        layout = grow_by_triton(state, trees, shape, at=at, token_MW=token_MW, sure_MW=sure_MW, table_RP=table_RP)
        if at == trees.depth:
            return None
        return GrowLayout(tokens=layout.metadata(shape), ids_N=layout.id_N, parent_N=layout.parent_N)
    rows, width = len(trees.kept_count_R), trees.width
    groups = trees.groups_of(at)
    count = groups.stop - groups.start
    token_RCW, sure_RCW = (x.view(rows, count, width) for x in (token_MW, sure_MW))
    trees.token_RGW[:, groups], trees.sure_RGW[:, groups] = token_RCW, sure_RCW
    deepest_R, _ = _within(state, trees)
    best_RCW = sure_RCW.double().flip(-1).cummax(dim=-1).values.flip(-1)
    last = slice((at - 2) * width, (at - 1) * width)
    if at > 1:
        best_RCW = best_RCW * trees.path_RGW.flatten(1).gather(1, trees.grown_RE[:, last])[..., None]
    path_RCW = torch.where((deepest_R >= at)[:, None, None], best_RCW, -1.0)
    trees.path_RGW[:, groups] = path_RCW
    if at == trees.depth:
        return None

    order_RW = path_RCW.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :width]
    grown_RW = groups.start * width + order_RW
    own_W = 1 << torch.arange((at - 1) * width, at * width, device=grown_RW.device)
    sees_RW = own_W.expand_as(grown_RW)
    if at > 1:
        sees_RW = own_W | trees.grown_sees_RE[:, last].gather(1, order_RW // width)
    now = slice((at - 1) * width, at * width)
    trees.grown_RE[:, now], trees.grown_sees_RE[:, now] = grown_RW, sees_RW
    who = Rows(state, rows, shape)
    live_R = torch.where(deepest_R > at, width, 0)
    # The newest token has position length: the drafter's first slot after what it has read belongs to depth 1.
    tokens = AttentionMetadata.trees(
        who.table_RP,
        who.length_R,
        live_R,
        sees_RW,
        torch.full_like(sees_RW, at - 1),
        tail=at * width,
        block_size=shape.block_size,
        null_slot=shape.null_slot,
    )
    row_R1 = torch.arange(rows, device=grown_RW.device)[:, None]
    return GrowLayout(
        tokens=tokens,
        ids_N=trees.token_RGW.flatten(1).gather(1, grown_RW).flatten(),
        parent_N=(row_R1 * count + order_RW // width).flatten(),
    )


def keep(state: RoundTensors, trees: TreeNodes) -> None:
    """Choose the most confident nodes for verification. A child is never more confident than its parent, so they form a
    tree.
    """
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.tree_draft_triton import keep_by_triton  # torch for CPUs comes without triton

        keep_by_triton(state, trees)
        return
    width, budget = trees.width, trees.budget
    path_RF = trees.path_RGW.flatten(1)
    (rows, candidates), device = path_RF.shape, path_RF.device
    _, most_R = _within(state, trees)
    count_R = torch.minimum(most_R, (path_RF >= 0).sum(dim=1))
    order_RF = path_RF.sort(dim=1, descending=True, stable=True).indices
    number_F = torch.arange(candidates, device=device)
    among_RF = number_F < count_R[:, None]
    place_RF = torch.zeros_like(order_RF).scatter(1, order_RF, among_RF.long()).cumsum(dim=1)
    node_RB = torch.where(among_RF, order_RF, candidates - 1)[:, :budget].sort(dim=1).values

    group_RB = node_RB // width
    above_RB = torch.zeros_like(group_RB)
    behind_RB = torch.full_like(group_RB, -1)
    if trees.grown_RE.shape[1]:
        grown_RB = trees.grown_RE.gather(1, (group_RB - 1).clamp(min=0))
        above_RB = torch.where(group_RB > 0, place_RF.gather(1, grown_RB), 0)
        # Expanded nodes have a group of children, where the tree is deep enough.
        same_RBE = node_RB[:, :, None] == trees.grown_RE[:, None, :]
        here_RB = 1 + same_RBE.int().argmax(dim=2)
        lives_RB = trees.path_RGW[:, :, 0].gather(1, here_RB) >= 0
        behind_RB = torch.where(same_RBE.any(dim=2) & lives_RB, here_RB, -1)
    own_Q = 1 << torch.arange(1 + budget, device=device)
    live_RB = torch.arange(budget, device=device) < count_R[:, None]
    depth_RB = torch.where(group_RB > 0, 2 + (group_RB - 1) // width, 1)
    trees.kept_token_RQ[:, 1:] = torch.where(live_RB, trees.token_RGW.flatten(1).gather(1, node_RB), 0)
    trees.kept_parent_RQ[:, 1:] = torch.where(live_RB, above_RB, 0)
    trees.kept_depth_RQ[:, 1:] = torch.where(live_RB, depth_RB, 0)
    trees.kept_group_RQ[:, 1:] = torch.where(live_RB, behind_RB, -1)
    trees.kept_group_RQ[:, 0] = torch.where(count_R > 0, 0, -1)
    trees.kept_count_R.copy_(count_R)
    # A node sees itself and what its parent sees; after `depth` rounds the root has reached all nodes.
    sees_RQ = own_Q.expand(rows, -1)
    for _ in range(trees.depth):
        sees_RQ = own_Q | sees_RQ.gather(1, trees.kept_parent_RQ)
    trees.kept_sees_RQ.copy_(sees_RQ)
    newest_R = state.tokens_SL[state.row_slot[:rows], state.length_S[state.row_slot[:rows]] % state.ring]
    trees.kept_token_RQ[:, 0] = newest_R


def lay_out_trees(state: RoundTensors, trees: TreeNodes, shape: BlockShape) -> AttentionMetadata:
    """Lay out the target's pass over the newest token of each row and the kept nodes."""
    if state.length_S.is_cuda and has_triton():
        from eyas.kernels.tree_draft_triton import lay_out_trees_by_triton  # torch for CPUs comes without triton

        return lay_out_trees_by_triton(state, trees, shape)
    rows, places = trees.kept_token_RQ.shape
    who = Rows(state, rows, shape)
    return AttentionMetadata.trees(
        who.table_RP,
        who.length_R,
        torch.where(who.room_R > 0, 1 + trees.kept_count_R, 0),
        trees.kept_sees_RQ,
        trees.kept_depth_RQ,
        tail=places,
        block_size=shape.block_size,
        null_slot=shape.null_slot,
    )


def _within(state: RoundTensors, trees: TreeNodes) -> tuple[Tensor, Tensor]:
    """How deep the tree of each row may grow, and how many nodes it may keep: `Tree.within` its slots."""
    slots_R = state.depth_R[: len(trees.kept_count_R)]
    deepest_R = (slots_R // trees.width + 1).clamp(max=trees.depth)
    return torch.where(slots_R > 0, deepest_R, 0), slots_R.clamp(max=trees.budget)
