"""From logits to probabilities with every sampling option, as plainly as possible; order as in `eyas/sampling.py`.

    shape_counted   allowed tokens, logit bias, then the penalties: repetition, frequency, presence
    probabilities   temperature (0: the largest logit, nothing further), min-p, top-k, top-p

A repetition penalty divides the biased logit, and top-p counts the probability that min-p and top-k left (transformers
applies min-p after top-p, which keeps more). A forbidden token has a logit of minus infinity, which no later step can
raise.

Shapes: V target vocabulary, N sequences, M tokens named in a list.
"""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from eyas.sampling import IMPOSSIBLE, Sampling


def shapes_logits(sampling: Sampling) -> bool:
    """Whether the most likely token may differ from that of the plain logits."""
    return sampling.allowed_tokens is not None or bool(sampling.logit_bias) or sampling.penalises


def shape_counted(logits_V: Tensor, sampling: Sampling, prompt_V: Tensor | None, output_V: Tensor | None) -> Tensor:
    """Apply allowed tokens, bias and penalties; only penalties need the token counts of prompt and output [..., V]."""
    logits_V = _at_least_float32(logits_V)
    if sampling.allowed_tokens is not None:
        forbidden_V = torch.ones(logits_V.shape[-1], dtype=torch.bool)
        forbidden_V[torch.tensor(sorted(sampling.allowed_tokens))] = False
        logits_V = logits_V.masked_fill(forbidden_V.to(logits_V.device), IMPOSSIBLE)
    if sampling.logit_bias:
        token_M, bias_M = zip(*sampling.bias_pairs, strict=True)
        logits_V = logits_V.clone()
        logits_V[..., torch.tensor(token_M)] += torch.tensor(bias_M, dtype=torch.float64).to(logits_V)
    if not sampling.penalises:
        return logits_V
    assert prompt_V is not None, "penalties need counts"
    assert output_V is not None, "penalties need counts"
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        logits_V = torch.where(prompt_V + output_V > 0, penalised_V, logits_V)
    if sampling.frequency_penalty or sampling.presence_penalty:
        logits_V = logits_V - sampling.frequency_penalty * output_V - sampling.presence_penalty * (output_V > 0)
    return logits_V


def count_tokens(sequences: Sequence[Sequence[int]], size: int, device: torch.device) -> Tensor:
    """Counts of each token in each sequence [N, V]."""
    places = [row * size + token for row, sequence in enumerate(sequences) for token in sequence]
    counts = torch.bincount(torch.tensor(places, dtype=torch.int64), minlength=len(sequences) * size)
    return counts.view(len(sequences), size).to(device)


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., V] of the next token, from logits of `shape_counted`; one-hot for greedy decoding."""
    logits_V = _at_least_float32(logits_V)
    if sampling.temperature == 0:
        return one_hot(logits_V.argmax(dim=-1), logits_V.shape[-1], logits_V.dtype)
    logits_V = logits_V / sampling.temperature
    if sampling.min_p > 0:
        least = logits_V.amax(dim=-1, keepdim=True) + log(sampling.min_p)  # p(v) < min_p * p(best), in logits
        logits_V = logits_V.masked_fill(logits_V < least, IMPOSSIBLE)
    if 0 < sampling.top_k < logits_V.shape[-1]:
        kth = logits_V.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < kth, IMPOSSIBLE)
    p_V = logits_V.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = p_V.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it do not reach top_p, so the most likely one always stays. Sums of float32 are
        # almost exact in float64, so that they do not depend on the order or the device.
        stays_V = (sorted_V.cumsum(dim=-1, dtype=torch.float64) - sorted_V).to(sorted_V.dtype) < sampling.top_p
        sorted_V = sorted_V.masked_fill(~stays_V, 0.0)
        sorted_V = sorted_V / sorted_V.sum(dim=-1, keepdim=True, dtype=torch.float64).to(sorted_V.dtype)
        p_V = torch.zeros_like(p_V).scatter(-1, order_V, sorted_V)
    return p_V


def _at_least_float32(logits_V: Tensor) -> Tensor:
    return logits_V if logits_V.dtype == torch.float64 else logits_V.float()


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """A distribution with all probability on one token."""
    return torch.nn.functional.one_hot(index, size).to(dtype)
