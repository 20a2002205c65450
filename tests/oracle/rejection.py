"""Rejection sampling (Leviathan et al. 2023, Chen et al. 2023), by which the oracle decodes.

p is the target's distribution and q the one that a draft was drawn from. Chance is an argument (`Draws`): a seeded
generator in decoding, every outcome in turn in the exact tests. The engine does without: its token is a function of p
and of the request's own noise.

Shapes: V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.errors import UserError
from eyas.sampling import Sampling
from oracle.shaping import count_tokens, shape_counted, shapes_logits


def require_unshaped(sampling: Sampling, decoder: str) -> None:
    """Raise for options that a decoder without `shape_logits` would ignore."""
    if shapes_logits(sampling):
        raise UserError(f"{decoder} has no penalties, logit_bias or allowed_tokens; leave them out or use the engine")


class Draws(Protocol):
    """Source of randomness."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, p_V: Tensor) -> int:
        """An index with the probability it has in p."""
        ...


class SeededDraws:
    """Seeded randomness."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def coin(self, probability: float) -> bool:
        """True with this probability: a uniform number in [0, 1) lies below it."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def pick(self, p_V: Tensor) -> int:
        """An index with the probability it has in p."""
        return int(torch.multinomial(p_V.cpu(), 1, generator=self._generator))


def shape_logits(
    logits_V: Tensor, sampling: Sampling, *, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Tensor:
    """Logits [..., V] with allowed tokens, bias and penalties, after this prompt and output."""
    prompt_V = output_V = None
    if sampling.penalises:
        prompt_V, output_V = count_tokens([prompt, output], logits_V.shape[-1], logits_V.device)
    return shape_counted(logits_V, sampling, prompt_V, output_V)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A draft token and the distribution it was sampled from (one-hot for greedy drafts)."""

    token: int
    q_V: Tensor


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """The normalised excess of p over q: the target's distribution after a candidate from q was rejected."""
    excess_V = (p_V - q_V).clamp(min=0)
    total = excess_V.sum()
    # Nothing above q means p equals q up to rounding; then no candidate can be turned down but by rounding.
    return excess_V / total if total > 0 else p_V


def try_candidates(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
    """Offer siblings in turn; return the index of the accepted one, or None and the remaining distribution.

    Candidate x is accepted with probability min(1, p(x) / q(x)); otherwise p becomes the residual and the next is
    tried. Lossless if each candidate was drawn from its q given the earlier ones, and if whether it is offered at
    all was decided before it was drawn.
    """
    for index, candidate in enumerate(candidates):
        p, q = float(p_V[candidate.token]), float(candidate.q_V[candidate.token])
        if draws.coin(min(1.0, p / q)):
            return index, p_V
        p_V = residual(p_V, candidate.q_V)
    return None, p_V
