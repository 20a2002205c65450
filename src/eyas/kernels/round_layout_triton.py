# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`round_layout.py` on a GPU: one launch for a verify pass, and one for all passes of a draft.

Block tables are copied as far as the pass may look; entries after that are undefined.

Shapes: R rows, Q tokens of a row, K drafts, C states of a row that are read, N tokens of a pass, P blocks of a row.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.attention.metadata import AttentionMetadata, BlockTables
from eyas.kernels.round_tensors import BlockShape, DraftLayout, RoundTensors, VerifyLayout

_BLOCKS_AT_ONCE = 1024


@triton.jit
def copy_table(table, slot, row, end, copied, table_stride, BLOCKS, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Copy the program's share of a row's blocks, those of the slots before `end`."""
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    used = (block < BLOCKS) & (block * BLOCK_SIZE < end)
    tl.store(copied + row * BLOCKS + block, tl.load(table + slot * table_stride + block, mask=used).to(tl.int32), used)


@triton.jit
def place_in_cache(table, slot, at, live, table_stride, null_slot, BLOCKS, BLOCK_SIZE: tl.constexpr):
    """Places of live slots `at` in the cache."""
    block = tl.load(table + slot * table_stride + tl.minimum(at // BLOCK_SIZE, BLOCKS - 1), mask=live, other=0)
    return tl.where(live, block * BLOCK_SIZE + at % BLOCK_SIZE, null_slot)


@triton.jit
def _verify_kernel(
    row_slot,
    length_of,
    limit_of,
    depth_of,
    drafts,
    tokens,
    table,
    copied,
    base_of,
    end_of,
    start_of,
    position_of,
    mapping_of,
    id_of,
    place_of,
    drafts_stride,
    table_stride,
    ring,
    nobody,
    null_slot,
    BLOCKS,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Lay out one row; programs other than its first only copy blocks."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    copy_table(table, slot, row, length + 1 + DEPTH, copied, table_stride, BLOCKS, BLOCK_SIZE, AT_ONCE)
    if tl.program_id(1) > 0:
        return
    room = tl.load(limit_of + slot) - length - 1
    live = tl.full((), 1, tl.int64)
    if DEPTH > 0:
        live += tl.load(depth_of + row)
    live = tl.where(room > 0, live, 0)
    base = tl.where(live > 0, length, 0)
    tl.store(base_of + row, base.to(tl.int32))
    tl.store(end_of + row, tl.where(live > 0, base + live, 0).to(tl.int32))
    tl.store(start_of + row, (row * (1 + DEPTH)).to(tl.int32))
    tl.store(start_of + row + 1, ((row + 1) * (1 + DEPTH)).to(tl.int32))

    q = tl.arange(0, PADDED)
    real, lives = q <= DEPTH, q < live
    to = row * (1 + DEPTH) + q
    token = tl.load(tokens + slot * ring + length % ring)
    if DEPTH > 0:
        draft = tl.load(drafts + row * drafts_stride + q - 1, mask=real & (q > 0), other=0)
        token = tl.where(q == 0, token, draft)
    else:
        token = tl.where(q == 0, token, 0)
    tl.store(id_of + to, token, mask=real)
    tl.store(position_of + to, base + tl.where(lives, q, 0), mask=real)
    in_cache = place_in_cache(table, slot, base + q, real & lives, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
    tl.store(mapping_of + to, in_cache, mask=real)
    in_ring = tl.where(lives, slot * ring + (length + q) % ring, (nobody * ring).to(tl.int64))
    tl.store(place_of + to, in_ring, mask=real)


@triton.jit
def _draft_kernel(
    row_slot,
    row_depth,
    length_of,
    limit_of,
    drafted_of,
    follows_of,
    depth_of,
    tokens,
    table,
    copied,
    base_of,
    end_of,
    start_of,
    position_of,
    mapping_of,
    id_of,
    place_of,
    last_of,
    deep_base_of,
    deep_end_of,
    deep_start_of,
    deep_position_of,
    deep_mapping_of,
    deep_stride,
    table_stride,
    ring,
    null_slot,
    BLOCKS,
    READS: tl.constexpr,
    READS_PADDED: tl.constexpr,
    KEPT: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Lay out one row; programs other than its first only copy blocks."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    copy_table(table, slot, row, length + 1 + DEPTH, copied, table_stride, BLOCKS, BLOCK_SIZE, AT_ONCE)
    if tl.program_id(1) > 0:
        return
    drafted = tl.load(drafted_of + slot)
    room = tl.load(limit_of + slot) - length - 1
    follows = (room > 0) & (tl.load(follows_of + slot) > 0)
    live = tl.where(follows, tl.maximum(length - KEPT - drafted, 0), 0)
    base = tl.where(live > 0, drafted, 0)
    tl.store(drafted_of + slot, drafted + live)
    tl.store(base_of + row, base.to(tl.int32))
    tl.store(end_of + row, tl.where(live > 0, base + live, 0).to(tl.int32))
    tl.store(start_of + row, (row * READS).to(tl.int32))
    tl.store(start_of + row + 1, ((row + 1) * READS).to(tl.int32))
    tl.store(last_of + row, row * READS + tl.maximum(live - 1, 0))

    c = tl.arange(0, READS_PADDED)
    real, lives = c < READS, c < live
    to = row * READS + c
    tl.store(id_of + to, tl.load(tokens + slot * ring + (drafted + c + 1) % ring, mask=real, other=0), mask=real)
    tl.store(place_of + to, slot * ring + (drafted + c) % ring, mask=real)
    tl.store(position_of + to, base + tl.where(lives, c, 0), mask=real)
    in_cache = place_in_cache(table, slot, base + c, real & lives, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
    tl.store(mapping_of + to, in_cache, mask=real)

    if DEPTH > 0:
        limit = tl.where(live > 0, tl.minimum(tl.load(row_depth + row), room - 1), 0)
        tl.store(depth_of + row, limit)
    if DEPTH > 1:
        tl.store(deep_start_of + row, row.to(tl.int32))
        tl.store(deep_start_of + row + 1, (row + 1).to(tl.int32))
        # Draft number at + 1 is computed from the one before it, at position length + at, written one slot earlier.
        at = 1 + tl.arange(0, DEPTH_PADDED)
        real, lives = at < DEPTH, limit > at
        to = (at - 1) * deep_stride + row
        base = tl.where(lives, length + at - 1, 0)
        tl.store(deep_base_of + to, base.to(tl.int32), mask=real)
        tl.store(deep_end_of + to, tl.where(lives, base + 1, 0).to(tl.int32), mask=real)
        tl.store(deep_position_of + to, base, mask=real)
        in_cache = place_in_cache(table, slot, base, real & lives, table_stride, null_slot, BLOCKS, BLOCK_SIZE)
        tl.store(deep_mapping_of + to, in_cache, mask=real)


class _Chains:
    """Memory for the layout of rows of `count` tokens each."""

    def __init__(self, table_RP: Tensor, count: int, shape: BlockShape) -> None:
        rows, device = len(table_RP), table_RP.device
        self.table_RP, self.count, self.shape = table_RP, count, shape
        self.base_R, self.end_R = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.start_R = torch.empty(rows + 1, dtype=torch.int32, device=device)
        self.position_N, self.mapping_N, self.id_N, self.place_N = (
            torch.empty(rows * count, dtype=torch.int64, device=device) for _ in range(4)
        )

    def metadata(self) -> AttentionMetadata:
        return _metadata(
            self.table_RP,
            self.base_R,
            self.end_R,
            self.start_R,
            self.position_N,
            self.mapping_N,
            count=self.count,
            shape=self.shape,
        )


def _metadata(
    table_RP: Tensor,
    base_R: Tensor,
    end_R: Tensor,
    start_R: Tensor,
    position_N: Tensor,
    mapping_N: Tensor,
    *,
    count: int,
    shape: BlockShape,
) -> AttentionMetadata:
    tables = BlockTables(
        block_table_RP=table_RP,
        context_lens_R=base_R,
        seq_lens_R=end_R,
        query_start_loc_R=start_R,
        tree_mask_N=None,
        query_lens=(count,) * len(table_RP),
        max_seq_len=shape.blocks * shape.block_size,
    )
    return AttentionMetadata(
        block_size=shape.block_size, slot_mapping_N=mapping_N, position_N=position_N, on_device=tables
    )


def _table(state: RoundTensors, rows: int, shape: BlockShape) -> tuple[Tensor, tuple[int, int]]:
    """Memory for block tables, and the grid that copies them."""
    table_RP = torch.empty(rows, shape.blocks, dtype=torch.int32, device=state.table_SP.device)
    return table_RP, (rows, triton.cdiv(shape.blocks, _BLOCKS_AT_ONCE))


def lay_out_verify_by_triton(state: RoundTensors, shape: BlockShape, *, rows: int, depth: int) -> VerifyLayout:
    """`round_layout.lay_out_verify`."""
    table_RP, grid = _table(state, rows, shape)
    chains = _Chains(table_RP, 1 + depth, shape)
    _verify_kernel[grid](
        state.row_slot,
        state.length_S,
        state.limit_S,
        state.depth_R,
        state.drafts_RK,
        state.tokens_SL,
        state.table_SP,
        table_RP,
        chains.base_R,
        chains.end_R,
        chains.start_R,
        chains.position_N,
        chains.mapping_N,
        chains.id_N,
        chains.place_N,
        state.drafts_RK.stride(0),
        state.table_SP.stride(0),
        state.ring,
        state.nobody,
        shape.null_slot,
        shape.blocks,
        DEPTH=depth,
        PADDED=triton.next_power_of_2(1 + depth),
        BLOCK_SIZE=shape.block_size,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=4,
    )
    return VerifyLayout(tokens=chains.metadata(), ids_N=chains.id_N, place_N=chains.place_N)


def lay_out_draft_by_triton(
    state: RoundTensors, shape: BlockShape, *, rows: int, reads: int, depth: int, kept: int = 0
) -> DraftLayout:
    """`round_layout.lay_out_draft`."""
    table_RP, grid = _table(state, rows, shape)
    chains, device = _Chains(table_RP, reads, shape), table_RP.device
    last_R = torch.empty(rows, dtype=torch.int64, device=device)
    # Depths are aligned to 16 bytes, or kernels would be compiled once more for unaligned ones.
    deep, stride = max(0, depth - 1), -(-rows // 4) * 4
    bases, ends = (torch.empty(deep, stride, dtype=torch.int32, device=device) for _ in range(2))
    positions, mappings = (torch.empty(deep, stride, dtype=torch.int64, device=device) for _ in range(2))
    deep_start_R = torch.empty(rows + 1, dtype=torch.int32, device=device)
    _draft_kernel[grid](
        state.row_slot,
        state.row_depth,
        state.length_S,
        state.limit_S,
        state.drafted_S,
        state.follows_S,
        state.depth_R,
        state.tokens_SL,
        state.table_SP,
        table_RP,
        chains.base_R,
        chains.end_R,
        chains.start_R,
        chains.position_N,
        chains.mapping_N,
        chains.id_N,
        chains.place_N,
        last_R,
        bases,
        ends,
        deep_start_R,
        positions,
        mappings,
        stride,
        state.table_SP.stride(0),
        state.ring,
        shape.null_slot,
        shape.blocks,
        READS=reads,
        READS_PADDED=triton.next_power_of_2(reads),
        KEPT=kept,
        DEPTH=depth,
        DEPTH_PADDED=triton.next_power_of_2(max(1, deep)),
        BLOCK_SIZE=shape.block_size,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=4,
    )
    deeper = [
        _metadata(
            table_RP,
            bases[at, :rows],
            ends[at, :rows],
            deep_start_R,
            positions[at, :rows],
            mappings[at, :rows],
            count=1,
            shape=shape,
        )
        for at in range(deep)
    ]
    return DraftLayout(
        tokens=chains.metadata(), ids_N=chains.id_N, place_N=chains.place_N, last_R=last_R, deeper=deeper
    )
