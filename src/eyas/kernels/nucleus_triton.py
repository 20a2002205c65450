# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Top-p on a GPU without sorting: each row searches for the smallest probability that it keeps.

Non-negative float32 numbers are ordered like their bits. So the search is for the smallest bits above which less than
top_p lies, and each scan of the row divides the interval by eight. Of the tokens that have exactly this probability,
the first few are kept, as many as fit.

Shapes: N rows, V vocabulary.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_LINES, _LINE = 512, 8
_WARPS = 16


@triton.jit
def _mass(p, bits, pivot):
    """Sum the mass above a pivot, line by line."""
    return tl.sum(tl.where(bits > pivot, p, 0.0).to(tl.float64), axis=1)


@triton.jit
def _nucleus_kernel(p, top_p, output, SIZE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Search the threshold of one row."""
    row = tl.program_id(0).to(tl.int64)
    p += row * SIZE
    output += row * SIZE
    most = tl.load(top_p + row)
    tile = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    if most > 1:
        for start in range(0, SIZE, LINES * LINE):
            inside = start + tile < SIZE
            tl.store(output + start + tile, tl.load(p + start + tile, mask=inside, other=0.0), mask=inside)
    else:
        # Above `low` lies at least top_p, or low is below every number; above `high` lies less.
        low, high = tl.full((), -1, tl.int32), tl.full((), 0x3F800000, tl.int32)
        above = tl.full((), 0.0, tl.float64)
        while high - low > 1:
            part = (high - low + 7) // 8
            a, b, c = low + part, tl.minimum(low + 2 * part, high), tl.minimum(low + 3 * part, high)
            d, e = tl.minimum(low + 4 * part, high), tl.minimum(low + 5 * part, high)
            f, g = tl.minimum(low + 6 * part, high), tl.minimum(low + 7 * part, high)
            nothing = tl.zeros((LINES,), tl.float64)
            mass_a, mass_b, mass_c, mass_d = nothing, nothing, nothing, nothing
            mass_e, mass_f, mass_g = nothing, nothing, nothing
            for start in range(0, SIZE, LINES * LINE):
                value = tl.load(p + start + tile, mask=start + tile < SIZE, other=0.0)
                bits = value.to(tl.int32, bitcast=True)
                mass_a += _mass(value, bits, a)
                mass_b += _mass(value, bits, b)
                mass_c += _mass(value, bits, c)
                mass_d += _mass(value, bits, d)
                mass_e += _mass(value, bits, e)
                mass_f += _mass(value, bits, f)
                mass_g += _mass(value, bits, g)
            low, high, above = _narrow(tl.sum(mass_g, axis=0), g, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_f, axis=0), f, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_e, axis=0), e, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_d, axis=0), d, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_c, axis=0), c, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_b, axis=0), b, low, high, above, most)
            low, high, above = _narrow(tl.sum(mass_a, axis=0), a, low, high, above, most)

        equals = tl.zeros((LINES,), tl.int32)
        for start in range(0, SIZE, LINES * LINE):
            value = tl.load(p + start + tile, mask=start + tile < SIZE, other=-1.0)
            equals += tl.sum((value.to(tl.int32, bitcast=True) == high).to(tl.int32), axis=1)
        count = tl.sum(equals, axis=0)
        last = high.to(tl.float32, bitcast=True)
        # The first of the equals are kept; this counts them.
        kept, gone = tl.full((), 1, tl.int32), count + 1
        while gone - kept > 1:
            middle = (kept + gone) // 2
            fits = (above + (middle - 1).to(tl.float64) * last.to(tl.float64)).to(tl.float32) < most
            kept = tl.where(fits, middle, kept)
            gone = tl.where(fits, gone, middle)
        total = (above + kept.to(tl.float64) * last.to(tl.float64)).to(tl.float32)

        seen = tl.full((), 0, tl.int32)
        line = tl.arange(0, LINES * LINE)
        for start in range(0, SIZE, LINES * LINE):
            inside = start + line < SIZE
            value = tl.load(p + start + line, mask=inside, other=-1.0)
            bits = value.to(tl.int32, bitcast=True)
            same = (bits == high).to(tl.int32)
            stays = bits >= high
            if kept < count:
                stays = (bits > high) | ((same != 0) & (seen + tl.cumsum(same, axis=0) <= kept))
                seen += tl.sum(same, axis=0)
            tl.store(output + start + line, tl.where(stays, tl.div_rn(value, total), 0.0), mask=inside)


@triton.jit
def _narrow(mass, pivot, low, high, above, most):
    """Narrow the interval by the mass above a pivot. Pivots come in descending order."""
    less = mass.to(tl.float32) < most
    low = tl.where(less, low, tl.maximum(low, pivot))
    return low, tl.where(less, pivot, high), tl.where(less, mass, above)


def nucleus_by_triton(p_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """`nucleus.nucleus`."""
    p_NV = p_NV.contiguous()
    output_NV = torch.empty_like(p_NV)
    _nucleus_kernel[(len(p_NV),)](
        p_NV, top_p_N1.contiguous(), output_NV, SIZE=p_NV.shape[1], LINES=_LINES, LINE=_LINE, num_warps=_WARPS
    )
    return output_NV
