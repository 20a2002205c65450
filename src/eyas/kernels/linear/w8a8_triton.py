# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products with 8-bit weights on a GPU.

    quantise_rows      rounds rows to fp8 or int8, each with its own scale
    gate_quantise      likewise for activation(gate) * up
    w8a8_decode        multiplies them by weights of the same type
    scale_outputs      applies row and output scales after a product without scales (`torch._scaled_mm`)

Invariant of the product: **a row's result does not depend on the rows beside it, nor on how many there are**. Tiles
differ in how many rows they have, never in the order of sums: how inputs are split depends on the weight alone.

A tile has 64 outputs and four warps: the least for Hopper's 8-bit instruction, which reads weights from shared memory
without registers. Smaller tiles would be converted to 16 bits, number by number. The instruction accumulates fp8 with
fewer bits than float32, some 13 of the largest: next to the rounding of rows to 8 bits that is nothing, and adding up
in float32 every few inputs takes an eighth longer. Other GPUs have other instructions, one for all tiles.

Rows beyond the last are zeros, outputs beyond the last repeat it; inputs are padded in memory.

Shapes: N rows, K inputs, E outputs, G groups of inputs.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import MOST_EARLY, begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation
from eyas.kernels.elementwise_triton import gated
from eyas.kernels.linear.decode_tiling import OUTPUTS, PROCESSORS, DecodeTiling, splits_for
from eyas.kernels.linear.quantised_weight import FLOAT8, FLOAT8_LARGEST, INT8_LARGEST
from eyas.kernels.linear.split_sums_triton import split_memory, split_sums

BLOCK_K = 128
"""Inputs per step of an 8-bit product; weights are padded to a multiple of it."""
FEWEST_PROGRAMS = 96
MOST_IN_REGISTERS = 16384
"""Numbers of a row that a program keeps in registers."""


@triton.jit
def rounded(value, most, LARGEST: tl.constexpr, INT: tl.constexpr):
    """Round numbers of a row whose largest is `most` to 8 bits; the scale is `most` / LARGEST."""
    value = tl.minimum(tl.maximum(value.to(tl.float32) * (LARGEST / most), -LARGEST), LARGEST)
    if INT:
        value = tl.floor(value + 0.5)
    return value


@triton.jit
def _quantise_rows_kernel(
    x,
    q,
    scale,
    row,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INT: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Round one row: its largest number becomes LARGEST. With GATES, of activation(gate) * up.

    What does not fit in a block is read, or computed, twice instead of kept.
    """
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x += n * row
    value = _row_part(x, k, SIZE, GATES, GELU)
    most = tl.abs(value)
    for begin in tl.static_range(BLOCK, SIZE, BLOCK):
        most = tl.maximum(most, tl.abs(_row_part(x, begin + k, SIZE, GATES, GELU)))
    largest = tl.maximum(tl.max(most, axis=0), 1e-12)
    tl.store(scale + n, largest / LARGEST)
    for begin in tl.static_range(0, PADDED, BLOCK):
        if begin > 0:
            value = _row_part(x, begin + k, SIZE, GATES, GELU)
        to = q + n * PADDED + begin + k
        tl.store(to, rounded(value, largest, LARGEST, INT).to(q.dtype.element_ty), mask=begin + k < PADDED)


@triton.jit
def _row_part(x, k, SIZE: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr):
    """Load part of a row, float32, zero-padded."""
    value = tl.load(x + k, mask=k < SIZE, other=0.0)
    if GATES:
        value = gated(value, tl.load(x + SIZE + k, mask=k < SIZE, other=0.0), GELU)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _w8a8_kernel(
    q,
    row_scale,
    weight,
    scale,
    bias,
    partial,
    arrived,
    output,
    rows,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    INT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply a tile of rows and outputs, over one of SPLITS parts of the inputs.

    With one group the scale is applied at the end; with several, after each step.
    """
    begin_dependent(DEPENDENT, EARLY)
    TYPE: tl.constexpr = tl.int32 if INT else tl.float32
    PART: tl.constexpr = (SIZE + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    out = e if OUTPUTS % BLOCK_E == 0 else tl.minimum(e, OUTPUTS - 1)
    weights = weight + out.to(tl.int64)[:, None] * SIZE
    inputs = q + n[None, :] * SIZE
    first = tl.program_id(2) * PART
    acc = tl.zeros((BLOCK_E, BLOCK_N), TYPE if GROUPS == 1 else tl.float32)
    for begin in tl.range(first, tl.minimum(first + PART, SIZE), BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        if SIZE % BLOCK_K == 0:
            tile = tl.load(weights + k[None, :], eviction_policy="evict_first")
            value = tl.load(inputs + k[:, None], mask=(n < rows)[None, :], other=0.0)
        else:
            tile = tl.load(weights + k[None, :], mask=(k < SIZE)[None, :], other=0.0, eviction_policy="evict_first")
            value = tl.load(inputs + k[:, None], mask=(n < rows)[None, :] & (k < SIZE)[:, None], other=0.0)
        if GROUPS == 1:
            acc = tl.dot(tile, value, acc, out_dtype=TYPE)
        else:
            by = tl.load(scale + out * GROUPS + begin // GROUP)
            part = tl.dot(tile, value, out_dtype=TYPE)
            acc += part.to(tl.float32) * by[:, None]
    total = acc.to(tl.float32)
    if SPLITS == 1:
        _w8a8_store(total, n, e, out, row_scale, scale, bias, output, rows, OUTPUTS, GROUPS, HAS_BIAS)
    else:
        inside = (n < rows)[None, :] & (e < OUTPUTS)[:, None]
        total, last = split_sums(total, inside, partial, arrived, SPLITS)
        if last:
            _w8a8_store(total, n, e, out, row_scale, scale, bias, output, rows, OUTPUTS, GROUPS, HAS_BIAS)


@triton.jit
def _w8a8_store(
    total,
    n,
    e,
    out,
    row_scale,
    scale,
    bias,
    output,
    rows,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store sums [e, n], scaled and with the bias."""
    if GROUPS == 1:
        total *= tl.load(scale + out)[:, None]
    total *= tl.load(row_scale + n, mask=n < rows, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + out).to(tl.float32)[:, None]
    at = n[None, :].to(tl.int64) * OUTPUTS + e[:, None]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=(n < rows)[None, :] & (e < OUTPUTS)[:, None])


@triton.jit
def _scale_outputs_kernel(
    product,
    row_scale,
    scale,
    bias,
    output,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Scale some outputs of a row."""
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < OUTPUTS
    value = tl.load(product + n * OUTPUTS + e, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + e, mask=inside, other=0.0) * tl.load(row_scale + n)
    if HAS_BIAS:
        value += tl.load(bias + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + n * OUTPUTS + e, value.to(output.dtype.element_ty), mask=inside)


def w8a8_tiling(rows: int, outputs: int, inputs: int) -> DecodeTiling:
    """The tiling of a product; only the tile's rows depend on the number of rows, and they change no result.

    A program alone on a multiprocessor keeps as many weights loading as two or three do that share one.
    """
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
    splits = splits_for(outputs, inputs, FEWEST_PROGRAMS)
    stages = 8 if -(-outputs // OUTPUTS) * splits <= PROCESSORS else 5
    return DecodeTiling(outputs=OUTPUTS, inputs=BLOCK_K, rows=tile, warps=4, stages=stages, splits=splits)


def largest_of(dtype: torch.dtype) -> dict[str, Any]:
    """The largest number of a dtype, for kernels that round rows to it."""
    return {"LARGEST": FLOAT8_LARGEST if dtype == FLOAT8 else INT8_LARGEST, "INT": dtype != FLOAT8}


def rows_for(rows: int, weight_EK: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for rounded rows [N, K] for a weight, and for their scales [N]."""
    q_NK = torch.empty(rows, weight_EK.shape[1], dtype=weight_EK.dtype, device=weight_EK.device)
    return q_NK, torch.empty(rows, dtype=torch.float32, device=weight_EK.device)


def gate_quantise(gate_up_NG: Tensor, activation: Activation, q_NK: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    """Round activation(gate) * up of every row to 8 bits, zero-padded."""
    _launch_rows(gate_up_NG, activation, q_NK, scale_N)
    return q_NK, scale_N


def quantise_rows(x_NK: Tensor, dtype: torch.dtype, padded: int) -> tuple[Tensor, Tensor]:
    """Round rows to fp8 or int8 [N, padded], zero-padded; with their scales [N]."""
    q_NK = torch.empty(len(x_NK), padded, dtype=dtype, device=x_NK.device)
    scale_N = torch.empty(len(x_NK), dtype=torch.float32, device=x_NK.device)
    _launch_rows(x_NK, None, q_NK, scale_N)
    return q_NK, scale_N


def _launch_rows(x_NK: Tensor, activation: Activation | None, q_NK: Tensor, scale_N: Tensor) -> None:
    """Round rows, or activation(gate) * up."""
    (rows, size), padded = x_NK.shape, q_NK.shape[1]
    assert x_NK.stride(1) == 1
    assert q_NK.is_contiguous()
    block = min(MOST_IN_REGISTERS, triton.next_power_of_2(padded))
    if rows:
        _quantise_rows_kernel[(rows,)](
            *(x_NK, q_NK, scale_N, x_NK.stride(0)),
            SIZE=size if activation is None else size // 2,
            PADDED=padded,
            BLOCK=block,
            GATES=activation is not None,
            GELU=activation is Activation.GELU_TANH,
            num_warps=max(4, min(32, block // 512)),  # one program per row is limited by the work of a thread
            **largest_of(q_NK.dtype),
            **dependent_launch(x_NK.device, early=rows <= MOST_EARLY),
        )


def w8a8_decode(
    q_NK: Tensor,
    scale_N: Tensor,
    weight_EK: Tensor,
    scale_EG: Tensor,
    group: int,
    bias_E: Tensor | None,
    out_NE: Tensor,
    *,
    arrived: Tensor | None = None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """Multiply rows from `quantise_rows`; a group is all inputs or a multiple of BLOCK_K.

    `arrived` is memory for `split_sums`.
    """
    (rows, size), (outputs, groups) = q_NK.shape, scale_EG.shape
    assert all(x.is_contiguous() for x in (q_NK, weight_EK, scale_EG, out_NE))
    assert weight_EK.shape == (outputs, size)
    assert size % BLOCK_K == 0
    tiling = tiling or w8a8_tiling(rows, outputs, size)
    if rows:
        grid = tiling.grid(rows, outputs)
        _w8a8_kernel[grid](
            *(q_NK, scale_N, weight_EK, scale_EG, scale_EG if bias_E is None else bias_E),
            *(*split_memory(scale_N, arrived, grid[0] * grid[1], tiling.rows * tiling.outputs, tiling.splits), out_NE),
            rows,
            SIZE=size,
            OUTPUTS=outputs,
            GROUPS=groups,
            GROUP=group,
            BLOCK_N=tiling.rows,
            BLOCK_E=tiling.outputs,
            BLOCK_K=tiling.inputs,
            SPLITS=tiling.splits,
            STAGES=tiling.stages_of((tiling.outputs + tiling.rows) * tiling.inputs, q_NK.device),
            INT=q_NK.dtype == torch.int8,
            HAS_BIAS=bias_E is not None,
            num_warps=tiling.warps,
            **dependent_launch(q_NK.device, early=rows <= MOST_EARLY),  # a small kernel follows
        )
    return out_NE


def scale_outputs(
    product_NE: Tensor, scale_N: Tensor, scale_E1: Tensor, bias_E: Tensor | None, out_NE: Tensor
) -> Tensor:
    """Scale a product by row and output scales."""
    rows, outputs = product_NE.shape
    assert all(x.is_contiguous() for x in (product_NE, scale_E1, out_NE))
    block = min(1024, triton.next_power_of_2(outputs))
    if rows:
        _scale_outputs_kernel[(rows, triton.cdiv(outputs, block))](
            *(product_NE, scale_N, scale_E1, scale_E1 if bias_E is None else bias_E, out_NE),
            OUTPUTS=outputs,
            BLOCK=block,
            HAS_BIAS=bias_E is not None,
            num_warps=4,
            **dependent_launch(product_NE.device),
        )
    return out_NE
