# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The end of every expert product: biases, gates and stores, rounded where torch rounds."""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from eyas.kernels.elementwise_triton import gated


@triton.jit
def _clamped(gate, up, alpha, limit):
    """gate * sigmoid(alpha * gate) * (up + 1) within limits, rounded at every step."""
    gate = tl.minimum(gate.to(tl.float32), limit).to(gate.dtype)
    up = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit).to(up.dtype)
    bent = (gate.to(tl.float32) * alpha).to(gate.dtype).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-bent))).to(gate.dtype).to(tl.float32)
    opened = (gate.to(tl.float32) * opened).to(gate.dtype).to(tl.float32)
    return ((up.to(tl.float32) + 1.0).to(gate.dtype).to(tl.float32) * opened).to(gate.dtype)


@triton.jit
def _rounded(acc, bias, inside, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Round the sums [rows, outputs], add the bias and round again."""
    made = acc.to(dtype)
    if HAS_BIAS:
        more = tl.load(bias, mask=inside, other=0.0).to(tl.float32)
        made = (made.to(tl.float32) + more[None, :]).to(dtype)
    return made


@triton.jit
def store_outputs(
    acc,
    up_acc,
    bias,
    output,
    pair,
    i,
    real,
    alpha,
    limit,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store sums [rows, outputs] of pairs and outputs i; with GATES they gate `up_acc`. `bias` points to the expert's
    bias.
    """
    dtype: tl.constexpr = output.dtype.element_ty
    inside = i < OUTPUTS
    result = _rounded(acc, bias + i * STEP, inside, HAS_BIAS, dtype)
    if GATES:
        up = _rounded(up_acc, bias + i * STEP + UP, inside, HAS_BIAS, dtype)
        result = _clamped(result, up, alpha, limit) if CLAMPS else gated(result, up, GELU)
    tl.store(output + pair[:, None] * OUTPUTS + i[None, :], result, mask=real[:, None] & inside[None, :])
