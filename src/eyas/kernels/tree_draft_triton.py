# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`tree_draft.py` on a GPU: two launches choose the candidates of a depth, one expands them and lays out the next pass,
one keeps the likeliest, one lays out their verification.

One program handles a row. Lanes exchange data through memory, with a barrier between.

Shapes: R rows, W candidates of a node, M expanded nodes, F candidates of a row, E grown nodes, B budget, Q = 1 + B
places, D depth, T = 1 + D, V vocabulary, P parts of it or blocks of a row.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.attention.metadata import AttentionMetadata, BlockTables
from eyas.kernels.round_layout_triton import copy_table, place_in_cache
from eyas.kernels.round_tensors import BlockShape, RoundTensors
from eyas.kernels.tree_nodes import TreeNodes

_PART = 1024
_BLOCKS_AT_ONCE = 1024
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _top_part_kernel(
    logits, best_of, index_of, total_of, row_stride, SIZE, PARTS, WIDTH: tl.constexpr, PART: tl.constexpr
):
    """The largest logits of a part of a row, of equals the first, and the sum of exp(logit - largest)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    to = (row * PARTS + part) * WIDTH
    taken = at < 0
    for w in tl.static_range(WIDTH):
        best = tl.max(tl.where(taken, float("-inf"), x), axis=0)
        found = tl.min(tl.where((x == best) & ~taken, at, _NOWHERE), axis=0)
        tl.store(best_of + to + w, best)
        tl.store(index_of + to + w, found)
        if w == 0:
            safe = tl.where(best == float("-inf"), 0.0, best)
            tl.store(total_of + row * PARTS + part, tl.sum(tl.exp(x - safe), axis=0))
        taken = taken | (at == found)


@triton.jit
def _merge_kernel(
    logits,
    best_of,
    index_of,
    total_of,
    chosen,
    token_of,
    tokens,
    sure,
    row_stride,
    SIZE,
    PARTS,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """The largest logits of a row, or those chosen, and their probabilities."""
    row, part, listed = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS_PADDED), tl.arange(0, LISTED)
    first = tl.load(best_of + (row * PARTS + part) * WIDTH, mask=part < PARTS, other=float("-inf"))
    top = tl.max(first, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    share = tl.load(total_of + row * PARTS + part, mask=part < PARTS, other=0.0)
    # An empty part has summed exp(-inf - 0).
    total = tl.sum(share * tl.exp(first - safe), axis=0)
    inside = listed < PARTS * WIDTH
    x = tl.load(best_of + row * PARTS * WIDTH + listed, mask=inside, other=float("-inf"))
    place = tl.load(index_of + row * PARTS * WIDTH + listed, mask=inside, other=_NOWHERE)
    for w in tl.static_range(WIDTH):
        if CHOSEN:
            index = tl.load(chosen + row * WIDTH + w)
            score = tl.load(logits + row * row_stride + index).to(tl.float32)
        else:
            score = tl.max(x, axis=0)
            index = tl.minimum(tl.min(tl.where(x == score, place, _NOWHERE), axis=0), SIZE - 1).to(tl.int64)
            here = (place == index) & (x == score)
            x, place = tl.where(here, float("-inf"), x), tl.where(here, _NOWHERE, place)
        tl.store(tokens + row * WIDTH + w, tl.load(token_of + index))
        tl.store(sure + row * WIDTH + w, tl.exp(score - safe) / total)


def choose_candidates_by_triton(
    logits_MV: Tensor, token_V: Tensor, width: int, index_MW: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`tree_draft.choose_candidates`."""
    (nodes, size), device = logits_MV.shape, logits_MV.device
    parts = triton.cdiv(size, _PART)
    best_MPW = torch.empty(nodes, parts, width, dtype=torch.float32, device=device)
    index_MPW = torch.empty(nodes, parts, width, dtype=torch.int32, device=device)
    total_MP = torch.empty(nodes, parts, dtype=torch.float32, device=device)
    stride = logits_MV.stride(0)
    assert logits_MV.stride(1) == 1
    _top_part_kernel[nodes, parts](
        logits_MV, best_MPW, index_MPW, total_MP, stride, size, parts, WIDTH=width, PART=_PART, num_warps=4
    )
    token_MW = torch.empty(nodes, width, dtype=torch.int64, device=device)
    sure_MW = torch.empty(nodes, width, dtype=torch.float32, device=device)
    _merge_kernel[(nodes,)](
        logits_MV,
        best_MPW,
        index_MPW,
        total_MP,
        token_MW if index_MW is None else index_MW.contiguous(),
        token_V,
        token_MW,
        sure_MW,
        stride,
        size,
        parts,
        WIDTH=width,
        LISTED=triton.next_power_of_2(parts * width),
        PARTS_PADDED=triton.next_power_of_2(parts),
        CHOSEN=index_MW is not None,
        num_warps=4,
    )
    return token_MW, sure_MW


@triton.jit
def _grow_kernel(
    token_in,
    sure_in,
    row_slot,
    length_of,
    slots_of,
    table,
    copied,
    token_of,
    sure_of,
    path_of,
    grown_of,
    sees_of,
    base_of,
    end_of,
    start_of,
    position_of,
    mapping_of,
    mask_of,
    id_of,
    parent_of,
    table_stride,
    null_slot,
    BLOCKS,
    AT: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Expand one row's tree; programs other than its first only copy blocks, at the first depth for all depths."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    if (AT == 1) & (DEPTH > 1):
        copy_table(table, slot, row, length + (DEPTH - 1) * WIDTH, copied, table_stride, BLOCKS, BLOCK_SIZE, AT_ONCE)
    if tl.program_id(1) > 0:
        return
    slots = tl.load(slots_of + row)
    deepest = tl.where(slots > 0, tl.minimum(slots // WIDTH + 1, DEPTH), 0)

    # Candidates of this depth: groups from FIRST on, one for each node that was expanded last.
    COUNT: tl.constexpr = 1 if AT == 1 else WIDTH
    FIRST: tl.constexpr = 0 if AT == 1 else 1 + (AT - 2) * WIDTH
    GROUPS: tl.constexpr = 1 + (DEPTH - 1) * WIDTH
    GROWN: tl.constexpr = (DEPTH - 1) * WIDTH
    m = tl.arange(0, PADDED)
    real, group, rank = m < COUNT * WIDTH, m // WIDTH, m % WIDTH
    taken_from = row * COUNT * WIDTH
    sure = tl.load(sure_in + taken_from + m, mask=real, other=0.0)
    best = sure
    for w in tl.static_range(WIDTH):
        sibling = tl.load(sure_in + taken_from + group * WIDTH + w, mask=real & (rank <= w), other=0.0)
        best = tl.maximum(best, sibling)
    path = best.to(tl.float64)
    if AT > 1:
        above = tl.load(grown_of + row * GROWN + (AT - 2) * WIDTH + group, mask=real, other=0)
        path = path * tl.load(path_of + row * GROUPS * WIDTH + above, mask=real, other=0.0)
    path = tl.where(deepest >= AT, path, -1.0)
    to = (row * GROUPS + FIRST) * WIDTH + m
    tl.store(token_of + to, tl.load(token_in + taken_from + m, mask=real, other=0), mask=real)
    tl.store(sure_of + to, sure, mask=real)
    tl.store(path_of + to, path, mask=real)

    if AT < DEPTH:
        lives = deepest > AT
        base = tl.where(lives, length, 0)
        tl.store(base_of + row, base.to(tl.int32))
        tl.store(end_of + row, tl.where(lives, base + AT * WIDTH, 0).to(tl.int32))
        tl.store(start_of + row, (row * WIDTH).to(tl.int32))
        tl.store(start_of + row + 1, ((row + 1) * WIDTH).to(tl.int32))
        left = tl.where(real, path, -2.0)
        for w in tl.static_range(WIDTH):
            top = tl.max(left, axis=0)
            chosen = tl.min(tl.where(left == top, m, PADDED), axis=0)
            left = tl.where(m == chosen, -3.0, left)
            place = (AT - 1) * WIDTH + w
            sees = tl.full((), 1, tl.int64) << place
            if AT > 1:
                sees = sees | tl.load(sees_of + row * GROWN + (AT - 2) * WIDTH + chosen // WIDTH)
            tl.store(grown_of + row * GROWN + place, (FIRST * WIDTH + chosen).to(tl.int64))
            tl.store(sees_of + row * GROWN + place, sees)
            n = row * WIDTH + w
            tl.store(mask_of + n, sees)
            tl.store(id_of + n, tl.load(token_in + taken_from + chosen))
            tl.store(parent_of + n, row * COUNT + chosen // WIDTH)
            tl.store(position_of + n, base + tl.where(lives, AT - 1, 0))
            where = place_in_cache(table, slot, base + place, lives, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
            tl.store(mapping_of + n, where)


class TreeLayout:
    """Memory for the layout of `count` nodes per row."""

    def __init__(self, table_RP: Tensor, count: int) -> None:
        rows, device = len(table_RP), table_RP.device
        self.table_RP, self.count = table_RP, count
        self.base_R, self.end_R = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.start_R = torch.empty(rows + 1, dtype=torch.int32, device=device)
        self.position_N, self.mapping_N, self.mask_N, self.id_N, self.parent_N = (
            torch.empty(rows * count, dtype=torch.int64, device=device) for _ in range(5)
        )

    def metadata(self, shape: BlockShape) -> AttentionMetadata:
        tables = BlockTables(
            block_table_RP=self.table_RP,
            context_lens_R=self.base_R,
            seq_lens_R=self.end_R,
            query_start_loc_R=self.start_R,
            tree_mask_N=self.mask_N,
            query_lens=(self.count,) * len(self.table_RP),
            max_seq_len=shape.blocks * shape.block_size,
        )
        return AttentionMetadata(
            block_size=shape.block_size, slot_mapping_N=self.mapping_N, position_N=self.position_N, on_device=tables
        )


def new_table(rows: int, shape: BlockShape, device: torch.device) -> Tensor:
    """Memory for block tables [R, P]."""
    return torch.empty(rows, shape.blocks, dtype=torch.int32, device=device)


def grow_by_triton(
    state: RoundTensors,
    trees: TreeNodes,
    shape: BlockShape,
    *,
    at: int,
    token_MW: Tensor,
    sure_MW: Tensor,
    table_RP: Tensor,
) -> TreeLayout:
    """`tree_draft.grow`; after the last depth the layout is meaningless."""
    rows, width = len(trees.kept_count_R), trees.width
    layout = TreeLayout(table_RP, width)
    _grow_kernel[rows, triton.cdiv(shape.blocks, _BLOCKS_AT_ONCE) if at == 1 else 1](
        token_MW,
        sure_MW,
        state.row_slot,
        state.length_S,
        state.depth_R,
        state.table_SP,
        table_RP,
        trees.token_RGW,
        trees.sure_RGW,
        trees.path_RGW,
        trees.grown_RE,
        trees.grown_sees_RE,
        layout.base_R,
        layout.end_R,
        layout.start_R,
        layout.position_N,
        layout.mapping_N,
        layout.mask_N,
        layout.id_N,
        layout.parent_N,
        state.table_SP.stride(0),
        shape.null_slot,
        shape.blocks,
        AT=at,
        DEPTH=trees.depth,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width if at == 1 else width * width),
        BLOCK_SIZE=shape.block_size,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=1,
    )
    return layout


@triton.jit
def _keep_kernel(
    row_slot,
    length_of,
    slots_of,
    tokens,
    token_of,
    path_of,
    grown_of,
    place_of,
    kept_token,
    kept_parent,
    kept_depth,
    kept_sees,
    kept_group,
    count_of,
    ring,
    CANDIDATES: tl.constexpr,
    GROWN: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BUDGET: tl.constexpr,
    F_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    Q_PADDED: tl.constexpr,
):
    """Choose the nodes of one row to verify."""
    row, f, q = tl.program_id(0).to(tl.int64), tl.arange(0, F_PADDED), tl.arange(0, Q_PADDED)
    slot = tl.load(row_slot + row)
    newest = tl.load(tokens + slot * ring + tl.load(length_of + slot) % ring)
    slots = tl.load(slots_of + row)
    real = f < CANDIDATES
    left = tl.load(path_of + row * CANDIDATES + f, mask=real, other=-2.0)
    kept = f < 0
    for _ in range(tl.minimum(slots, BUDGET)):
        top = tl.max(left, axis=0)
        chosen = f == tl.where(top >= 0.0, tl.min(tl.where(left == top, f, F_PADDED), axis=0), F_PADDED)
        kept = kept | chosen
        left = tl.where(chosen, -3.0, left)
    place = tl.cumsum(kept.to(tl.int32), axis=0).to(tl.int64)
    count = tl.sum(kept.to(tl.int64), axis=0)
    at, asked = row * (1 + BUDGET), q <= BUDGET
    tl.store(place_of + row * CANDIDATES + f, tl.where(kept, place, 0), mask=real)
    tl.store(count_of + row, count)
    tl.store(kept_token + at + q, tl.where(q == 0, newest, 0), mask=asked)
    tl.store(kept_parent + at + q, tl.zeros((Q_PADDED,), tl.int64), mask=asked)
    tl.store(kept_depth + at + q, tl.zeros((Q_PADDED,), tl.int64), mask=asked)
    tl.store(kept_group + at + q, tl.where((q == 0) & (count > 0), 0, -1).to(tl.int64), mask=asked)
    tl.store(kept_sees + at + q, (tl.full((Q_PADDED,), 1, tl.int64) << q) | 1, mask=asked)
    tl.debug_barrier()

    group = f // WIDTH
    depth = tl.where(group > 0, 2 + (group - 1) // WIDTH, 1).to(tl.int64)
    above = tl.zeros((F_PADDED,), tl.int64)
    if GROWN > 0:
        has_parent = kept & (group > 0)
        parent = tl.load(grown_of + row * GROWN + group - 1, mask=has_parent, other=0)
        above = tl.load(place_of + row * CANDIDATES + parent, mask=has_parent, other=0)
        e = tl.arange(0, E_PADDED)
        node = tl.load(grown_of + row * GROWN + e, mask=e < GROWN, other=0)
        place_e = tl.load(place_of + row * CANDIDATES + node, mask=e < GROWN, other=0)
        deepest = tl.minimum(slots // WIDTH + 1, DEPTH)
        tl.store(kept_group + at + place_e, (1 + e).to(tl.int64), mask=(place_e > 0) & (e // WIDTH + 2 <= deepest))
    tl.store(kept_token + at + place, tl.load(token_of + row * CANDIDATES + f, mask=kept, other=0), mask=kept)
    tl.store(kept_parent + at + place, above, mask=kept)
    tl.store(kept_depth + at + place, depth, mask=kept)
    for d in tl.static_range(1, DEPTH + 1):
        here = kept & (depth == d)
        sees = (tl.full((F_PADDED,), 1, tl.int64) << place) | tl.load(kept_sees + at + above, mask=here, other=0)
        tl.store(kept_sees + at + place, sees, mask=here)
        tl.debug_barrier()


def keep_by_triton(state: RoundTensors, trees: TreeNodes) -> None:
    """`tree_draft.keep`."""
    rows, grown = trees.grown_RE.shape
    candidates = (1 + grown) * trees.width
    _keep_kernel[(rows,)](
        state.row_slot,
        state.length_S,
        state.depth_R,
        state.tokens_SL,
        trees.token_RGW,
        trees.path_RGW,
        trees.grown_RE,
        torch.empty(rows, candidates, dtype=torch.int64, device=trees.grown_RE.device),
        trees.kept_token_RQ,
        trees.kept_parent_RQ,
        trees.kept_depth_RQ,
        trees.kept_sees_RQ,
        trees.kept_group_RQ,
        trees.kept_count_R,
        state.ring,
        CANDIDATES=candidates,
        GROWN=grown,
        DEPTH=trees.depth,
        WIDTH=trees.width,
        BUDGET=trees.budget,
        F_PADDED=triton.next_power_of_2(candidates),
        E_PADDED=triton.next_power_of_2(max(1, grown)),
        Q_PADDED=triton.next_power_of_2(1 + trees.budget),
        num_warps=4 if candidates > 128 else 1,
    )


@triton.jit
def _lay_out_kernel(
    row_slot,
    length_of,
    limit_of,
    count_of,
    kept_depth,
    table,
    copied,
    base_of,
    end_of,
    start_of,
    position_of,
    mapping_of,
    table_stride,
    null_slot,
    BLOCKS,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Lay out one row; programs other than its first only copy blocks."""
    row, q = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    copy_table(table, slot, row, length + PLACES, copied, table_stride, BLOCKS, BLOCK_SIZE, AT_ONCE)
    if tl.program_id(1) > 0:
        return
    live = tl.where(tl.load(limit_of + slot) - length > 1, 1 + tl.load(count_of + row), 0)
    base = tl.where(live > 0, length, 0)
    tl.store(base_of + row, base.to(tl.int32))
    tl.store(end_of + row, (base + live).to(tl.int32))
    tl.store(start_of + row, (row * PLACES).to(tl.int32))
    tl.store(start_of + row + 1, ((row + 1) * PLACES).to(tl.int32))
    real, lives = q < PLACES, q < live
    depth = tl.load(kept_depth + row * PLACES + q, mask=real, other=0)
    tl.store(position_of + row * PLACES + q, base + tl.where(lives, depth, 0), mask=real)
    where = place_in_cache(table, slot, base + q, real & lives, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
    tl.store(mapping_of + row * PLACES + q, where, mask=real)


def lay_out_trees_by_triton(state: RoundTensors, trees: TreeNodes, shape: BlockShape) -> AttentionMetadata:
    """The layout of `tree_draft.lay_out_trees`."""
    rows, places = trees.kept_token_RQ.shape
    layout = TreeLayout(new_table(rows, shape, state.table_SP.device), places)
    layout.mask_N = trees.kept_sees_RQ.flatten()
    _lay_out_kernel[rows, triton.cdiv(shape.blocks, _BLOCKS_AT_ONCE)](
        state.row_slot,
        state.length_S,
        state.limit_S,
        trees.kept_count_R,
        trees.kept_depth_RQ,
        state.table_SP,
        layout.table_RP,
        layout.base_R,
        layout.end_R,
        layout.start_R,
        layout.position_N,
        layout.mapping_N,
        state.table_SP.stride(0),
        shape.null_slot,
        shape.blocks,
        PLACES=places,
        PADDED=triton.next_power_of_2(places),
        BLOCK_SIZE=shape.block_size,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=4,
    )
    return layout.metadata(shape)
