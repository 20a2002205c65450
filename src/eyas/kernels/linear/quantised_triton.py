# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products with weights of 8 and 4 bits on a GPU.

    quantise_rows      rows to fp8 or int8, each by its own scale
    gate_quantise      the same of what gates let through
    w8a8_decode        their product with weights of the same type
    scale_outputs      row and output scales behind a product that knows none (`torch._scaled_mm`)
    w4a16_decode       the product of 16-bit rows with 4-bit weights, which become 16-bit numbers in registers
    w4a16_dequantise   the weights alone, for a general product of many rows

Invariant of the two that decode: **a row's result does not depend on the rows beside it, nor on how many there are**.
A program has whole inputs and nothing is summed among programs. Tiles differ in how many outputs and rows they have,
never in BLOCK_K or in the order of sums, and none is so large that another instruction would be chosen: a tile has
less than 64 outputs, or less than four warps, so that all of them are chains of mma.sync along the inputs.

4-bit weights are packed so that unpacking moves nothing. Inputs are cut into blocks of 8 planes; word w of a block has
in its four bits j the input j * PLANE + w of it. So the same bits of neighbouring words are neighbouring inputs: a
shift, a mask and an exponent make 128 + q (1024 + q in float16) of them, and the zero point with as much on top is
taken away.

Rows and outputs beyond the last are not masked but are the last once more; inputs are padded in memory.

Shapes: N rows, K inputs, E outputs, G groups of inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation
from eyas.kernels.elementwise_triton import gated
from eyas.kernels.linear.quantised_weight import FLOAT8, FLOAT8_LARGEST, INT8_LARGEST

BLOCK_K = 128
"""Inputs of one step of an 8-bit product; weights are padded to a multiple of it."""
FEW_OUTPUTS = 4224
"""Outputs up to which 16 at a time make no more programs than an H200 holds at a time."""


@triton.jit
def rounded(value, most, LARGEST: tl.constexpr, INT: tl.constexpr):
    """Numbers of a row whose largest is `most`, as they are in 8 bits; the scale is `most` / LARGEST."""
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
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row: its largest number becomes LARGEST."""
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        at = begin + k
        most = tl.maximum(most, tl.abs(tl.load(x + n * row + at, mask=at < SIZE, other=0.0).to(tl.float32)))
    largest = tl.maximum(tl.max(most, axis=0), 1e-12)
    tl.store(scale + n, largest / LARGEST)
    for begin in tl.static_range(0, PADDED, BLOCK):
        at = begin + k
        value = rounded(tl.load(x + n * row + at, mask=at < SIZE, other=0.0), largest, LARGEST, INT)
        tl.store(q + n * PADDED + at, value.to(q.dtype.element_ty), mask=at < PADDED)


@triton.jit
def _gate_quantise_kernel(
    gate_up,
    q,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INT: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row: what its gates let through, as `_quantise_rows_kernel` has it. It is computed twice instead of kept."""
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        inside = begin + k < SIZE
        gate = tl.load(gate_up + n * 2 * SIZE + begin + k, mask=inside, other=0.0)
        up = tl.load(gate_up + n * 2 * SIZE + SIZE + begin + k, mask=inside, other=0.0)
        most = tl.maximum(most, tl.abs(gated(gate, up, GELU).to(tl.float32)))
    largest = tl.maximum(tl.max(most, axis=0), 1e-12)
    tl.store(scale + n, largest / LARGEST)
    for begin in tl.static_range(0, PADDED, BLOCK):
        inside = begin + k < SIZE
        gate = tl.load(gate_up + n * 2 * SIZE + begin + k, mask=inside, other=0.0)
        up = tl.load(gate_up + n * 2 * SIZE + SIZE + begin + k, mask=inside, other=0.0)
        value = rounded(gated(gate, up, GELU), largest, LARGEST, INT)
        tl.store(q + n * PADDED + begin + k, value.to(q.dtype.element_ty), mask=begin + k < PADDED)


@triton.jit
def _w8a8_kernel(
    q,
    row_scale,
    weight,
    scale,
    bias,
    output,
    rows,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    INT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs of some rows. With one group its scale comes last; with several, behind each step."""
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    out = tl.minimum(e, OUTPUTS - 1).to(tl.int64)
    weights = weight + out[:, None] * SIZE + k[None, :]
    inputs = q + row[None, :] * SIZE + k[:, None]
    acc = tl.zeros((BLOCK_E, BLOCK_N), tl.int32 if INT and GROUPS == 1 else tl.float32)
    for begin in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        tile = tl.load(weights + begin, eviction_policy="evict_first")
        value = tl.load(inputs + begin, eviction_policy="evict_last")
        if GROUPS == 1:
            acc += tl.dot(tile, value)
        else:
            by = tl.load(scale + out * GROUPS + begin // GROUP)
            acc += tl.dot(tile, value).to(tl.float32) * by[:, None]
    result = acc.to(tl.float32)
    if GROUPS == 1:
        result *= tl.load(scale + out)[:, None]
    result *= tl.load(row_scale + row)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + out).to(tl.float32)[:, None]
    at = n[None, :].to(tl.int64) * OUTPUTS + e[:, None]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=(n < rows)[None, :] & (e < OUTPUTS)[:, None])


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
    """Some outputs of a row."""
    begin_dependent(DEPENDENT, EARLY)
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < OUTPUTS
    value = tl.load(product + n * OUTPUTS + e, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + e, mask=inside, other=0.0) * tl.load(row_scale + n)
    if HAS_BIAS:
        value += tl.load(bias + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + n * OUTPUTS + e, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _nibbles(words, J: tl.constexpr, BFLOAT16: tl.constexpr):
    """128 + the four bits J of every word in bfloat16, 1024 + those in float16: exact, and without a conversion."""
    bits = (words >> (4 * J)) & 15
    if BFLOAT16:
        value = (bits | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return value


@triton.jit
def _w4a16_kernel(
    x,
    weight,
    scale,
    zero,
    bias,
    output,
    rows,
    x_row,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    BFLOAT16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs of some rows."""
    begin_dependent(DEPENDENT, EARLY)
    DTYPE: tl.constexpr = x.dtype.element_ty
    OFFSET: tl.constexpr = 128 if BFLOAT16 else 1024
    IN_BLOCK: tl.constexpr = 1 if GROUP >= 8 * PLANE else 8 * PLANE // GROUP  # groups of a block
    EVEN: tl.constexpr = BLOCKS * 8 * PLANE == SIZE
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    w = tl.arange(0, PLANE)
    row = tl.minimum(n, rows - 1).to(tl.int64)
    out = tl.minimum(e, OUTPUTS - 1).to(tl.int64)
    inputs = x + row[None, :] * x_row + w[:, None]
    acc = tl.zeros((BLOCK_E, BLOCK_N), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        words = tl.load(
            weight + out[:, None] * (BLOCKS * PLANE) + (block * PLANE + w)[None, :], eviction_policy="evict_first"
        )
        for g in tl.static_range(IN_BLOCK):
            group = block * IN_BLOCK + g if IN_BLOCK > 1 else block * (8 * PLANE) // GROUP
            by = tl.load(scale + out * GROUPS + group).to(tl.float32)
            origin = (tl.load(zero + out * GROUPS + group).to(tl.float32) + OFFSET).to(DTYPE)
            part = tl.zeros((BLOCK_E, BLOCK_N), tl.float32)
            for p in tl.static_range(8 // IN_BLOCK):
                at = block * (8 * PLANE) + (g * (8 // IN_BLOCK) + p) * PLANE
                if EVEN:
                    value = tl.load(inputs + at, eviction_policy="evict_last")
                else:
                    value = tl.load(inputs + at, mask=(at + w < SIZE)[:, None], other=0.0)
                tile = _nibbles(words, g * (8 // IN_BLOCK) + p, BFLOAT16) - origin[:, None]
                part = tl.dot(tile, value, part)
            acc += part * by[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + out).to(tl.float32)[:, None]
    at = n[None, :].to(tl.int64) * OUTPUTS + e[:, None]
    tl.store(output + at, acc.to(DTYPE), mask=(n < rows)[None, :] & (e < OUTPUTS)[:, None])


@triton.jit
def _w4a16_dequantise_kernel(
    weight,
    scale,
    zero,
    output,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One block of one output's weights."""
    begin_dependent(DEPENDENT, EARLY)
    e, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = tl.arange(0, PLANE)
    words = tl.load(weight + e * (BLOCKS * PLANE) + block * PLANE + w)
    for j in tl.static_range(8):
        k = block * (8 * PLANE) + j * PLANE
        group = e * GROUPS + k // GROUP
        value = ((words >> (4 * j)) & 15).to(tl.float32) - tl.load(zero + group).to(tl.float32)
        value = value * tl.load(scale + group).to(tl.float32)
        tl.store(output + e * SIZE + k + w, value.to(output.dtype.element_ty), mask=k + w < SIZE)


@dataclass(frozen=True)
class DecodeTiling:
    """How a product is cut among programs, and what runs one."""

    outputs: int
    rows: int
    warps: int
    stages: int


def decode_tiling(rows: int, outputs: int) -> DecodeTiling:
    """How to cut a product. All of these give the same numbers: fewer than 64 outputs, or fewer than four warps."""
    if rows <= 16:
        padded = 8 if rows <= 8 else 16
        if outputs <= FEW_OUTPUTS:
            return DecodeTiling(outputs=16, rows=padded, warps=2, stages=6)
        return DecodeTiling(outputs=32, rows=padded, warps=4, stages=5)
    if rows <= 32:
        return DecodeTiling(outputs=32, rows=32, warps=4, stages=4)
    return DecodeTiling(outputs=64 if outputs > FEW_OUTPUTS else 32, rows=64, warps=2, stages=3)


def largest_of(dtype: torch.dtype) -> dict[str, Any]:
    """What kernels that round rows to a type are told about it."""
    return {"LARGEST": FLOAT8_LARGEST if dtype == FLOAT8 else INT8_LARGEST, "INT": dtype != FLOAT8}


def rows_for(rows: int, weight_EK: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for rows [N, K] that are to be multiplied by a weight, and for their scales [N]."""
    q_NK = torch.empty(rows, weight_EK.shape[1], dtype=weight_EK.dtype, device=weight_EK.device)
    return q_NK, torch.empty(rows, dtype=torch.float32, device=weight_EK.device)


def gate_quantise(gate_up_NG: Tensor, activation: Activation, q_NK: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    """What the first half of every row lets through of the second, in 8 bits, zeros behind its end."""
    rows, gates = gate_up_NG.shape
    padded = q_NK.shape[1]
    assert gate_up_NG.is_contiguous()
    if rows:
        _gate_quantise_kernel[(rows,)](
            *(gate_up_NG, q_NK, scale_N),
            SIZE=gates // 2,
            PADDED=padded,
            BLOCK=min(4096, triton.next_power_of_2(padded)),
            GELU=activation is Activation.GELU_TANH,
            num_warps=8 if padded > 2048 else 4,
            **largest_of(q_NK.dtype),
            **dependent_launch(gate_up_NG.device),
        )
    return q_NK, scale_N


def quantise_rows(x_NK: Tensor, dtype: torch.dtype, padded: int) -> tuple[Tensor, Tensor]:
    """Rows as fp8 or int8 [N, padded], zeros behind their end, and their scales [N]."""
    rows, size = x_NK.shape
    assert x_NK.stride(1) == 1
    q_NK = torch.empty(rows, padded, dtype=dtype, device=x_NK.device)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x_NK.device)
    if rows:
        _quantise_rows_kernel[(rows,)](
            *(x_NK, q_NK, scale_N, x_NK.stride(0)),
            SIZE=size,
            PADDED=padded,
            BLOCK=min(4096, triton.next_power_of_2(padded)),
            num_warps=8 if padded > 2048 else 4,
            **largest_of(dtype),
            **dependent_launch(x_NK.device),
        )
    return q_NK, scale_N


def w8a8_decode(
    q_NK: Tensor,
    scale_N: Tensor,
    weight_EK: Tensor,
    scale_EG: Tensor,
    group: int,
    bias_E: Tensor | None,
    out_NE: Tensor,
    *,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """The product of rows as `quantise_rows` gives them; a group is all inputs or a multiple of BLOCK_K."""
    (rows, size), outputs = q_NK.shape, len(weight_EK)
    assert all(x.is_contiguous() for x in (q_NK, weight_EK, scale_EG, out_NE))
    assert weight_EK.shape[1] == size
    assert size % BLOCK_K == 0
    tiling = tiling or decode_tiling(rows, outputs)
    if rows:
        _w8a8_kernel[(triton.cdiv(rows, tiling.rows), triton.cdiv(outputs, tiling.outputs))](
            *(q_NK, scale_N, weight_EK, scale_EG, scale_EG if bias_E is None else bias_E, out_NE, rows),
            SIZE=size,
            OUTPUTS=outputs,
            GROUPS=scale_EG.shape[1],
            GROUP=group,
            BLOCK_N=tiling.rows,
            BLOCK_E=tiling.outputs,
            BLOCK_K=BLOCK_K,
            STAGES=tiling.stages,
            INT=q_NK.dtype == torch.int8,
            HAS_BIAS=bias_E is not None,
            num_warps=tiling.warps,
            **dependent_launch(q_NK.device),
        )
    return out_NE


def scale_outputs(
    product_NE: Tensor, scale_N: Tensor, scale_E1: Tensor, bias_E: Tensor | None, out_NE: Tensor
) -> Tensor:
    """A product times the scales of rows and outputs."""
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


def w4a16_decode(
    x_NK: Tensor,
    words_EW: Tensor,
    scale_EG: Tensor,
    zero_EG: Tensor,
    group: int,
    plane: int,
    bias_E: Tensor | None,
    out_NE: Tensor,
    *,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """The product of 16-bit rows with packed weights."""
    (rows, size), outputs = x_NK.shape, len(words_EW)
    assert x_NK.stride(1) == 1
    assert x_NK.dtype in (torch.bfloat16, torch.float16)
    assert all(x.is_contiguous() for x in (words_EW, scale_EG, zero_EG, out_NE))
    tiling = tiling or decode_tiling(rows, outputs)
    if rows:
        _w4a16_kernel[(triton.cdiv(rows, tiling.rows), triton.cdiv(outputs, tiling.outputs))](
            *(x_NK, words_EW, scale_EG, zero_EG, scale_EG if bias_E is None else bias_E, out_NE),
            *(rows, x_NK.stride(0)),
            SIZE=size,
            OUTPUTS=outputs,
            BLOCKS=words_EW.shape[1] // plane,
            GROUPS=scale_EG.shape[1],
            GROUP=group,
            PLANE=plane,
            BLOCK_N=tiling.rows,
            BLOCK_E=tiling.outputs,
            STAGES=min(tiling.stages, 4),
            BFLOAT16=x_NK.dtype == torch.bfloat16,
            HAS_BIAS=bias_E is not None,
            num_warps=tiling.warps,
            **dependent_launch(x_NK.device),
        )
    return out_NE


def w4a16_dequantise(
    words_EW: Tensor, scale_EG: Tensor, zero_EG: Tensor, group: int, plane: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    """The weights [E, K] of a type."""
    weight_EK = torch.empty(len(words_EW), inputs, dtype=dtype, device=words_EW.device)
    blocks = words_EW.shape[1] // plane
    _w4a16_dequantise_kernel[(len(words_EW), blocks)](
        *(words_EW, scale_EG, zero_EG, weight_EK),
        SIZE=inputs,
        BLOCKS=blocks,
        GROUPS=scale_EG.shape[1],
        GROUP=group,
        PLANE=plane,
        num_warps=1,
        **dependent_launch(words_EW.device),
    )
    return weight_EK
