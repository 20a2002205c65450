"""Noise as a function: the noise of a token depends on (seed, position, token id) and nothing else.

The engine samples by an exponential race (Gumbel-max): token v takes the time E(v) / p(v), with E(v) exponential, and
the first to arrive is v with probability p(v). E is computed from a counter instead of drawn from a stream, so it does
not matter who asks, in which batch, how often or in which order: the drafter can race with its own q against the very
noise that the target will use later, and a request is reproducible by its seed.

    key   = mix(mix(seed + G) + position G)      per row
    bits  = mix(key + token G)                   per row and token
    w     = (2 b + 1) / 2^53,  b the low 52 bits of bits
    E     = -log(1 - w)

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection in which each bit of the input flips
every bit of the output with probability about 1/2, and G the odd integer nearest to 2^64 / golden ratio. Seed, position
and token pass through three, two and one of them, so seed + 1 is nothing like position + 1.

Resolution: a token of probability p wins with an E of about p, so small E must be distinct. With the 24 bits of a
float32 uniform, one of V = 150,000 tokens has the smallest value in one position of a hundred, and then it wins however
unlikely it is. With 52 bits that is once in 2^34 positions. E itself may be rounded: float32 keeps it to a relative
2^-24, the precision of p. So w is exact in float64, its logarithm is taken there, and E is float32. The integers and w
are the same bits on every device. Logarithms may differ in the last bit of float64; rounded to float32 that shows about
once in 2^29 values, in the last place, and p itself differs more between devices.

Shapes: N rows, W tokens of the (draft) vocabulary, K those of positive probability, L a shortlist, S winners.
"""

import torch
from torch import Tensor

from eyas.kernels.attention.choose import has_triton

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LOW_52 = 2**52 - 1
_ONE = 0x3FF << 52
"""The bits of 1.0 in float64."""
_SHORTLIST = 16


def uniform(seed_N: Tensor, position_N: Tensor, token_W: Tensor) -> Tensor:
    """w [N, W] in the open interval (0, 1), float64. Tokens are [W], or [N, W] if they differ between rows."""
    key_N = _mix(_mix(seed_N + _GOLDEN) + position_N * _GOLDEN)
    bits_NW = _mix(key_N[:, None] + token_W * _GOLDEN)
    # With the exponent of 1.0 above them, 52 bits are the float64 1 + b / 2^52: a conversion without arithmetic. Minus
    # the largest number below 1 this is (2 b + 1) / 2^53, exactly, and so is 1 - w.
    return bits_NW.bitwise_and_(_LOW_52).bitwise_or_(_ONE).view(torch.float64).sub_(1 - 2**-53)


def exponential(seed_N: Tensor, position_N: Tensor, token_W: Tensor) -> Tensor:
    """Exponential noise of rate 1 [N, W], float32."""
    return _time(uniform(seed_N, position_N, token_W))


def race(p_NW: Tensor, seed_N: Tensor, position_N: Tensor, token_W: Tensor, *, width: int = 1) -> Tensor:
    """The first `width` indices in W by p / E [N, width], the winner first.

    On a CPU, where a logarithm is expensive and reading data is free, only tokens that can win are computed.
    """
    if p_NW.device.type != "cpu":
        return _first(p_NW / exponential(seed_N, position_N, token_W), width)
    runners = int((p_NW > 0).sum(dim=-1, dtype=torch.int32).max())
    if runners <= p_NW.shape[-1] // 4:
        p_NK, index_NK = p_NW.topk(max(runners, width), dim=-1)
        return index_NK.gather(-1, _first(p_NK / exponential(seed_N, position_N, token_W[index_NK]), width))
    return _first_of_many(p_NW, uniform(seed_N, position_N, token_W), width)


def first(
    p_NV: Tensor, logits_NV: Tensor, greedy_N: Tensor, seed_N: Tensor, position_N: Tensor, token_V: Tensor
) -> Tensor:
    """Winners [N] without host synchronisation: the first by p / E, or the largest logit where `greedy` is not 0.

    Both tables are float32.
    """
    if p_NV.is_cpu:
        return _raced(p_NV, logits_NV, greedy_N, seed_N, position_N, token_V, 1)[:, 0]
    if p_NV.is_cuda and has_triton():
        from eyas.kernels.noise_triton import first_by_triton  # torch for CPUs comes without triton

        return first_by_triton(p_NV, logits_NV, greedy_N, seed_N, position_N, token_V)
    score_NV = p_NV / exponential(seed_N, position_N, token_V)
    return torch.where(greedy_N[:, None] > 0, logits_NV, score_NV).argmax(dim=-1)


def first_many(
    p_NV: Tensor,
    logits_NV: Tensor,
    greedy_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    token_V: Tensor,
    width: int,
) -> Tensor:
    """The first `width` of each row [N, width], by the same scores."""
    if p_NV.is_cpu:
        return _raced(p_NV, logits_NV, greedy_N, seed_N, position_N, token_V, width)
    if p_NV.is_cuda and has_triton():
        from eyas.kernels.noise_triton import scores_by_triton  # torch for CPUs comes without triton

        score_NV = scores_by_triton(p_NV, logits_NV, greedy_N, seed_N, position_N, token_V)
    else:
        timed_NV = p_NV / exponential(seed_N, position_N, token_V)
        score_NV = torch.where(greedy_N[:, None] > 0, logits_NV, timed_NV)
    return score_NV.topk(width, dim=-1).indices


def _raced(
    p_NV: Tensor,
    logits_NV: Tensor,
    greedy_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    token_V: Tensor,
    width: int,
) -> Tensor:
    """`first_many` where reading data is free: only tokens that can win are computed."""
    is_greedy_N1 = greedy_N[:, None] > 0
    if bool(is_greedy_N1.all()):
        return _first(logits_NV, width)
    raced_NS = race(p_NV, seed_N, position_N, token_V, width=width)
    return torch.where(is_greedy_N1, _first(logits_NV, width), raced_NS) if bool(is_greedy_N1.any()) else raced_NS


def _first_of_many(p_NW: Tensor, w_NW: Tensor, width: int) -> Tensor:
    """The race of a whole vocabulary, with the logarithms of a shortlist.

    E = w + w^2 / 2 + ..., so p / w bounds p / E from above, tightly where w is small. So few bounds are above the
    winner's p / E. If they fill the list, all tokens are computed.
    """
    listed = min(_SHORTLIST + 2 * width, p_NW.shape[-1])
    bound_NL, index_NL = (p_NW / w_NW.to(p_NW.dtype)).topk(listed, dim=-1)
    score_NL = p_NW.gather(-1, index_NL) / _time(w_NW.gather(-1, index_NL))
    first_NS = _first(score_NL, width)
    unlisted_N1 = bound_NL[:, -1:] * (1 + 1e-5)  # rounding
    if bool((score_NL.gather(-1, first_NS) > unlisted_N1).all()):
        return index_NL.gather(-1, first_NS)
    return _first(p_NW / _time(w_NW), width)


def _first(score_NW: Tensor, width: int) -> Tensor:
    return score_NW.argmax(dim=-1, keepdim=True) if width == 1 else score_NW.topk(width, dim=-1).indices


def _time(w: Tensor) -> Tensor:
    return (1 - w).log_().neg_().float()


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place, in the wrapping arithmetic of int64."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        _fold(x, shift).mul_(multiplier)
    return _fold(x, 31)


def _fold(x: Tensor, shift: int) -> Tensor:
    # An int64 shift copies the sign; the mask removes it.
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))
