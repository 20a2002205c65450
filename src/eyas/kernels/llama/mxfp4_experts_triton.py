# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of 16-bit rows with MXFP4 experts (`linear/mxfp4_weight.py`), unpacked in registers.

A 4-bit number is a sign, two bits of exponent and one of mantissa. Shifted to where bfloat16 (or float16) has its sign,
the end of its exponent and the beginning of its mantissa, it is the same number times 2^-126 (2^-14), including zero
and one half, which become subnormal; one multiplication corrects that. Sums over a plane, whose 32 weights share an
exponent, are multiplied by that power of two, so nothing is rounded that bfloat16 weights would not have rounded.

Invariant: **a row's result does not depend on the rows beside it, nor on how many there are**. Outputs are the first
dimension of a product and rows the second, of which every column is computed independently; tiles differ in how many
rows they have, and sums over the inputs have one order.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import begin_dependent
from eyas.kernels.linear.planes import PLANES
from eyas.kernels.llama.expert_outputs_triton import store_outputs


@triton.jit
def _numbers(words, like, J: tl.constexpr, ASM: tl.constexpr):
    """The numbers of bits J of words, without their power of two, in the dtype of `like`: exact."""
    if ASM is not None:
        value = tl.inline_asm_elementwise(ASM[J], "=r,r", [words], dtype=like.dtype, is_pure=True, pack=2)
    else:
        code = (words.to(tl.int32) >> (4 * J)) & 15
        size = code & 7
        twice = tl.where(size < 2, size, ((2 + (size & 1)) << (size >> 1)) >> 1)
        value = (tl.where(code < 8, twice, -twice).to(tl.float32) * 0.5).to(like.dtype)
    return value


@triton.jit
def _power(word, J: tl.constexpr):
    """The power of two of plane J, float32; exponent 0 is a subnormal number there."""
    return tl.maximum(((word >> (8 * J)) & 255) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["pairs"])
def mxfp4_kernel(
    x,
    weight,
    exponents,
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
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    LAID_OUT: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_E outputs of a block's pairs, as `_multiply_kernel` in `experts_triton.py`."""
    begin_dependent(DEPENDENT, EARLY)
    block, first = tl.program_id(0), tl.program_id(1) * BLOCK_E
    expert = tl.load(expert_of_block + block).to(tl.int64)
    if expert < 0:
        return
    lane = tl.arange(0, ROWS)
    if LAID_OUT:
        pair = tl.load(pair_of + block * ROWS + lane).to(tl.int64)
        real = pair < pairs
    else:
        pair = block.to(tl.int64) + lane
        real = lane == 0
    ALL: tl.constexpr = OUTPUTS * 2 if GATES else OUTPUTS
    PLANE: tl.constexpr = 32
    ROW: tl.constexpr = BLOCKS * PLANE
    i = first + tl.arange(0, BLOCK_E)
    row = (i if OUTPUTS % BLOCK_E == 0 else tl.minimum(i, OUTPUTS - 1)) * STEP
    w = tl.arange(0, PLANE)
    begins = weight + expert * ALL * ROW + row[:, None] * ROW + w[None, :]
    powers = exponents + expert * BLOCKS * ALL + row
    rows = x + (pair // SHARE)[None, :] * SIZE
    acc = tl.zeros((BLOCK_E, ROWS), tl.float32)
    up_acc = acc
    for b in tl.range(0, BLOCKS, num_stages=STAGES):
        words = tl.load(begins + b * PLANE, eviction_policy="evict_first")
        power = tl.load(powers + b * ALL)
        if GATES:
            up_words = tl.load(begins + UP * ROW + b * PLANE, eviction_policy="evict_first")
            up_power = tl.load(powers + UP + b * ALL)
        for j in tl.static_range(4):
            k = (b * 4 + j) * PLANE + w
            there = real[None, :]
            if ROW * 4 != SIZE:
                there = there & (k < SIZE)[:, None]
            value = tl.load(rows + k[:, None], mask=there, other=0.0)
            acc += tl.dot(_numbers(words, value, j, ASM), value) * _power(power, j)[:, None]
            if GATES:
                up_acc += tl.dot(_numbers(up_words, value, j, ASM), value) * _power(up_power, j)[:, None]
    store_outputs(
        tl.trans(acc),
        tl.trans(up_acc),
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


def unpacking(x: Tensor) -> tuple[str, ...] | None:
    """Assembly that unpacks two numbers for rows like x, for each of a word's four; None leaves that to Triton."""
    if x.device.type != "cuda" or torch.version.cuda is None:
        return None
    # Where the three lower bits go, and the factor 2^126 or 2^14.
    place, kind, scale = (6, "bf16x2", 0x7E80) if x.dtype == torch.bfloat16 else (9, "f16x2", 0x7400)
    twice, sign = 0x10001, 0x80008000
    parts = []
    for j in range(PLANES):
        left = place - 4 * j
        move = f"shl.b32 m, $1, {left}" if left >= 0 else f"shr.u32 m, $1, {-left}"
        parts.append(
            "{ .reg .b32 s, m, c, z;"
            f" shl.b32 s, $1, {12 - 4 * j}; and.b32 s, s, {sign:#x};"
            f" {move}; lop3.b32 m, m, {(7 << place) * twice:#x}, s, 0xea;"  # (m & mask) | s
            f" mov.b32 c, {scale * twice:#x}; mov.b32 z, {sign:#x}; fma.rn.{kind} $0, m, c, z; }}"
        )
    return tuple(parts)
