# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The race of `noise.py` on a GPU: noise is made where it is used, without memory, in two launches instead of forty.

Each program runs the race of one row in one part of the vocabulary; the winners race again. Integers, the argument of
the logarithm and the division equal those of `noise.py` to the last bit. A part in which no token can win, as most are
where a request cuts the tail, is skipped.

Shapes: N rows, V tokens, B parts of the vocabulary.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_PART = 4096


@triton.jit
def mix(x):
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _scores(p, logits, greedy, seed, position, token, row, at, SIZE):
    """Compute the scores of some tokens of a row."""
    inside = at < SIZE
    if tl.load(greedy + row) != 0:
        score = tl.load(logits + row * SIZE + at, mask=inside, other=float("-inf"))
    else:
        # Outside the vocabulary, scores are below those of probability 0.
        score = tl.load(p + row * SIZE + at, mask=inside, other=-1.0)
        if tl.max(score, axis=0) > 0:
            golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
            key = mix(tl.load(seed + row).to(tl.uint64) + golden)
            key = mix(key + tl.load(position + row).to(tl.uint64) * golden)
            bits = mix(key + tl.load(token + at, mask=inside, other=0).to(tl.uint64) * golden)
            # As in `noise.py`: 52 bits below the exponent of 1. Then 1 - w = 2 - x - 2^-53, exactly.
            x = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
            time = -tl.log((2.0 - x) - 1.1102230246251565e-16)
            score = tl.div_rn(score, time.to(tl.float32))
    return score


@triton.jit
def _first_kernel(p, logits, greedy, seed, position, token, score_of, first_of, SIZE, PARTS, PART: tl.constexpr):
    """Find the largest score, and its index, in one part of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    score = _scores(p, logits, greedy, seed, position, token, row, part * PART + tl.arange(0, PART), SIZE)
    best, place = tl.max(score, axis=0, return_indices=True)
    tl.store(score_of + row * PARTS + part, best)
    # Where numbers are undefined, as in padding rows, any token of the vocabulary may win, but none outside.
    tl.store(first_of + row * PARTS + part, tl.minimum(part * PART + place, SIZE - 1).to(tl.int64))


@triton.jit
def _score_kernel(p, logits, greedy, seed, position, token, score_of, SIZE, PART: tl.constexpr):
    """Compute all scores in one part of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    score = _scores(p, logits, greedy, seed, position, token, row, at, SIZE)
    tl.store(score_of + row * SIZE + at, score, mask=at < SIZE)


def first_by_triton(
    p_NV: Tensor, logits_NV: Tensor, greedy_N: Tensor, seed_N: Tensor, position_N: Tensor, token_V: Tensor
) -> Tensor:
    """`noise.first`."""
    rows, size = p_NV.shape
    parts = triton.cdiv(size, _PART)
    score_NB = torch.empty(rows, parts, dtype=torch.float32, device=p_NV.device)
    first_NB = torch.empty(rows, parts, dtype=torch.int64, device=p_NV.device)
    _first_kernel[(rows, parts)](
        p_NV.contiguous(),
        logits_NV.contiguous(),
        greedy_N.contiguous(),
        seed_N.contiguous(),
        position_N.contiguous(),
        token_V.contiguous(),
        score_NB,
        first_NB,
        size,
        parts,
        PART=_PART,
        num_warps=8,
    )
    return first_NB.gather(-1, score_NB.argmax(dim=-1, keepdim=True))[:, 0]


def scores_by_triton(
    p_NV: Tensor, logits_NV: Tensor, greedy_N: Tensor, seed_N: Tensor, position_N: Tensor, token_V: Tensor
) -> Tensor:
    """The scores [N, V] that `noise.first` takes the largest of."""
    rows, size = p_NV.shape
    score_NV = torch.empty(rows, size, dtype=torch.float32, device=p_NV.device)
    _score_kernel[rows, triton.cdiv(size, _PART)](
        p_NV.contiguous(),
        logits_NV.contiguous(),
        greedy_N.contiguous(),
        seed_N.contiguous(),
        position_N.contiguous(),
        token_V.contiguous(),
        score_NV,
        size,
        PART=_PART,
        num_warps=8,
    )
    return score_NV
