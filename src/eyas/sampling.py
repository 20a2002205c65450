"""Logits to probabilities, with every sampling option. Pure functions.

Everything that shapes the target's distribution p does so before a token is chosen from it, so greedy and drawn answers
obey every option, with and without drafts. The options are applied in vLLM's order, so that a request means the same
here and there:

    shape_counted   allowed tokens, logit bias, then the penalties: repetition, frequency, presence
    probabilities   temperature (0: the largest logit, nothing further), min-p, top-k, top-p

What may change the most likely token comes first, so greedy decoding obeys it too; what only cuts the tail comes
last. The order matters where two meet: a repetition penalty divides the biased logit, and top-p counts the
probability among what min-p and top-k left (transformers applies min-p after top-p, which keeps more). A token that
is forbidden has a logit of minus infinity, which no later step can raise, so when it is forbidden does not matter.

How a token is chosen from p is the engine's affair (`engine/runner/slot_sampling.py`).

Shapes: V target vocabulary, K the head of a distribution, N sequences, M tokens named in a list.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, log

import torch
from torch import Tensor

from eyas.errors import UserError

IMPOSSIBLE = float("-inf")
LARGEST_BIAS, LARGEST_PENALTY = 100.0, 2.0
"""The limits of the OpenAI API."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target's next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this likely in proportion to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt or output, multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Taken from the logit of a token that the output has."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token as often as the output has it."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens. Kept as ascending pairs, so that the whole can be hashed."""
    allowed_tokens: frozenset[int] | None = None
    """The only tokens that may come; None allows all."""

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
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p {self.min_p} is outside [0, 1]; use 0 to keep every token")
        if not (self.repetition_penalty > 0 and isfinite(self.repetition_penalty)):
            raise UserError(
                f"repetition_penalty {self.repetition_penalty} is no finite number above 0; use 1 for no penalty"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= LARGEST_PENALTY:
                raise UserError(f"{name} {getattr(self, name)} is outside [-2, 2]; use 0 for no penalty")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        for token, bias in self.bias_pairs:
            if not abs(bias) <= LARGEST_BIAS:
                raise UserError(
                    f"logit_bias {bias} of token {token} is outside [-100, 100]; -100 all but forbids a token"
                )
        if self.allowed_tokens is not None and not self.allowed_tokens:
            raise UserError("allowed_tokens names 0 tokens, so none could come; name 1 or more, or leave it out")
        if (lowest := min(self._named_tokens(), default=0)) < 0:
            raise UserError(
                f"logit_bias or allowed_tokens names token {lowest}, below 0; tokens are named by their ids"
            )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """The logit bias, in the form it is kept in."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def penalises(self) -> bool:
        """Whether the tokens before matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def shapes_logits(self) -> bool:
        """Whether even the most likely token may be another one than by the plain logits."""
        return self.allowed_tokens is not None or bool(self.logit_bias) or self.penalises

    def require_vocabulary(self, size: int) -> None:
        """Refuse tokens that a target of this vocabulary does not have."""
        if (highest := max(self._named_tokens(), default=0)) >= size:
            raise UserError(
                f"logit_bias or allowed_tokens names token {highest}, above the last one {size - 1} of this target; "
                "use ids of its own tokenizer"
            )

    def _named_tokens(self) -> list[int]:
        return [*(token for token, _ in self.bias_pairs), *(self.allowed_tokens or ())]


def shape_counted(logits_V: Tensor, sampling: Sampling, prompt_V: Tensor | None, output_V: Tensor | None) -> Tensor:
    """The logits by which the next token is chosen, given each token's count in prompt and output [..., V].

    Only penalties need the counts.
    """
    logits_V = _at_least_float32(logits_V)
    if sampling.allowed_tokens is not None:
        allowed_V = _membership(sampling.allowed_tokens, logits_V.shape[-1], logits_V.device)
        logits_V = logits_V.masked_fill(~allowed_V, IMPOSSIBLE)
    if sampling.logit_bias:
        token_M, bias_M = _biases(sampling.bias_pairs, logits_V.device)
        logits_V = logits_V.clone()
        logits_V[..., token_M] += bias_M.to(logits_V.dtype)
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
    """How often each token of a vocabulary is in each sequence [N, V]."""
    places = [row * size + token for row, sequence in enumerate(sequences) for token in sequence]
    counts = torch.bincount(torch.tensor(places, dtype=torch.int64), minlength=len(sequences) * size)
    return counts.view(len(sequences), size).to(device)


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., V] that plain decoding draws from. Greedy is the one that has a single token.

    Penalties, bias and allowed tokens are those of `shape_counted`, which comes before. On CUDA nothing here waits for
    the device, so that it can be recorded in a graph.
    """
    logits_V = _at_least_float32(logits_V)
    if sampling.temperature == 0:
        return one_hot(logits_V.argmax(dim=-1), logits_V.shape[-1], logits_V.dtype)
    logits_V = logits_V / sampling.temperature
    if sampling.min_p > 0:
        # p(v) < min_p * p(best), without a softmax of its own.
        least = logits_V.amax(dim=-1, keepdim=True) + log(sampling.min_p)
        logits_V = logits_V.masked_fill(logits_V < least, IMPOSSIBLE)
    if 0 < sampling.top_k < logits_V.shape[-1]:
        kth = logits_V.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits_V = logits_V.masked_fill(logits_V < kth, IMPOSSIBLE)
    p_V = logits_V.softmax(dim=-1)
    if sampling.top_p < 1:
        p_K, order_K = _nucleus_first(p_V, sampling.top_p)
        # A token stays if those ahead of it do not reach top_p yet, so the most likely one always stays. In float64
        # sums of float32 are all but exact, so that their order does not show, here or on another device.
        stays_K = (p_K.cumsum(dim=-1, dtype=torch.float64) - p_K).to(p_K.dtype) < sampling.top_p
        p_K = p_K.masked_fill(~stays_K, 0.0)
        p_K = p_K / p_K.sum(dim=-1, keepdim=True, dtype=torch.float64).to(p_K.dtype)
        p_V = torch.zeros_like(p_V).scatter(-1, order_K, p_K)
    return p_V


def _nucleus_first(p_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order and where they stand, among equals the first first; as many as matter.

    A nucleus is mostly small, and on the CPU sorting the whole vocabulary takes longer than a layer. If what is
    strictly above the k-th probability reaches top_p, so does the nucleus, whose order then needs no one else.
    Elsewhere everything is sorted, since how much is enough would be a question to the device.
    """
    size = p_V.shape[-1]
    for k in (64, 512, 4096) if p_V.device.type == "cpu" else ():
        if k > size // 4:
            break
        p_K, index_K = p_V.topk(k, dim=-1)
        above = p_K.masked_fill(p_K == p_K[..., -1:], 0.0).sum(dim=-1)
        if bool((above > top_p + 1e-6).all()):  # sums of one order and another differ by less than this
            index_K = index_K.sort(dim=-1).values
            p_K, order_K = p_V.gather(-1, index_K).sort(dim=-1, descending=True, stable=True)
            return p_K, index_K.gather(-1, order_K)
    p_V, order_V = p_V.sort(dim=-1, descending=True, stable=True)
    return p_V, order_V


def _at_least_float32(logits_V: Tensor) -> Tensor:
    return logits_V if logits_V.dtype == torch.float64 else logits_V.float()


# A request asks for the same tables at every step.
@lru_cache(maxsize=64)
def _membership(tokens: Collection[int], size: int, device: torch.device) -> Tensor:
    member_V = torch.zeros(size, dtype=torch.bool)
    member_V[torch.tensor(sorted(tokens))] = True
    return member_V.to(device)


@lru_cache(maxsize=64)
def _biases(pairs: tuple[tuple[int, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, biases = zip(*pairs, strict=True)
    return torch.tensor(tokens, device=device), torch.tensor(biases, dtype=torch.float64, device=device)


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """All probability on one token."""
    return torch.nn.functional.one_hot(index, size).to(dtype)
