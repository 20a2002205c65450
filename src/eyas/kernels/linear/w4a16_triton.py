# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of 16-bit rows with 4-bit weights on a GPU.

    w4a16_decode       unpacks weights to 16 bits in registers while multiplying
    w4a16_dequantise   dequantises the weights alone, for a general product of many rows

Invariant of the product: **a row's result does not depend on the rows beside it, nor on how many there are**. Tiles
differ in how many rows they have, never in the order of sums: how inputs are split depends on the weight alone.

Weights are packed so that unpacking moves nothing and yields two at a time. Inputs are cut into blocks of 4 planes;
bits 4j to 4j + 3 of word w of a block (16 bits) hold its input j * PLANE + w. So the same bits of two neighbouring
words, which share a register, are neighbouring inputs: a shift, and a mask with an exponent, turn them into 128 + q
(1024 + q in float16), and one more operation subtracts the zero point, which has the same offset. That takes inline
assembly: plain Triton unpacks every weight separately. Weights less their zero points are exact; sums over a plane are
scaled.

A group's scale and zero point are one word of 32 bits [G, E]: below the scale, in a 16-bit dtype of its own, and above
-(zero + 128), in the dtype of rows. A plane lies within one group.

Shapes: N rows, K inputs, E outputs, G groups of inputs, W words of four weights.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import MOST_EARLY, begin_dependent, dependent_launch
from eyas.kernels.linear.decode_tiling import OUTPUTS, DecodeTiling, splits_for
from eyas.kernels.linear.planes import PLANES
from eyas.kernels.linear.split_sums_triton import split_memory, split_sums

FEWEST_PROGRAMS = 256
DEQUANTISED_OUTPUTS = 32
"""Per program: with one each, launching programs would take longer than running them."""


@triton.jit
def _unpacked(words, word, J: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bits J of every word less the zero point of `word`, its group's scale word: exact."""
    origin = (word >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    if ASM is not None:
        value = tl.inline_asm_elementwise(ASM[J], "=r,r,r", [words, origin], dtype=origin.dtype, is_pure=True, pack=2)
    else:
        offset = 128 if origin.dtype == tl.bfloat16 else 1024
        value = (((words >> (4 * J)) & 15).to(tl.float32) + offset + origin.to(tl.float32)).to(DTYPE)
    return value


@triton.jit
def _scale_of(word, BFLOAT16: tl.constexpr):
    """Unpack a group's scale, float32."""
    low = (word & 0xFFFF).to(tl.uint16)
    return low.to(tl.bfloat16 if BFLOAT16 else tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _w4a16_kernel(
    x,
    weight,
    scales,
    bias,
    partial,
    arrived,
    output,
    rows,
    x_row,
    scales_row,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BFLOAT16: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply a tile of rows and outputs, over one of SPLITS parts of the blocks."""
    begin_dependent(DEPENDENT, EARLY)
    DTYPE: tl.constexpr = x.dtype.element_ty
    PART: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    out = e if OUTPUTS % BLOCK_E == 0 else tl.minimum(e, OUTPUTS - 1)
    w = tl.arange(0, PLANE)
    weights = weight + out.to(tl.int64)[:, None] * (BLOCKS * PLANE)
    inputs = x + n[None, :].to(tl.int64) * x_row
    first = tl.program_id(2) * PART
    acc = tl.zeros((BLOCK_E, BLOCK_N), tl.float32)
    for block in tl.range(first, tl.minimum(first + PART, BLOCKS), num_stages=STAGES):
        words = tl.load(weights + (block * PLANE + w)[None, :], eviction_policy="evict_first")
        for j in tl.static_range(4):
            begin = (block * 4 + j) * PLANE
            word = tl.load(scales + begin // GROUP * scales_row + out)
            tile = _unpacked(words, word[:, None], j, DTYPE, ASM)
            k = begin + w
            inside = (n < rows)[None, :]
            if BLOCKS * 4 * PLANE != SIZE:
                inside = inside & (k < SIZE)[:, None]
            part = tl.dot(tile, tl.load(inputs + k[:, None], mask=inside, other=0.0))
            acc += part * _scale_of(word, BFLOAT16)[:, None]
    if SPLITS == 1:
        _w4a16_store(acc, n, e, out, bias, output, rows, OUTPUTS, HAS_BIAS)
    else:
        acc, last = split_sums(acc, (n < rows)[None, :] & (e < OUTPUTS)[:, None], partial, arrived, SPLITS)
        if last:
            _w4a16_store(acc, n, e, out, bias, output, rows, OUTPUTS, HAS_BIAS)


@triton.jit
def _w4a16_store(acc, n, e, out, bias, output, rows, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store sums [e, n], with the bias."""
    if HAS_BIAS:
        acc += tl.load(bias + out).to(tl.float32)[:, None]
    at = n[None, :].to(tl.int64) * OUTPUTS + e[:, None]
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=(n < rows)[None, :] & (e < OUTPUTS)[:, None])


@triton.jit
def _w4a16_dequantise_kernel(
    weight,
    scales,
    output,
    outputs,
    scales_row,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BFLOAT16: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Dequantise one block of some outputs."""
    begin_dependent(DEPENDENT, EARLY)
    DTYPE: tl.constexpr = output.dtype.element_ty
    e, block = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(1)
    exists = e < outputs
    w = tl.arange(0, PLANE)
    row = e.to(tl.int64)[:, None]
    words = tl.load(weight + row * (BLOCKS * PLANE) + (block * PLANE + w)[None, :], mask=exists[:, None], other=0)
    for j in tl.static_range(4):
        k = (block * 4 + j) * PLANE
        word = tl.load(scales + k // GROUP * scales_row + e, mask=exists, other=0)
        value = _unpacked(words, word[:, None], j, DTYPE, ASM).to(tl.float32) * _scale_of(word, BFLOAT16)[:, None]
        tl.store(
            output + row * SIZE + (k + w)[None, :], value.to(DTYPE), mask=exists[:, None] & (k + w < SIZE)[None, :]
        )


def w4a16_tiling(rows: int, outputs: int, inputs: int) -> DecodeTiling:
    """The tiling of a product; only the tile's rows depend on the number of rows, and they change no result.

    With fewer outputs, or more warps, Triton loads a group's scales many times over.
    """
    tile = 8 if rows <= 8 else 16 if rows <= 16 else 32
    splits = splits_for(outputs, inputs, FEWEST_PROGRAMS)
    return DecodeTiling(outputs=OUTPUTS, inputs=256, rows=tile, warps=2, stages=4, splits=splits)


def w4a16_decode(
    x_NK: Tensor,
    words_EW: Tensor,
    scales_GE: Tensor,
    scale_dtype: torch.dtype,
    group: int,
    plane: int,
    bias_E: Tensor | None,
    out_NE: Tensor,
    *,
    arrived: Tensor | None = None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """Multiply 16-bit rows by packed weights; `arrived` is memory for `split_sums`."""
    (rows, size), outputs = x_NK.shape, len(words_EW)
    assert x_NK.stride(1) == scales_GE.stride(1) == 1
    assert x_NK.dtype in (torch.bfloat16, torch.float16)
    assert words_EW.is_contiguous()
    assert out_NE.is_contiguous()
    tiling = tiling or w4a16_tiling(rows, outputs, size)
    if rows:
        grid, blocks = tiling.grid(rows, outputs), words_EW.shape[1] // plane
        step_bytes = plane * (2 * tiling.outputs + 2 * PLANES * tiling.rows) + 4 * PLANES * tiling.outputs
        _w4a16_kernel[grid](
            *(x_NK, words_EW, scales_GE, words_EW if bias_E is None else bias_E),
            *split_memory(x_NK, arrived, grid[0] * grid[1], tiling.rows * tiling.outputs, tiling.splits),
            *(out_NE, rows, x_NK.stride(0), scales_GE.stride(0)),
            SIZE=size,
            OUTPUTS=outputs,
            BLOCKS=blocks,
            GROUP=group,
            PLANE=plane,
            BLOCK_N=tiling.rows,
            BLOCK_E=tiling.outputs,
            SPLITS=tiling.splits,
            STAGES=tiling.stages_of(step_bytes, x_NK.device),
            BFLOAT16=scale_dtype == torch.bfloat16,
            HAS_BIAS=bias_E is not None,
            ASM=_assembly(x_NK),
            num_warps=tiling.warps,
            **dependent_launch(x_NK.device, early=rows <= MOST_EARLY),  # a small kernel follows
        )
    return out_NE


def _assembly(x_NK: Tensor) -> tuple[str, ...] | None:
    """Assembly that unpacks two weights, for each of a word's four; None leaves that to Triton."""
    if x_NK.device.type != "cuda" or torch.version.cuda is None:
        return None
    kind, exponent, one = ("bf16x2", 0x4300, 0x3F80) if x_NK.dtype == torch.bfloat16 else ("f16x2", 0x6400, 0x3C00)
    twice = 0x10001
    return tuple(
        "{ .reg .b32 q, one;"
        f" shr.u32 q, $1, {4 * j};"
        f" lop3.b32 q, q, {15 * twice:#x}, {exponent * twice:#x}, 0xea;"  # (q & 15) | exponent
        f" mov.b32 one, {one * twice:#x}; fma.rn.{kind} $0, q, one, $2; }}"  # an addition
        for j in range(PLANES)
    )


def w4a16_dequantise(
    words_EW: Tensor,
    scales_GE: Tensor,
    scale_dtype: torch.dtype,
    group: int,
    plane: int,
    inputs: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantise the weights [E, K] to the dtype of rows."""
    weight_EK = torch.empty(len(words_EW), inputs, dtype=dtype, device=words_EW.device)
    blocks = words_EW.shape[1] // plane
    assert scales_GE.stride(1) == 1
    _w4a16_dequantise_kernel[(triton.cdiv(len(words_EW), DEQUANTISED_OUTPUTS), blocks)](
        *(words_EW, scales_GE, weight_EK, len(words_EW), scales_GE.stride(0)),
        SIZE=inputs,
        BLOCKS=blocks,
        GROUP=group,
        PLANE=plane,
        BLOCK_E=DEQUANTISED_OUTPUTS,
        BFLOAT16=scale_dtype == torch.bfloat16,
        ASM=_assembly(weight_EK),
        num_warps=4,
        **dependent_launch(words_EW.device),
    )
    return weight_EK
