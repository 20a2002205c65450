# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""`round_outcome.py` on a GPU: one launch, or two if tokens come from logits.

Shapes: R rows, K drafts of a row, Q = 1 + K its tokens, N = R * Q, V vocabulary, B parts of the vocabulary, C numbers
of a line.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.argmax_triton import logit_parts
from eyas.kernels.noise_triton import mix
from eyas.kernels.round_tensors import RoundTensors


@triton.jit
def _settle_kernel(
    best_of,
    index_of,
    token_of,
    row_slot,
    row_samples,
    length_of,
    limit_of,
    tokens,
    drafts,
    sure_of,
    depth_of,
    line,
    drafts_stride,
    sure_stride,
    ring,
    chance,
    PARTS,
    GREEDY: tl.constexpr,
    TOSSED: tl.constexpr,
    DEPTH: tl.constexpr,
    Q_PADDED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Settle one row."""
    row, q = tl.program_id(0).to(tl.int64), tl.arange(0, Q_PADDED)
    real = q <= DEPTH
    if GREEDY:
        part = tl.arange(0, PADDED)
        at = (row * (1 + DEPTH) + q)[:, None] * PARTS + part[None, :]
        inside = real[:, None] & (part < PARTS)[None, :]
        best = tl.load(best_of + at, mask=inside, other=float("-inf"))
        found = tl.load(index_of + at, mask=inside, other=2147483647)
        top = tl.max(best, axis=1)
        token = tl.min(tl.where(best == top[:, None], found, 2147483647), axis=1).to(tl.int64)
    else:
        token = tl.load(token_of + row * (1 + DEPTH) + q, mask=real, other=0)
    slot = tl.load(row_slot + row)
    length = tl.load(length_of + slot)
    room = tl.maximum(tl.load(limit_of + slot) - length - 1, 0)

    accepted = tl.full((), 0, tl.int32)
    if DEPTH > 0:
        drafted = q < DEPTH
        draft = tl.load(drafts + row * drafts_stride + q, mask=drafted, other=0)
        if TOSSED:
            golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
            key = mix(mix(slot.to(tl.uint64) + golden) + length.to(tl.uint64) * golden)
            bits = mix(key + q.to(tl.uint64) * golden)
            # As in `noise.py`: 52 bits below the exponent of 1; w = x - 1 + 2^-53, exactly.
            x = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
            taken = (x - 1.0) + 1.1102230246251565e-16 < tl.load(chance)
        else:
            taken = token == draft
        taken = taken & drafted & (q < tl.load(depth_of + row))
        accepted = tl.min(tl.where(taken, DEPTH, q), axis=0)
        if TOSSED:
            token = tl.where(q < accepted, draft, token)
        sure = tl.load(sure_of + row * sure_stride + q, mask=drafted, other=0.0).to(tl.float64)
    new = tl.minimum((accepted + 1).to(tl.int64), room) * tl.load(row_samples + row)

    tl.store(tokens + slot * ring + (length + 1 + q) % ring, token, mask=real & (q < new))
    tl.store(length_of + slot, length + new)
    to = line + row * (3 + 3 * DEPTH)
    tl.store(to, new)
    tl.store(to + 1, accepted.to(tl.int64))
    tl.store(to + 2 + q, token, mask=real)
    if DEPTH > 0:
        tl.store(to + 3 + DEPTH + q, draft, mask=drafted)
        tl.store(to + 3 + 2 * DEPTH + q, sure.to(tl.int64, bitcast=True), mask=drafted)


def settle_by_triton(
    state: RoundTensors,
    *,
    rows: int,
    depth: int,
    logits_NV: Tensor | None = None,
    token_RQ: Tensor | None = None,
    chance: Tensor | None = None,
) -> Tensor:
    """`round_outcome.settle`."""
    line_RC = torch.empty(rows, 3 + 3 * depth, dtype=torch.int64, device=state.row_slot.device)
    best_NB = index_NB = line_RC
    count, padded = 1, 1
    if logits_NV is not None:
        parts = logit_parts(logits_NV)
        best_NB, index_NB, padded = parts.best_NB, parts.index_NB, parts.padded
        count = best_NB.shape[1]
    _settle_kernel[(rows,)](
        best_NB,
        index_NB,
        line_RC if token_RQ is None else token_RQ.contiguous(),
        state.row_slot,
        state.row_samples,
        state.length_S,
        state.limit_S,
        state.tokens_SL,
        state.drafts_RK,
        state.sure_RK,
        state.depth_R,
        line_RC,
        state.drafts_RK.stride(0),
        state.sure_RK.stride(0),
        state.ring,
        line_RC if chance is None else chance,
        count,
        GREEDY=token_RQ is None,
        TOSSED=chance is not None,
        DEPTH=depth,
        Q_PADDED=triton.next_power_of_2(1 + depth),
        PADDED=padded,
        num_warps=4,
    )
    return line_RC
