"""Logits to probabilities to tokens, and the rule that keeps speculation lossless. Pure functions.

p is the target's distribution and q the one a draft token was drawn from, as in the papers (Leviathan et al. 2023,
Chen et al. 2023). Temperature, top-k and top-p shape p BEFORE anything is accepted, so that what comes out is
distributed as plain sampling from p, whatever q is.

Chance is an argument (`Draws`): a seeded generator in decoding, every outcome in turn in the exact tests.

Shapes: V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target's next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""

    def __post_init__(self) -> None:
        # Below, float32 scores divided by it overflow; above, those of undraftable tokens become undefined.
        if self.temperature != 0 and not 1e-5 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature {self.temperature} is neither 0 nor a finite number from 1e-05; use 0 for greedy decoding"
            )
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is below 0; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is outside (0, 1]; use 1 to keep every token")


class Draws(Protocol):
    """Where chance comes from."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, p_V: Tensor) -> int:
        """An index with the probability it has in p."""
        ...


class SeededDraws:
    """Reproducible chance."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def coin(self, probability: float) -> bool:
        """True with this probability: a uniform number in [0, 1) lies below it."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def pick(self, p_V: Tensor) -> int:
        """An index with the probability it has in p."""
        return int(torch.multinomial(p_V.cpu(), 1, generator=self._generator))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., V] that plain decoding draws from. Greedy is the one that has a single token."""
    logits_V = logits_V if logits_V.dtype == torch.float64 else logits_V.float()
    if sampling.temperature == 0:
        return one_hot(logits_V.argmax(dim=-1), logits_V.shape[-1], logits_V.dtype)
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < logits_V.shape[-1]:
        kth = logits_V.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < kth, float("-inf"))
    p_V = logits_V.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = p_V.sort(dim=-1, descending=True, stable=True)
        # A token stays if those ahead of it do not reach top_p yet, so the most likely one always stays.
        ahead_V = sorted_V.cumsum(dim=-1) - sorted_V
        kept_V = torch.zeros_like(p_V, dtype=torch.bool).scatter(-1, order_V, ahead_V < sampling.top_p)
        p_V = p_V.masked_fill(~kept_V, 0.0)
        p_V = p_V / p_V.sum(dim=-1, keepdim=True)
    return p_V


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """All probability on one token."""
    return torch.nn.functional.one_hot(index, size).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A drafted token and the distribution it was drawn from; a greedy draft was drawn from a one-hot one."""

    token: int
    q_V: Tensor


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """What p has above q, normalised: the target's distribution once a candidate from q was turned down."""
    excess_V = (p_V - q_V).clamp(min=0)
    total = excess_V.sum()
    # Nothing above q means p equals q up to rounding; then no candidate can be turned down but by rounding.
    return excess_V / total if total > 0 else p_V


def try_candidates(p_V: Tensor, candidates: Sequence[Candidate], draws: Draws) -> tuple[int | None, Tensor]:
    """Offer siblings in turn: the index of the accepted one, or None and the distribution left to draw from.

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
