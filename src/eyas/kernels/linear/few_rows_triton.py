# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of a few rows on a GPU, fused with the operations before and after them.

A product of one to a few tokens takes as long as reading its weights, and a small one as long as its launch. So a
program reads some rows of the weight from end to end, nothing is summed among programs, and cheap steps are repeated by
every program instead of taking a launch of their own:

    norm_linear    x + y, its norm, and the product of that
    norm_gate_up   likewise, and activation(gate) * up of two products
    few_linear     the product alone

Invariants: all programs read x and y, so x + y goes to other memory. A row's sums do not depend on the rows beside it
or on the order in which programs run: results are reproducible.

Kernels use dependent launch (`dependent_launch_triton.py`): a program loads its first weights before the kernel ahead
of it has ended, since no kernel writes weights.

Shapes: N rows, D inputs, E outputs, I gates.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.elementwise_triton import gated, weighted

MOST_ROWS = 4
"""Up to this many rows these kernels are faster than a general product."""
MOST_SMALL_ROWS = 32
"""Up to this many rows these kernels are faster for small weights."""
FUSED_ROWS = 2
"""Up to this many rows every program repeats the norm; above, the norm is a kernel of its own."""
WHOLE_ROWS = 4
"""Up to this many rows each row count has a kernel of its own; above, rows of a small product go in eights."""
SMALL_BYTES = 8 << 20
"""Up to this many bytes of weights a product is bound by latency, not by bandwidth."""
FEW_OUTPUTS = 4224
"""Up to this many outputs, tiles of 16 give no more programs than an H200 runs at a time."""


@triton.jit
def _state(x, y, n, k, inside, SIZE: tl.constexpr, ADDS: tl.constexpr):
    """Load part of x + y [rows, k], rounded."""
    at = n[:, None] * SIZE + k[None, :]
    value = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last")
    if ADDS:
        more = tl.load(y + at, mask=inside, other=0.0, eviction_policy="evict_last")
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _scale(
    x,
    y,
    n,
    live,
    eps,
    SIZE: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute the norm's factor for each row."""
    total = tl.zeros((ROWS_PADDED,), tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        exact = _state(x, y, n, k, live[:, None] & (k < SIZE)[None, :], SIZE, ADDS).to(tl.float32)
        total += tl.sum(exact * exact, axis=1)
    return tl.rsqrt(total / SIZE + eps)


@triton.jit
def _inputs(
    x,
    y,
    norm_weight,
    scale,
    n,
    live,
    k,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    FINE: tl.constexpr,
):
    """Load the product's inputs k [rows, k]."""
    value = _state(x, y, n, k, live[:, None] & (k < SIZE)[None, :], SIZE, ADDS)
    if NORMS:
        by = tl.load(norm_weight + k, mask=k < SIZE, other=0.0, eviction_policy="evict_last")
        value = weighted(value, scale[:, None], by[None, :], FINE)
    return value


@triton.jit
def _keep(
    x,
    y,
    n,
    live,
    x_out,
    kept,
    kept_row,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
):
    """Store x + y."""
    if ADDS or KEEPS:
        for begin in tl.static_range(0, SIZE, BLOCK):
            k = begin + tl.arange(0, BLOCK)
            inside = live[:, None] & (k < SIZE)[None, :]
            value = _state(x, y, n, k, inside, SIZE, ADDS)
            if ADDS:
                tl.store(x_out + n[:, None] * SIZE + k[None, :], value, mask=inside)
            if KEEPS:
                tl.store(kept + n[:, None] * kept_row + k[None, :], value, mask=inside)


@triton.jit
def _weights(own, e, k, left, SIZE: tl.constexpr, EVEN_E: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile [e, k] of the program's own rows of the weight, of which there are `left`."""
    at = own + e[:, None] * SIZE + k[None, :]
    if EVEN_E and EVEN_K:
        tile = tl.load(at, eviction_policy="evict_first")
    elif EVEN_K:
        tile = tl.load(at, mask=(e < left)[:, None], other=0.0, eviction_policy="evict_first")
    else:
        inside = (e < left)[:, None] & (k < SIZE)[None, :]
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _accumulated(acc, value, weight, DOT: tl.constexpr):
    """Add a tile to the sums: [rows, e] with a dot, or elementwise products [rows, e, k] that are summed later."""
    if DOT:
        more = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
    else:
        more = acc + value.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    return more


@triton.jit
def _finished(acc, bias, e, left, HAS_BIAS: tl.constexpr, DOT: tl.constexpr):
    """Sum [rows, e] and add the bias."""
    if not DOT:
        acc = tl.sum(acc, axis=2)
    if HAS_BIAS:
        acc += tl.load(bias + e, mask=e < left, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    y,
    norm_weight,
    weight,
    bias,
    x_out,
    kept,
    output,
    kept_row,
    rows,
    eps,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    FINE: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Outputs BLOCK_E of ROWS_PADDED rows. With GATES, of rows OUTPUTS of the weight and the OUTPUTS after them.

    ROWS is the number of rows; 0 takes it from `rows`, so that one program serves all row counts.
    """
    program = tl.program_id(0)
    EVEN_E: tl.constexpr = OUTPUTS % BLOCK_E == 0
    EVEN_K: tl.constexpr = SIZE % BLOCK_K == 0
    e = tl.arange(0, BLOCK_E)
    n = tl.program_id(1) * ROWS_PADDED + tl.arange(0, ROWS_PADDED)
    live = n < (ROWS if ROWS else rows)
    k = tl.arange(0, BLOCK_K)
    left = OUTPUTS - program * BLOCK_E
    own = weight + program.to(tl.int64) * BLOCK_E * SIZE
    own_up = own + tl.full((), OUTPUTS, tl.int64) * SIZE
    if SIZE <= BLOCK_K:  # a program's whole weights, before it waits
        tile = _weights(own, e, k, left, SIZE, EVEN_E, EVEN_K)
        if GATES:
            up_tile = _weights(own_up, e, k, left, SIZE, EVEN_E, EVEN_K)
    begin_dependent(DEPENDENT, EARLY)

    scale = tl.full((ROWS_PADDED,), 1.0, tl.float32)
    if NORMS:
        scale = _scale(x, y, n, live, eps, SIZE, ROWS_PADDED, BLOCK_X, ADDS)
    if program == 0:
        _keep(x, y, n, live, x_out, kept, kept_row, SIZE, BLOCK_X, ADDS, KEEPS)

    acc = tl.zeros((ROWS_PADDED, BLOCK_E) if DOT else (ROWS_PADDED, BLOCK_E, BLOCK_K), tl.float32)
    up_acc = acc
    if SIZE <= BLOCK_K:
        value = _inputs(x, y, norm_weight, scale, n, live, k, SIZE, ADDS, NORMS, FINE)
        acc = _accumulated(acc, value, tile, DOT)
        if GATES:
            up_acc = _accumulated(up_acc, value, up_tile, DOT)
    else:
        for begin in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
            at = begin + k
            tile = _weights(own, e, at, left, SIZE, EVEN_E, EVEN_K)
            value = _inputs(x, y, norm_weight, scale, n, live, at, SIZE, ADDS, NORMS, FINE)
            acc = _accumulated(acc, value, tile, DOT)
            if GATES:
                up_tile = _weights(own_up, e, at, left, SIZE, EVEN_E, EVEN_K)
                up_acc = _accumulated(up_acc, value, up_tile, DOT)

    first = program * BLOCK_E
    result = _finished(acc, bias + first, e, left, HAS_BIAS, DOT).to(output.dtype.element_ty)
    if GATES:
        up = _finished(up_acc, bias + OUTPUTS + first, e, left, HAS_BIAS, DOT).to(output.dtype.element_ty)
        result = gated(result, up, GELU)
    at = n[:, None].to(tl.int64) * OUTPUTS + first + e[None, :]
    tl.store(output + at, result, mask=live[:, None] & (e < left)[None, :])


@dataclass(frozen=True)
class Tiling:
    """A product's tile: outputs per program, inputs per step, and launch parameters."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    """Pipeline stages; 1 leaves hiding latency to other programs."""
    dot: bool = False
    """Whether tensor cores are used, or elementwise products."""
    rows: int = 16
    """Rows per program at most; programs of other rows read the same weights."""


def norm_linear(
    x_ND: Tensor,
    more_ND: Tensor | None,
    norm: FusedNorm | None,
    weight_ED: Tensor,
    bias_E: Tensor | None = None,
    *,
    x_out_ND: Tensor | None = None,
    kept_ND: Tensor | None = None,
    out_NE: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The product [N, E] of the norm of x + more.

    If `more` is given, x + more goes to `x_out_ND`, which is not x; `kept_ND`, whose rows may be strided, gets a copy
    of x + more, or of x.
    """
    if out_NE is None:
        out_NE = x_ND.new_empty(len(x_ND), len(weight_ED))
    _launch(x_ND, more_ND, norm, weight_ED, bias_E, x_out_ND, kept_ND, out_NE, None, tiling)
    return out_NE


def norm_gate_up(
    x_ND: Tensor,
    more_ND: Tensor | None,
    norm: FusedNorm | None,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    activation: Activation,
    *,
    x_out_ND: Tensor | None = None,
    kept_ND: Tensor | None = None,
    out_NI: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """activation(gate) * up [N, I] of the norm of x + more; gates are the first half of the weight's rows."""
    if out_NI is None:
        out_NI = x_ND.new_empty(len(x_ND), len(weight_ED) // 2)
    _launch(x_ND, more_ND, norm, weight_ED, bias_E, x_out_ND, kept_ND, out_NI, activation, tiling)
    return out_NI


def few_linear(
    x_ND: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None = None,
    *,
    out_NE: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The product [N, E]."""
    return norm_linear(*(x_ND, None, None, weight_ED, bias_E), out_NE=out_NE, tiling=tiling)


def _launch(
    x_ND: Tensor,
    more_ND: Tensor | None,
    norm: FusedNorm | None,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    x_out_ND: Tensor | None,
    kept_ND: Tensor | None,
    out_NE: Tensor,
    activation: Activation | None,
    tiling: Tiling | None,
) -> None:
    rows, size = x_ND.shape
    outputs = out_NE.shape[1]
    assert all(x.is_contiguous() for x in (x_ND, weight_ED, out_NE))
    assert weight_ED.shape == (outputs * (1 if activation is None else 2), size)
    assert more_ND is None or (more_ND.is_contiguous() and norm is not None and x_out_ND is not None)
    assert x_out_ND is None or x_out_ND.data_ptr() != x_ND.data_ptr()
    assert kept_ND is None or kept_ND.stride(1) == 1
    small = is_small(weight_ED)
    if tiling is None:
        tiling = tiling_for(rows, size, outputs, small=small, norms=norm is not None, gates=activation is not None)
    padded = min(triton.next_power_of_2(rows), tiling.rows)
    _few_rows_kernel[(triton.cdiv(outputs, tiling.outputs), triton.cdiv(rows, padded))](
        *(x_ND, x_ND if more_ND is None else more_ND, x_ND if norm is None else norm.weight, weight_ED),
        *(weight_ED if bias_E is None else bias_E, x_ND if x_out_ND is None else x_out_ND),
        *(x_ND if kept_ND is None else kept_ND, out_NE, 0 if kept_ND is None else kept_ND.stride(0)),
        *(rows, 0.0 if norm is None else norm.eps),
        ROWS=rows if rows <= WHOLE_ROWS else 0,
        SIZE=size,
        OUTPUTS=outputs,
        ROWS_PADDED=padded,
        BLOCK_E=tiling.outputs,
        BLOCK_K=tiling.inputs,
        BLOCK_X=min(triton.next_power_of_2(size), max(512, 64 * 32 * tiling.warps // padded)),
        STAGES=tiling.stages,
        DOT=tiling.dot,
        ADDS=more_ND is not None,
        NORMS=norm is not None,
        FINE=norm is not None and norm.weight.dtype != x_ND.dtype,
        KEEPS=kept_ND is not None,
        HAS_BIAS=bias_E is not None,
        GATES=activation is not None,
        GELU=activation is Activation.GELU_TANH,
        num_warps=tiling.warps,
        **dependent_launch(x_ND.device, early=small),
    )


def fuses_norm(rows: int, size: int) -> bool:
    """Whether every program may repeat the norm of the rows; above that a separate kernel is faster."""
    return rows <= FUSED_ROWS and rows * size <= 4096


def is_small(weight_ED: Tensor) -> bool:
    """Whether a product of few rows is bound by latency."""
    return weight_ED.numel() * weight_ED.element_size() <= SMALL_BYTES


def most_rows(weight_ED: Tensor) -> int:
    """Rows up to which `few_linear` is faster than a general product, as measured on an H200 at the sizes of
    `tiling_for`.

    None if the weight is large and its rows are short, as in the head of a small model. Large weights with few outputs
    are better split along their inputs by a general product, despite the launch that sums the parts.
    """
    outputs, size = weight_ED.shape
    if is_small(weight_ED):
        return MOST_SMALL_ROWS
    if size < 2048:
        return 0
    return 16 if outputs <= FEW_OUTPUTS else 8 if outputs <= 2 * FEW_OUTPUTS else MOST_ROWS


def most_rows_of_all(weights: Iterable[Tensor]) -> int:
    """Rows up to which these kernels are faster for a pass through all of these weights."""
    return MOST_SMALL_ROWS if all(is_small(weight_ED) for weight_ED in weights) else MOST_ROWS


def tiling_for(rows: int, size: int, outputs: int, *, small: bool, norms: bool, gates: bool) -> Tiling:
    """The fastest tiling on an H200 over the shapes of models with 135M and 8B weights.

    A small product gets enough programs to have all its weights loading at once, each with whole rows. A large one gets
    enough loads in flight to saturate memory, and about as many programs as run at a time.
    """
    whole = triton.next_power_of_2(size)
    if small and rows > WHOLE_ROWS:
        # Rows in eights, whose sums are short enough for many programs at once; weights are read again from the cache.
        inputs = min(64 if gates else 128, max(16, whole))
        return Tiling(outputs=32 if gates and rows > 8 else 16, inputs=inputs, warps=4, stages=5, dot=True, rows=8)
    if small and size <= 2048:
        if gates and rows > 1:
            return Tiling(outputs=16, inputs=min(256, max(16, whole)), warps=4, stages=3, dot=True)
        if norms and rows > 2:
            return Tiling(outputs=16, inputs=max(16, whole), warps=8, dot=True)
        return Tiling(outputs=4 if rows <= 2 or whole <= 1024 else 2, inputs=whole, warps=4)
    inputs = min(256, max(16, whole))
    if gates:
        if rows == 1:
            return Tiling(outputs=8, inputs=min(1024, whole), warps=4, stages=3)
        return Tiling(outputs=16, inputs=inputs, warps=2, stages=5, dot=True)
    if outputs < 1536:
        return Tiling(outputs=4, inputs=min(1024, whole), warps=4, stages=4)
    if outputs <= FEW_OUTPUTS:
        return Tiling(outputs=16, inputs=inputs, warps=2, stages=5, dot=True)
    return Tiling(outputs=32, inputs=inputs, warps=4, stages=4, dot=True)
