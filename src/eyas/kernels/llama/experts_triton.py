# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Experts on a GPU (`experts.py`), in kernels without host synchronisation, so that a pass can be captured.

    route      turns a token's scores into experts and weights
    lay out    sorts pairs of token and expert by expert into blocks
    multiply   multiplies a block's rows by its expert's weights, with gates or without
    combine    adds up a token's weighted expert outputs

With few tokens every pair is a block of its own, without laying out: only weights in use are read, hardly any twice.
With many, a block holds as many pairs as an expert has on average, so that its weights are read about once. Only the
device knows the number of blocks; there is a program for each possible one, and superfluous ones exit at once.

Invariants: a row's result does not depend on the rows beside it, nor on its place in a block: sums over the inputs have
one order, and a token's experts are added up in the order of their weights. Nothing is added atomically. Every number
is rounded where transformers rounds it.

Shapes: N tokens of a pass, K experts per token, P = N * K pairs of token and expert, E experts, B blocks, D hidden
size, I intermediate size, G = 2 I gates and ups.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation
from eyas.kernels.linear.mxfp4_weight import BLOCK as MXFP4_BLOCK
from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight
from eyas.kernels.llama.expert_outputs_triton import store_outputs
from eyas.kernels.llama.experts import ClampedSwiglu, PlainExperts, Router, Routes
from eyas.kernels.llama.mxfp4_experts import FourBitExperts
from eyas.kernels.llama.mxfp4_experts_triton import mxfp4_kernel, unpacking


@triton.jit
def _route_kernel(
    scores,
    experts,
    weights,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    RENORMALISES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token: the experts of its largest scores, of equals the first, and their weights."""
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    at, k = tl.arange(0, COUNT_PADDED), tl.arange(0, TOP_K_PADDED)
    left = tl.load(scores + token * COUNT + at, mask=at < COUNT, other=float("-inf")).to(tl.float32)
    top = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - top), axis=0)
    chosen = tl.zeros([TOP_K_PADDED], tl.int32)
    weight = tl.zeros([TOP_K_PADDED], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        # An expert must be chosen whatever the scores are: others read its weights.
        first = tl.minimum(tl.min(tl.where(left == best, at, COUNT_PADDED), axis=0), COUNT - 1)
        chosen = tl.where(k == i, first, chosen)
        weight = tl.where(k == i, tl.exp(best - top), weight)
        left = tl.where(at == first, float("-inf"), left)
    if RENORMALISES:
        total = tl.sum(weight, axis=0)
    tl.store(experts + token * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, (weight / total).to(weights.dtype.element_ty), mask=k < TOP_K)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _lay_out_kernel(
    expert_of,
    pair_of,
    expert_of_block,
    pairs,
    blocks,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The blocks of one expert; unused places of a block hold `pairs`, which is no pair."""
    begin_dependent(DEPENDENT, EARLY)
    expert = tl.program_id(0)
    e, chunk = tl.arange(0, COUNT_PADDED), tl.arange(0, CHUNK)
    counts = tl.zeros([COUNT_PADDED], tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + chunk
        chosen = tl.load(expert_of + pair, mask=pair < pairs, other=-1)
        counts += tl.sum((chosen[:, None] == e[None, :]).to(tl.int32), axis=0)
    needed = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(e < expert, needed, 0), axis=0)
    end = first + tl.sum(tl.where(e == expert, needed, 0), axis=0)

    place = first * ROWS
    for begin in range(0, pairs, CHUNK):
        pair = begin + chunk
        mine = tl.load(expert_of + pair, mask=pair < pairs, other=-1) == expert
        tl.store(pair_of + place + tl.cumsum(mine.to(tl.int32), axis=0) - 1, pair, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)
    rest = place + tl.arange(0, ROWS)
    tl.store(pair_of + rest, tl.zeros([ROWS], tl.int32) + pairs, mask=rest < end * ROWS)
    for begin in range(first, end, CHUNK):
        tl.store(expert_of_block + begin + chunk, tl.zeros([CHUNK], tl.int32) + expert, mask=begin + chunk < end)
    if expert == COUNT - 1:
        for begin in range(end, blocks, CHUNK):
            tl.store(expert_of_block + begin + chunk, tl.full([CHUNK], -1, tl.int32), mask=begin + chunk < blocks)


@triton.jit(do_not_specialize=["pairs"])
def _multiply_kernel(
    x,
    weight,
    bias,
    expert_of_block,
    pair_of,
    output,
    pairs,
    alpha,
    limit,
    SHARE: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    LAID_OUT: tl.constexpr,
    DOT: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_E outputs of a block's pairs, whose row of x is pair / SHARE.

    Output i uses row i * STEP of the expert's weight; with GATES that is its gate, and its up is UP rows on.
    """
    begin_dependent(DEPENDENT, EARLY)
    block, first = tl.program_id(0), tl.program_id(1) * BLOCK_E
    expert = tl.load(expert_of_block + block).to(tl.int64)
    if expert < 0:
        return
    if LAID_OUT:
        pair = tl.load(pair_of + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    else:
        pair = block.to(tl.int64) + tl.arange(0, ROWS)
    real = pair < pairs
    k = tl.arange(0, BLOCK_K)
    i = first + tl.arange(0, BLOCK_E)
    inside = i < OUTPUTS
    ALL: tl.constexpr = OUTPUTS * 2 if GATES else OUTPUTS
    begins = weight + expert * ALL * SIZE + i.to(tl.int64)[:, None] * (STEP * SIZE)
    rows = x + (pair // SHARE)[:, None] * SIZE
    acc = tl.zeros((ROWS, BLOCK_E) if DOT else (ROWS, BLOCK_E, BLOCK_K), tl.float32)
    up_acc = acc
    for begin in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        at = begin + k
        there = inside[:, None] & (at < SIZE)[None, :]
        value = tl.load(rows + at[None, :], mask=real[:, None] & (at < SIZE)[None, :], other=0.0)
        tile = tl.load(begins + at[None, :], mask=there, other=0.0)
        if DOT:
            acc = tl.dot(value, tl.trans(tile), acc, input_precision="ieee")
        else:
            acc += value.to(tl.float32)[:, None, :] * tile.to(tl.float32)[None, :, :]
        if GATES:
            tile = tl.load(begins + UP * SIZE + at[None, :], mask=there, other=0.0)
            if DOT:
                up_acc = tl.dot(value, tl.trans(tile), up_acc, input_precision="ieee")
            else:
                up_acc += value.to(tl.float32)[:, None, :] * tile.to(tl.float32)[None, :, :]
    if not DOT:
        acc, up_acc = tl.sum(acc, axis=2), tl.sum(up_acc, axis=2)
    store_outputs(
        acc,
        up_acc,
        bias + expert * ALL,
        output,
        pair,
        i,
        real,
        alpha,
        limit,
        OUTPUTS,
        STEP,
        UP,
        GATES,
        GELU,
        CLAMPS,
        HAS_BIAS,
    )


@triton.jit
def _combine_kernel(
    made,
    weights,
    output,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Part of one token: its weighted expert outputs, each rounded as torch does, and their sum."""
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        value = tl.load(made + pair * SIZE + at, mask=at < SIZE, other=0.0)
        weight = tl.load(weights + pair)
        more = value.to(tl.float32) * weight.to(tl.float32)
        if weights.dtype.element_ty == made.dtype.element_ty:  # the reduction needs two operands of a kind
            more = more.to(value.dtype).to(tl.float32)
        total += more
    tl.store(output + token * SIZE + at, total.to(output.dtype.element_ty), mask=at < SIZE)


@dataclass(frozen=True)
class ExpertTiling:
    """The tiling of a pass's expert products: pairs per block, outputs per program, inputs per step."""

    rows: int
    """Pairs per block; 0 makes every pair a block of its own."""
    outputs: int
    inputs: int
    warps: int
    stages: int


def mxfp4_tiling(pairs: int, experts: int, *, gates: bool) -> ExpertTiling:
    """The tiling for MXFP4 weights. Only the tile's rows depend on the number of pairs, and they change no result."""
    alone = 2 * pairs <= experts or pairs <= 2
    rows = 0 if alone else min(32, max(8, triton.next_power_of_2(-(-pairs // experts))))
    # Two warps use the same instruction for any number of rows; four would switch to another one for many.
    return ExpertTiling(rows=rows, outputs=32 if gates else 64, inputs=MXFP4_BLOCK, warps=2, stages=4)


def expert_tiling(pairs: int, experts: int, dtype: torch.dtype, *, gates: bool, size: int) -> ExpertTiling:
    """The tiling by the average pairs per expert; pairs stay single while most experts would have none."""
    whole = max(16, triton.next_power_of_2(size))
    if 2 * pairs <= experts or pairs <= 2:
        return ExpertTiling(rows=0, outputs=8, inputs=min(1024 if gates else 2048, whole), warps=4, stages=3)
    if dtype == torch.float32:  # no tensor cores
        return ExpertTiling(rows=16, outputs=32, inputs=min(32, whole), warps=4, stages=2)
    average = pairs / experts
    if average <= 12:
        return ExpertTiling(rows=16, outputs=32, inputs=min(128, whole), warps=4, stages=4)
    if average <= 48:
        return ExpertTiling(rows=32, outputs=64, inputs=min(64, whole), warps=4, stages=4)
    if average <= 160:
        return ExpertTiling(rows=64, outputs=64, inputs=min(64, whole), warps=4, stages=4)
    return ExpertTiling(rows=128, outputs=64, inputs=min(64, whole), warps=8, stages=3)


def route(score_NE: Tensor, router: Router) -> Routes:
    """Route rows by their scores."""
    tokens, count = score_NE.shape
    assert score_NE.is_contiguous()
    expert_NK = torch.empty(tokens, router.top_k, dtype=torch.int32, device=score_NE.device)
    weight_NK = torch.empty(tokens, router.top_k, dtype=router.dtype, device=score_NE.device)
    if tokens:
        _route_kernel[(tokens,)](
            *(score_NE, expert_NK, weight_NK),
            COUNT=count,
            COUNT_PADDED=triton.next_power_of_2(count),
            TOP_K=router.top_k,
            TOP_K_PADDED=triton.next_power_of_2(router.top_k),
            RENORMALISES=router.renormalises,
            num_warps=1 if count <= 256 else 4,
            **dependent_launch(score_NE.device, early=tokens <= 16),
        )
    return Routes(expert_NK, weight_NK)


def mixture(
    experts: PlainExperts | FourBitExperts,
    x_ND: Tensor,
    routes: Routes,
    *,
    gate_tiling: ExpertTiling | None = None,
    down_tiling: ExpertTiling | None = None,
) -> Tensor:
    """The weighted sum of each row's experts [N, D]. Both tilings have the same number of rows."""
    (tokens, hidden), (_, top_k) = x_ND.shape, routes.expert_NK.shape
    count, pairs, dtype = experts.count, tokens * top_k, x_ND.dtype
    output_ND = torch.empty_like(x_ND)
    if not tokens:
        return output_ND
    assert x_ND.is_contiguous()
    expert_P, weight_NK = routes.expert_NK.int().flatten(), routes.weight_NK.contiguous()
    gate_up: Tensor | Mxfp4Weight
    down: Tensor | Mxfp4Weight
    if isinstance(experts, FourBitExperts):
        gate_up, down = experts.gate_up, experts.down
        gate_tiling = gate_tiling or mxfp4_tiling(pairs, count, gates=True)
        down_tiling = down_tiling or mxfp4_tiling(pairs, count, gates=False)
    else:
        gate_up, down = experts.gate_up_EGD, experts.down_EDI
        gate_tiling = gate_tiling or expert_tiling(pairs, count, dtype, gates=True, size=hidden)
        down_tiling = down_tiling or expert_tiling(pairs, count, dtype, gates=False, size=down.shape[2])
    assert gate_tiling.rows == down_tiling.rows
    expert_B, pair_BR = expert_P, None
    if gate_tiling.rows:
        expert_B, pair_BR = _lay_out(expert_P, count, gate_tiling.rows)
    gated_PI = _multiply(
        *(x_ND, gate_up, experts.gate_up_bias_EG, expert_B, pair_BR, pairs, gate_tiling),
        share=top_k,
        gating=experts.gating,
        interleaved=experts.interleaved,
    )
    made_PD = _multiply(gated_PI, down, experts.down_bias_ED, expert_B, pair_BR, pairs, down_tiling)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        *(made_PD, weight_NK, output_ND),
        SIZE=hidden,
        BLOCK=block,
        TOP_K=top_k,
        num_warps=4,
        **dependent_launch(x_ND.device, early=tokens <= 16),
    )
    return output_ND


def _lay_out(expert_P: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """The expert of every possible block, -1 if there is none, and its pairs: int32 [B], [B, rows]."""
    pairs, device = len(expert_P), expert_P.device
    # Each expert with pairs has one block, and one more for every `rows` of its other pairs.
    blocks = min(pairs, count) + pairs // rows
    expert_B = torch.empty(blocks, dtype=torch.int32, device=device)
    pair_BR = torch.empty(blocks, rows, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(count)
    _lay_out_kernel[(count,)](
        *(expert_P, pair_BR, expert_B, pairs, blocks),
        COUNT=count,
        COUNT_PADDED=padded,
        ROWS=rows,
        CHUNK=max(16, min(1024, 8192 // padded)),
        num_warps=4,
        **dependent_launch(device),
    )
    return expert_B, pair_BR


def _multiply(
    x: Tensor,
    weight: Tensor | Mxfp4Weight,
    bias: Tensor | None,
    expert_B: Tensor,
    pair_BR: Tensor | None,
    pairs: int,
    tiling: ExpertTiling,
    *,
    share: int = 1,
    gating: Activation | ClampedSwiglu | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Multiply the rows of x (pair / share) by their experts: [P, outputs]; with gating, half as many."""
    every = weight.outputs if isinstance(weight, Mxfp4Weight) else weight.shape[1]
    outputs = every if gating is None else every // 2
    output = x.new_empty(pairs, outputs)
    clamped = gating if isinstance(gating, ClampedSwiglu) else ClampedSwiglu(0.0, 0.0)
    packed = weight.packed() if isinstance(weight, Mxfp4Weight) else [weight]
    assert all(part.is_contiguous() for part in packed)
    given = (
        *(x, *packed, packed[0] if bias is None else bias, expert_B, expert_B if pair_BR is None else pair_BR, output),
        *(pairs, clamped.alpha, clamped.limit),
    )
    settings = {
        "SHARE": share,
        "OUTPUTS": outputs,
        "STEP": 2 if interleaved else 1,
        "UP": 1 if interleaved else outputs,
        "BLOCK_E": tiling.outputs,
        "STAGES": tiling.stages,
        "LAID_OUT": pair_BR is not None,
        "GATES": gating is not None,
        "GELU": gating is Activation.GELU_TANH,
        "CLAMPS": isinstance(gating, ClampedSwiglu),
        "HAS_BIAS": bias is not None,
        "num_warps": tiling.warps,
        **dependent_launch(x.device),
    }
    grid = len(expert_B), triton.cdiv(outputs, tiling.outputs)
    if isinstance(weight, Mxfp4Weight):
        blocks, asm = weight.exponents_EBO.shape[1], unpacking(x)
        mxfp4_kernel[grid](*given, SIZE=weight.inputs, BLOCKS=blocks, ROWS=tiling.rows or 8, ASM=asm, **settings)
    else:
        size, dot = weight.shape[2], tiling.rows > 0
        _multiply_kernel[grid](*given, SIZE=size, ROWS=tiling.rows or 1, BLOCK_K=tiling.inputs, DOT=dot, **settings)
    return output
