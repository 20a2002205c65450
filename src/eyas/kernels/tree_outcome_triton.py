# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`tree_outcome.py` on a GPU: one or two launches settle a round of trees.

One program handles a row. Lanes exchange data through memory, with a barrier between.

Shapes: R rows, B budget, Q = 1 + B places, D depth, T = 1 + D, V vocabulary, P parts of it.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.argmax_triton import logit_parts
from eyas.kernels.noise_triton import mix
from eyas.kernels.round_layout_triton import place_in_cache
from eyas.kernels.round_tensors import BlockShape, RoundTensors
from eyas.kernels.tree_nodes import TreeNodes

_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _settle_kernel(
    best_of,
    index_of,
    own_of,
    row_slot,
    row_samples,
    length_of,
    limit_of,
    tokens,
    table,
    kept_token,
    kept_parent,
    kept_depth,
    kept_group,
    count_of,
    token_of,
    sure_of,
    line,
    path_of,
    ring_of,
    from_of,
    to_of,
    ring,
    nobody,
    table_stride,
    null_slot,
    chance,
    PARTS,
    BLOCKS,
    GREEDY: tl.constexpr,
    TOSSED: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_PADDED: tl.constexpr,
    T_PADDED: tl.constexpr,
    W_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Settle one row."""
    row, q = tl.program_id(0).to(tl.int64), tl.arange(0, Q_PADDED)
    real = q < PLACES
    if GREEDY:
        part = tl.arange(0, PADDED)
        at = (row * PLACES + q)[:, None] * PARTS + part[None, :]
        inside = real[:, None] & (part < PARTS)[None, :]
        best = tl.load(best_of + at, mask=inside, other=float("-inf"))
        found = tl.load(index_of + at, mask=inside, other=2147483647)
        top = tl.max(best, axis=1)
        own = tl.min(tl.where(best == top[:, None], found, 2147483647), axis=1).to(tl.int64)
        tl.store(own_of + row * PLACES + q, own, mask=real)
        tl.debug_barrier()
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    room = tl.maximum(tl.load(limit_of + slot) - length - 1, 0)
    count = tl.load(count_of + row)
    token = tl.load(kept_token + row * PLACES + q, mask=real, other=-1)
    parent = tl.load(kept_parent + row * PLACES + q, mask=real, other=-1)
    depth = tl.load(kept_depth + row * PLACES + q, mask=real, other=0)
    node = (q > 0) & (q <= count)
    if TOSSED:
        golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
        key = mix(mix(slot.to(tl.uint64) + golden) + length.to(tl.uint64) * golden)
        bits = mix(key + (depth - 1).to(tl.uint64) * golden)
        # As in `noise.py`: 52 bits below the exponent of 1; w = x - 1 + 2^-53, exactly.
        x = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
        lucky = (x - 1.0) + 1.1102230246251565e-16 < tl.load(chance)

    # Walk from place to place.
    here, accepted, goes = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)
    tl.store(path_of + row * (1 + DEPTH), here)
    for d in tl.static_range(1, DEPTH + 1):
        child = node & (parent == here)
        if TOSSED:
            # The first child, if the coin accepts it.
            eldest = tl.min(tl.where(child, q, Q_PADDED), axis=0)
            child = child & (q == eldest) & lucky
        else:
            child = child & (token == tl.load(own_of + row * PLACES + here))
        following = tl.min(tl.where(child, q, Q_PADDED), axis=0).to(tl.int64)
        goes = goes * (following < Q_PADDED).to(tl.int64)
        accepted += goes
        here = tl.where(goes > 0, following, here)
        tl.store(path_of + row * (1 + DEPTH) + d, here)
    tl.debug_barrier()

    t = tl.arange(0, T_PADDED)
    among, on_path = t <= DEPTH, t <= accepted
    path = tl.load(path_of + row * (1 + DEPTH) + t, mask=among, other=0)
    new_token = tl.load(own_of + row * PLACES + path, mask=among, other=0)
    if TOSSED:
        following_place = tl.load(path_of + row * (1 + DEPTH) + t + 1, mask=t < DEPTH, other=0)
        drafted = tl.load(kept_token + row * PLACES + following_place, mask=t < DEPTH, other=0)
        new_token = tl.where(t < accepted, drafted, new_token)
    new = tl.minimum(accepted + 1, room) * tl.load(row_samples + row)
    tl.store(tokens + slot * ring + (length + 1 + t) % ring, new_token, mask=among & (t < new))
    tl.store(length_of + slot, length + new)
    in_ring = tl.where(on_path & (room > 0), slot * ring + (length + t) % ring, (nobody * ring).to(tl.int64))
    tl.store(ring_of + row * (1 + DEPTH) + t, in_ring, mask=among)
    moves = among & on_path & (t > 0) & (path != t)
    source = place_in_cache(table, slot, length + path, moves, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
    goal = place_in_cache(table, slot, length + t, moves, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
    tl.store(from_of + row * DEPTH + t - 1, source, mask=among & (t > 0))
    tl.store(to_of + row * DEPTH + t - 1, goal, mask=among & (t > 0))

    to = line + row * (5 + DEPTH + 2 * DEPTH * WIDTH)
    tl.store(to, new)
    tl.store(to + 1, accepted)
    tl.store(to + 2 + t, new_token, mask=among)
    tl.store(to + 3 + DEPTH, count)
    tl.store(to + 4 + DEPTH, tl.max(tl.where(node, depth, 0), axis=0))
    w = tl.arange(0, W_PADDED)
    behind = tl.load(kept_group + row * PLACES + path, mask=(t < DEPTH) & on_path, other=-1)
    GROUPS: tl.constexpr = 1 + (DEPTH - 1) * WIDTH
    told = (t < DEPTH)[:, None] & (w < WIDTH)[None, :]
    place = (row * GROUPS + tl.maximum(behind, 0))[:, None] * WIDTH + w[None, :]
    candidate = tl.load(token_of + place, mask=told, other=0)
    sure = tl.load(sure_of + place, mask=told, other=0.0).to(tl.float64).to(tl.int64, bitcast=True)
    at_line = to + 5 + DEPTH + t[:, None] * WIDTH + w[None, :]
    tl.store(at_line, tl.where(behind[:, None] >= 0, candidate, -1), mask=told)
    tl.store(at_line + DEPTH * WIDTH, sure, mask=told)


def settle_trees_by_triton(
    state: RoundTensors,
    trees: TreeNodes,
    shape: BlockShape,
    *,
    logits_NV: Tensor | None,
    token_RQ: Tensor | None,
    chance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `tree_outcome.TreeOutcome`, in order."""
    (rows, places), device, depth, width = trees.kept_token_RQ.shape, state.row_slot.device, trees.depth, trees.width

    def integers(*counts: int) -> Tensor:
        return torch.empty(*counts, dtype=torch.int64, device=device)

    line_RC, path_RT, ring_RT = integers(rows, 5 + depth + 2 * depth * width), *integers(2, rows, 1 + depth).unbind()
    from_M, to_M = integers(2, rows * depth).unbind()
    best_NP = index_NP = line_RC
    count, padded = 1, 1
    if logits_NV is not None:
        parts = logit_parts(logits_NV)
        best_NP, index_NP, padded = parts.best_NB, parts.index_NB, parts.padded
        count = best_NP.shape[1]
    _settle_kernel[(rows,)](
        best_NP,
        index_NP,
        integers(rows, places) if token_RQ is None else token_RQ.contiguous(),
        state.row_slot,
        state.row_samples,
        state.length_S,
        state.limit_S,
        state.tokens_SL,
        state.table_SP,
        trees.kept_token_RQ,
        trees.kept_parent_RQ,
        trees.kept_depth_RQ,
        trees.kept_group_RQ,
        trees.kept_count_R,
        trees.token_RGW,
        trees.sure_RGW,
        line_RC,
        path_RT,
        ring_RT,
        from_M,
        to_M,
        state.ring,
        state.nobody,
        state.table_SP.stride(0),
        shape.null_slot,
        line_RC if chance is None else chance,
        count,
        shape.blocks,
        GREEDY=token_RQ is None,
        TOSSED=chance is not None,
        DEPTH=depth,
        WIDTH=width,
        PLACES=places,
        BLOCK_SIZE=shape.block_size,
        Q_PADDED=triton.next_power_of_2(places),
        T_PADDED=triton.next_power_of_2(1 + depth),
        W_PADDED=triton.next_power_of_2(width),
        PADDED=padded,
        num_warps=4,
    )
    return line_RC, path_RT, ring_RT, from_M, to_M
