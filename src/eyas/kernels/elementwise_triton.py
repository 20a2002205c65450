# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Steps between products that several Triton kernels share, rounded where transformers rounds them."""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def weighted(value, scale, weight, FINE: tl.constexpr):
    """The result of a norm: scaled, then weighted. Rounded in between, too, unless the weight is finer."""
    scaled = value.to(tl.float32) * scale
    if not FINE:
        scaled = scaled.to(value.dtype).to(tl.float32)
    return (scaled * weight.to(tl.float32)).to(value.dtype)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """activation(gate) * up; the activation is rounded, too."""
    exact = gate.to(tl.float32)
    by = exact
    if GELU:  # 0.5 x (1 + tanh(u)) is x / (1 + e^-2u)
        by = exact * (1.5957691216057308 + 0.07135481627159 * exact * exact)
    opened = (exact / (1.0 + tl.exp(-by))).to(gate.dtype).to(tl.float32)
    return (opened * up.to(tl.float32)).to(gate.dtype)
