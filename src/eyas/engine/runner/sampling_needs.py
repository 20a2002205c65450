"""What a batch asks of the sampler, as a small value: what nobody asks for is not computed.

It is part of a captured graph's bucket, so it has few values. Whatever covers the needs of a batch gives the same
tokens: an option that a row does not use is neutral there.
"""

from functools import lru_cache
from typing import NamedTuple

from eyas.engine.request import MOST_LOGPROBS, SequenceState

NO_LOGPROBS = -1
_FIRST_HEAD, _NEXT_HEAD = 64, 8


class Needs(NamedTuple):
    """The options that some row of a batch uses. Without any, the largest logit is the answer everywhere."""

    sampled: bool = False
    """Temperature above 0. Only then do the cuts matter."""
    min_p: bool = False
    top_k: int = 0
    """How many of the largest logits every top-k lies within, coarsely; 0 if nobody has one."""
    top_p: bool = False
    biased: bool = False
    """Logit bias, allowed tokens, or tokens that may never come."""
    penalised: bool = False
    """Penalties, which count the tokens before."""
    early: bool = False
    """Stop tokens may not come yet."""
    masked: bool = False
    """The host has to say which tokens may come."""
    logprobs: int = NO_LOGPROBS
    """Alternatives beside each chosen token, all that may be asked for or 0; `NO_LOGPROBS` if nobody wants logprobs."""

    @property
    def greedy(self) -> bool:
        """Whether the largest raw logit is the answer everywhere."""
        return not (self.sampled or self.shaped)

    @property
    def shaped(self) -> bool:
        """Whether even the most likely token may be another one than by the raw logits."""
        return self.biased or self.penalised or self.early

    def __or__(self, other: "Needs") -> "Needs":
        """What covers both."""
        return Needs._make(map(max, self, other))


NOTHING = Needs()


def sampling_needs(seq: SequenceState, vocab_size: int) -> Needs:
    """What a request needs at its next token. Equal ones are one object."""
    request, sampling = seq.request, seq.request.sampling
    sampled, head = sampling.temperature > 0, 0
    if sampled and 0 < sampling.top_k < vocab_size:
        head = _FIRST_HEAD
        while head < sampling.top_k:
            head *= _NEXT_HEAD
    never = any(len(word) == 1 for word in request.bad_words)
    return _one(
        Needs(
            sampled=sampled,
            min_p=sampled and sampling.min_p > 0,
            top_k=min(head, vocab_size),
            top_p=sampled and sampling.top_p < 1,
            biased=bool(sampling.logit_bias) or sampling.allowed_tokens is not None or never,
            penalised=sampling.penalises,
            early=bool(request.stop_ids) and seq.new_tokens < request.min_new_tokens,
            masked=needs_mask(seq),
            logprobs=NO_LOGPROBS if request.logprobs is None else min(request.logprobs, 1) * MOST_LOGPROBS,
        )
    )


@lru_cache(maxsize=1024)
def _one(needs: Needs) -> Needs:
    return needs


def needs_mask(seq: SequenceState) -> bool:
    """Whether the host has to say which tokens may come: for a grammar, and for bad words of several tokens."""
    return seq.matcher is not None or any(len(word) > 1 for word in seq.request.bad_words)
