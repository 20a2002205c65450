# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Paged attention as one Triton kernel.

Decoding is bound by reading keys and values, so each is read once: all queries of a row whose heads share keys are one
tile of the kernel (Q * F lines, padded to a power of 2). One long request alone would occupy few multiprocessors, so
its keys are split among several programs, and a second kernel merges their partial results. So are those of long rows
among many short ones, which would otherwise wait for them; the short ones stay whole. Rows with more new tokens than a
tree may hold are prompt chunks: they have enough queries, in tiles of their own, and nothing is split. If only the
device knows the lengths of rows, and there is no bound, all rows are treated so, and a table made on the device assigns
tiles: N tokens in R rows have at most N * F / lines + R tiles, and unused programs exit at once.

Everything that changes between steps is read from device memory; grids depend on shapes and bounds alone, so the
kernels can be captured in a CUDA graph. Slots after a row's end are not read, and a row without live tokens costs
nothing. float32 is multiplied as float32, never as tf32. fp8 keys and values are converted to 16 bits in registers:
to float16, which holds them exactly, with one instruction for two, where bfloat16 takes four. Tensor cores need values
of neighbouring slots adjacent, and transpose 16-bit numbers while loading: so values are read as pairs, and the even
and the odd ones are multiplied separately.

Shapes: N tokens of a pass, R rows, W places for new tokens in a row, H query heads, G key heads, F = H / G heads that
share keys, K key dim, E value dim, C slots of the cache, S splits.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from torch.nn import functional

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.kv_dtype import FP8
from eyas.kernels.attention.metadata import TREE_BITS, AttentionMetadata, BlockTables
from eyas.kernels.dependent_launch_triton import begin_dependent, dependent_launch

MOST_SPLITS = 64
LEAST_KEYS_PER_SPLIT = 128
LONG_ROW, LONG_ROW_SPLITS = 512, 4
"""Keys above which a row is split although there are enough programs, and into how many: more would cost all short rows
of the batch as many empty programs."""
MANY_PROGRAMS = 8
"""Programs per multiprocessor above which that is not done: a long row is a small part of each one's work."""

WHOLE_LINES = 64
"""Lines from which on tensor cores read unpaired values from shared memory directly."""

# Numbers that change between passes; the kernel must not be recompiled for special values of them.
_NUMBERS = ["window", "sinks", "table_row", "rows", "width", "fewest", "most", "tiles", "splits", "least"]


@triton.jit(do_not_specialize=_NUMBERS)
def _attend_kernel(
    q,
    keys,
    values,
    output,
    partial,
    weight,
    table,
    base_of,
    end_of,
    start_of,
    position_of,
    seen_by,
    tile_of,
    sink,
    scale,
    softcap,
    window,
    sinks,
    q_token,
    q_head,
    key_head,
    key_slot,
    value_head,
    value_slot,
    table_row,
    rows,
    width,
    fewest,
    most,
    tiles,
    splits,
    least,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PAIRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend with a tile of one row's queries, for one key head and one share of the keys.

    Results go to output [N, H, E]; if keys are split, to partial [S, R * W, H, E], with the logarithm (base 2) of their
    denominators in weight [S, R * W, H]. A row with keys in the first share only is complete in output, and its first
    weight is infinite.
    """
    begin_dependent(DEPENDENT, EARLY)
    if RAGGED:
        row, tile = tl.load(tile_of + 2 * tl.program_id(0)), tl.load(tile_of + 2 * tl.program_id(0) + 1)
    else:
        row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    group, split = tl.program_id(1), tl.program_id(2)
    first = tl.load(start_of + row)
    count = tl.load(start_of + row + 1) - first
    if (count < fewest) | (count > most) | (tile * LINES >= count * SHARED):
        return

    # A layer of a large cache has more numbers than 32 bits can index.
    keys += group.to(tl.int64) * key_head
    values += group.to(tl.int64) * value_head
    line = tile * LINES + tl.arange(0, LINES)
    place = line // SHARED
    head = group * SHARED + line % SHARED
    asked = place < count
    token = (first + place).to(tl.int64)
    key_dim, value_dim = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + key_dim[None, :],
        mask=asked[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    HALVED: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype == tl.bfloat16
    if HALVED:  # a power of 2 makes any query small enough for float16, exactly
        largest = tl.maximum(tl.max(tl.abs(queries.to(tl.float32)), axis=1), 1e-30)
        unit = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        queries = (queries.to(tl.float32) / unit[:, None]).to(tl.float16)
    position = tl.load(position_of + token, mask=asked, other=0).to(tl.int32)
    end = tl.load(end_of + row)
    if TREE:
        base = tl.load(base_of + row)
        seen = tl.load(seen_by + token, mask=asked, other=0)
        earliest = base
    else:
        end = tl.minimum(end, tl.max(position, axis=0) + 1)
        earliest = tl.min(tl.where(asked, position, end), axis=0)
    # The slots that some query sees are the sinks and those from `begin` on; i counts through both.
    begin = 0
    if WINDOWED:
        begin = tl.maximum(earliest + 1 - window, sinks)
    visible_slots = tl.maximum(end - begin, 0) + sinks
    share = tl.maximum(tl.cdiv(tl.cdiv(visible_slots, splits), BLOCK) * BLOCK, least)
    whole = visible_slots <= share
    if whole & (split > 0):
        return
    low = split * share
    high = tl.minimum(low + share, visible_slots)

    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    if PAIRED:
        even = tl.zeros([LINES, VALUE_PADDED // 2], tl.float32)
        odd = tl.zeros([LINES, VALUE_PADDED // 2], tl.float32)
    else:
        answer = tl.zeros([LINES, VALUE_PADDED], tl.float32)
    if HAS_SINK:  # the sink is a score with a value of zeros; among splits the first one has it
        sunk = tl.load(sink + head).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sunk, float("-inf"))
        total = tl.where(split == 0, 1.0, total)
    for at in range(low, high, BLOCK):
        i = at + tl.arange(0, BLOCK)
        slot = i
        if WINDOWED:
            slot = tl.where(i < sinks, i, i - sinks + begin)
        inside = (i < high) & (slot < end)
        block = tl.load(table + row * table_row + slot // BLOCK_SIZE, mask=inside, other=0)
        where = block.to(tl.int64) * BLOCK_SIZE + slot % BLOCK_SIZE
        k = tl.load(
            keys + where[:, None] * key_slot + key_dim[None, :],
            mask=inside[:, None] & (key_dim < KEY_DIM)[None, :],
            other=0.0,
        ).to(queries.dtype)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if HALVED:
            score *= unit[:, None]
        if CAPPED:
            # tanh by its definition; an exponential that overflows gives 1, as it should.
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * 1.4426950408889634 * scale / softcap)) + 1.0))
            score *= 1.4426950408889634
        else:
            score *= scale * 1.4426950408889634
        if TREE:
            bit = tl.minimum(tl.maximum(slot - base, 0), 63).to(tl.int64)
            visible = (slot < base)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
        else:
            visible = slot[None, :] <= position[:, None]
        if WINDOWED:
            near = (slot[None, :] > position[:, None] - window) | (slot < sinks)[None, :]
            if TREE:  # in the tail a slot is no position: the bits include the window
                near = near | (slot >= base)[None, :]
            visible = visible & near
        score = tl.where(visible & inside[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(score - safe[:, None])
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weights, axis=1)
        if PAIRED:
            pair = tl.arange(0, VALUE_PADDED // 2)
            both = tl.load(
                values.to(tl.pointer_type(tl.int16)) + where[:, None] * (value_slot // 2) + pair[None, :],
                mask=inside[:, None] & (pair < VALUE_DIM // 2)[None, :],
                other=0,
            )
            v_even, v_odd = _halves(both)
            even = tl.dot(weights.to(tl.float16), v_even, even * fade[:, None])
            odd = tl.dot(weights.to(tl.float16), v_odd, odd * fade[:, None])
        else:
            v = tl.load(
                values + where[:, None] * value_slot + value_dim[None, :],
                mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :],
                other=0.0,
            ).to(queries.dtype)
            answer = tl.dot(weights.to(v.dtype), v, answer * fade[:, None], input_precision="ieee")
        top = new_top

    if PAIRED:
        answer = tl.join(even, odd).reshape(LINES, VALUE_PADDED)
    answer = answer / tl.where(total == 0.0, 1.0, total)[:, None]
    written = asked[:, None] & (value_dim < VALUE_DIM)[None, :]
    if SPLIT:
        at_head = ((split * rows + row).to(tl.int64) * width + place) * HEADS + head
        size = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        tl.store(weight + at_head, tl.where(whole, float("inf"), size), mask=asked)
        to = partial + at_head[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(to, answer, mask=written & (not whole))
        written = written & whole
    to = output + (token * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(to, answer.to(output.dtype.element_ty), mask=written)


@triton.jit
def _halves(both):
    """The first and the second of two fp8 numbers in 16 bits, as float16."""
    # Of two pairs (a b, c d): a c and b d, each converted by one instruction. Triton would take ten.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 first, second;
        .reg .b16 ac, bd, none;
        prmt.b32 first, $2, 0, 0x4420;
        prmt.b32 second, $2, 0, 0x4431;
        mov.b32 {ac, none}, first;
        mov.b32 {bd, none}, second;
        cvt.rn.f16x2.e4m3x2 $0, ac;
        cvt.rn.f16x2.e4m3x2 $1, bd;
        }""",
        "=r,=r,r",
        [both],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit(do_not_specialize=["rows", "width", "fewest", "most"])
def _merge_kernel(
    partial,
    weight,
    output,
    start_of,
    rows,
    width,
    fewest,
    most,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the splits of one token and head."""
    begin_dependent(DEPENDENT, EARLY)
    line, head = tl.program_id(0), tl.program_id(1)
    row, place = line // width, line % width
    first = tl.load(start_of + row)
    count = tl.load(start_of + row + 1) - first
    if (count < fewest) | (count > most) | (place >= count):
        return
    if tl.load(weight + line.to(tl.int64) * HEADS + head) == float("inf"):
        return
    at_head = (tl.arange(0, SPLITS).to(tl.int64) * rows * width + line) * HEADS + head
    value_dim = tl.arange(0, VALUE_PADDED)
    size = tl.load(weight + at_head)
    top = tl.max(size, axis=0)
    share = tl.exp2(size - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(share, axis=0)
    real = (value_dim < VALUE_DIM)[None, :]
    answer = tl.load(partial + at_head[:, None] * VALUE_DIM + value_dim[None, :], mask=real, other=0.0)
    answer = tl.sum(answer * share[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    to = output + ((first + place).to(tl.int64) * HEADS + head) * VALUE_DIM + value_dim
    tl.store(to, answer.to(output.dtype.element_ty), mask=value_dim < VALUE_DIM)


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """The rows with fewest..most new tokens."""

    fewest: int
    most: int
    tree: bool
    split: bool


class TritonBackend(AttentionBackend):
    """Runs these kernels."""

    def __init__(self, metadata: AttentionMetadata, *, sinks: int = 0) -> None:
        super().__init__(metadata, sinks=sinks)
        self._tables = tables = metadata.tables
        self._start_of, self._end_of = tables.query_start_loc_R, tables.seq_lens_R
        self._launches = []
        self._ragged = tables.query_lens is None and (tables.longest is None or tables.longest > TREE_BITS)
        """Whether rows may be as long as prompts, and only the device knows."""
        if tables.query_lens is None and not self._ragged:
            assert tables.longest is not None
            self._launches.append(_Launch(fewest=1, most=tables.longest, tree=False, split=True))
        elif tables.query_lens is None:
            # The tokens after the last row are one more row, which sees nothing.
            tokens = len(metadata.position_N)
            self._start_of = functional.pad(tables.query_start_loc_R, (0, 1), value=tokens)
            self._end_of = functional.pad(tables.seq_lens_R, (0, 1))
            self._launches.append(_Launch(fewest=1, most=tokens, tree=False, split=False))
        else:
            few = [count for count in tables.query_lens if count <= TREE_BITS]
            many = [count for count in tables.query_lens if count > TREE_BITS]
            if few:
                tree = tables.tree_mask_N is not None
                self._launches.append(_Launch(fewest=1, most=max(few), tree=tree, split=True))
            if many:
                self._launches.append(_Launch(fewest=TREE_BITS + 1, most=max(many), tree=False, split=False))
        self._tiles: dict[tuple[int, int], Tensor] = {}
        self._tree_masks: dict[int | None, Tensor | None] = {None: self._tables.tree_mask_N}

    def attend(
        self,
        q_NHK: Tensor,
        keys_GCK: Tensor,
        values_GCV: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink_logit_H: Tensor | None = None,
    ) -> Tensor:
        tables, metadata, (heads, size) = self._tables, self.metadata, q_NHK.shape[1:]
        rows, groups, value_size = len(tables.context_lens_R), keys_GCK.shape[0], values_GCV.shape[2]
        shared = heads // groups
        key_padded, value_padded = (max(16, triton.next_power_of_2(dim)) for dim in (size, value_size))
        if q_NHK.stride(2) != 1:
            q_NHK = q_NHK.contiguous()
        # Tokens after the last row are in no tile unless they are a row of their own.
        new = q_NHK.new_zeros if tables.query_lens is None and not self._ragged else q_NHK.new_empty
        output_NHE = new(len(q_NHK), heads, value_size)
        if window not in self._tree_masks:
            assert window is not None
            self._tree_masks[window] = _mask_within(tables, window, self.sinks)
        tree_mask_N = self._tree_masks[window]
        options = dependent_launch(q_NHK.device, early=len(q_NHK) <= 16 and heads * value_size <= 2048)
        for launch in self._launches:
            lines, block, warps, stages = _tile(launch.most * shared, max(key_padded, value_padded), q_NHK.dtype)
            tiles = triton.cdiv(launch.most * shared, lines)
            programs, tile_of = rows * tiles, self._start_of
            if self._ragged:
                tile_of = self._tiles_of(shared, lines)
                programs = len(tile_of)
            splits, least = 1, 0
            if launch.split:
                splits, least = _splits(programs * groups, tables.max_seq_len, q_NHK.device)
            partial, weight = output_NHE, output_NHE
            if splits > 1:
                partial = q_NHK.new_empty(splits, rows * launch.most, heads, value_size, dtype=torch.float32)
                weight = q_NHK.new_empty(splits, rows * launch.most, heads, dtype=torch.float32)
            bounds = rows, launch.most, launch.fewest, launch.most
            _attend_kernel[programs, groups, splits](
                *(q_NHK, keys_GCK, values_GCV, output_NHE, partial, weight),
                *(tables.block_table_RP, tables.context_lens_R, self._end_of, self._start_of),
                *(metadata.position_N, tree_mask_N if launch.tree else metadata.position_N, tile_of),
                metadata.position_N if sink_logit_H is None else sink_logit_H,
                *(scale, softcap or 0.0, window or 0, 0 if window is None else self.sinks),
                *(*q_NHK.stride()[:2], *keys_GCK.stride()[:2], *values_GCV.stride()[:2]),
                *(tables.block_table_RP.stride(0), *bounds, tiles, splits, least),
                HEADS=heads,
                SHARED=shared,
                KEY_DIM=size,
                VALUE_DIM=value_size,
                KEY_PADDED=key_padded,
                VALUE_PADDED=value_padded,
                BLOCK_SIZE=metadata.block_size,
                LINES=lines,
                BLOCK=block,
                SPLIT=splits > 1,
                TREE=launch.tree,
                RAGGED=self._ragged,
                WINDOWED=window is not None,
                CAPPED=softcap is not None,
                HAS_SINK=sink_logit_H is not None,
                PAIRED=lines < WHOLE_LINES and _paired(q_NHK, values_GCV, value_padded),
                num_warps=warps,
                num_stages=stages,
                **options,
            )
            if splits > 1:
                sizes = {"HEADS": heads, "VALUE_DIM": value_size, "VALUE_PADDED": value_padded}
                _merge_kernel[rows * launch.most, heads](
                    partial,
                    weight,
                    output_NHE,
                    self._start_of,
                    *bounds,
                    SPLITS=splits,
                    **sizes,
                    **options,
                    num_warps=1 if splits <= 8 else 4,
                )
        return output_NHE

    def _tiles_of(self, shared: int, lines: int) -> Tensor:
        """Row and tile number in that row of every possible tile: int32 [T, 2]. Unused ones lie after the last row's
        own.
        """
        if (shared, lines) not in self._tiles:
            start_of, most = self._start_of, self._launches[0].most * shared // lines + len(self._end_of)
            tiles_R = (start_of.diff() * shared + lines - 1) // lines
            end_R = tiles_R.cumsum(dim=0)
            tile_T = torch.arange(most, device=start_of.device)
            row_T = torch.searchsorted(end_R, tile_T, right=True).clamp(max=len(end_R) - 1)
            self._tiles[shared, lines] = torch.stack([row_T, tile_T - (end_R - tiles_R)[row_T]], dim=1).int()
        return self._tiles[shared, lines]


def _paired(q_NHK: Tensor, values_GCV: Tensor, padded: int) -> bool:
    """Whether values are read as pairs: fp8 with 16-bit queries, by instructions that the interpreter lacks."""
    stride_head, stride_slot, _ = values_GCV.stride()
    even = all(number % 2 == 0 for number in (values_GCV.shape[2], stride_head, stride_slot, values_GCV.data_ptr()))
    return values_GCV.dtype == FP8 and q_NHK.dtype != torch.float32 and q_NHK.is_cuda and even and padded >= 32


def _tile(lines: int, padded_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Lines and keys of a tile, warps and stages: as large as registers and shared memory allow without spilling
    (sm_90).

    Latents, padded to 1024, leave room for the smallest tile: in float32 its queries, keys and values take 160 KiB.
    """
    if padded_dim > 512:
        return 16, 16, 8, 1
    if dtype == torch.float32:  # no tensor cores
        return 16, 32, 8, 2
    lines = min(max(16, triton.next_power_of_2(lines)), 128)
    return lines, 64 if padded_dim <= 128 else 32, 4 if lines <= 64 else 8, 2


def _splits(programs: int, longest: int, device: torch.device) -> tuple[int, int]:
    """Splits of the keys, a power of 2 that gives about two programs per multiprocessor; and the fewest keys of one.

    Even with enough programs, rows may differ in length, and then the longest delays all.
    """
    processors = _processors(device)
    wanted = min(triton.cdiv(2 * processors, programs), longest // LEAST_KEYS_PER_SPLIT, MOST_SPLITS)
    if wanted <= 1 and programs < MANY_PROGRAMS * processors and longest > LONG_ROW:
        return LONG_ROW_SPLITS, LONG_ROW
    return 1 << max(0, int(wanted).bit_length() - 1), 0


@cache
def _processors(device: torch.device) -> int:
    # Only Triton's interpreter runs without a GPU; there a few splits suffice to test merging.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _mask_within(tables: BlockTables, window: int, sinks: int) -> Tensor | None:
    """Visibility in the tails, less what a window hides: ancestors `window` or more tokens back on the path."""
    if tables.tree_mask_N is None or window >= TREE_BITS:
        return tables.tree_mask_N
    bit_T = torch.arange(TREE_BITS, device=tables.tree_mask_N.device)
    tree_mask_NT = (tables.tree_mask_N[:, None] >> bit_T) & 1
    behind_NT = tree_mask_NT.sum(dim=1, keepdim=True) - tree_mask_NT.cumsum(dim=1)
    token_N = torch.arange(len(tree_mask_NT), dtype=torch.int32, device=bit_T.device)
    row_N = torch.searchsorted(tables.query_start_loc_R[1:], token_N, right=True)
    sink_NT = tables.context_lens_R[row_N][:, None] + bit_T < sinks
    return ((tree_mask_NT * ((behind_NT < window) | sink_NT)) << bit_T).sum(dim=1)
