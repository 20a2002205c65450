"""Log probabilities of chosen tokens and of the most likely ones, by the target's raw logits.

Shapes: N rows of logits, V vocabulary, K alternatives, C columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probability and rank of a token by the target's raw logits, before sampling options apply."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token; ties share the better rank."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with their log probabilities, most likely first."""


def logprob_columns(logits_NV: Tensor, token_N: Tensor, alternatives: int) -> Tensor:
    """Columns [N, C]: log probability, rank, most likely tokens and their log probabilities; floats as bits.

    Does not wait for the device.
    """
    logits_NV = logits_NV.float()
    total_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    chosen_N1 = logits_NV.gather(-1, token_N[:, None])
    rank_N = 1 + (logits_NV > chosen_N1).sum(dim=-1)
    top = logits_NV.topk(min(alternatives, logits_NV.shape[-1]), dim=-1)
    logprob_N1, top_NK = ((x - total_N1).double().view(torch.int64) for x in (chosen_N1, top.values))
    return torch.cat([logprob_N1, rank_N[:, None], top.indices, top_NK], dim=1)


def tell_logprobs(token_N: Tensor, told_NC: Tensor, alternatives: int) -> list[TokenLogprobs]:
    """Decode the columns into `TokenLogprobs` with so many alternatives."""
    split = 2 + (told_NC.shape[1] - 2) // 2
    logprob_N, top_logprob_NK = (
        x.contiguous().view(torch.float64).tolist() for x in (told_NC[:, 0], told_NC[:, split:])
    )
    ranks, top_tokens = told_NC[:, 1].tolist(), told_NC[:, 2:split].tolist()
    return [
        TokenLogprobs(
            token=token,
            logprob=logprob,
            rank=rank,
            top=tuple(zip(tokens[:alternatives], tops[:alternatives], strict=True)),
        )
        for token, logprob, rank, tokens, tops in zip(
            token_N.tolist(), logprob_N, ranks, top_tokens, top_logprob_NK, strict=True
        )
    ]
