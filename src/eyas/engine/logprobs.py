"""Log probabilities of chosen tokens and of the most likely ones, by the target's raw logits.

Shapes: N rows of logits, V vocabulary, K alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """What the target's raw logits say of a token, before any option shapes them."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token; equals share the better rank."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and their log probabilities, the most likely first."""


class LogprobsTensors(NamedTuple):
    """Columns of the above: what can be computed before the host knows the tokens."""

    token_N: Tensor
    logprob_N: Tensor
    rank_N: Tensor
    top_token_NK: Tensor
    top_logprob_NK: Tensor

    def tell(self, alternatives: Sequence[int]) -> list[TokenLogprobs]:
        """For each row, with so many alternatives of those computed. It waits for the device unless copied before."""
        columns: list[list[Any]] = [column.tolist() for column in self]
        return [
            TokenLogprobs(
                token=token, logprob=logprob, rank=rank, top=tuple(zip(tokens[:most], tops[:most], strict=True))
            )
            for token, logprob, rank, tokens, tops, most in zip(*columns, alternatives, strict=True)
        ]


def compute_logprobs(logits_NV: Tensor, token_N: Tensor, alternatives: int) -> LogprobsTensors:
    """Log probability and rank of each token, and of so many most likely ones; nothing here waits for the device."""
    logits_NV = logits_NV.float()
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    chosen_N1 = logits_NV.gather(-1, token_N[:, None])
    rank_N = 1 + (logits_NV > chosen_N1).sum(dim=-1)
    top = logits_NV.topk(min(alternatives, logits_NV.shape[-1]), dim=-1)
    return LogprobsTensors(token_N, (chosen_N1 - total_N1)[:, 0], rank_N, top.indices, top.values - total_N1)
