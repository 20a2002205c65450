"""What a batch asks of the sampler, as a small value: what nobody asks for is not computed.

It is part of a captured graph's bucket, so it has few values. Whatever covers the needs of a batch gives the same
tokens: an option that a row does not use is neutral there.
"""

from dataclasses import dataclass
from functools import lru_cache

from eyas.engine.request import MOST_LOGPROBS, SequenceState
from eyas.sampling import Sampling

NO_LOGPROBS = -1
_FIRST_HEAD, _NEXT_HEAD = 64, 8


@dataclass(frozen=True, kw_only=True)
class Needs:
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
        return Needs(
            sampled=self.sampled or other.sampled,
            min_p=self.min_p or other.min_p,
            top_k=max(self.top_k, other.top_k),
            top_p=self.top_p or other.top_p,
            biased=self.biased or other.biased,
            penalised=self.penalised or other.penalised,
            early=self.early or other.early,
            logprobs=max(self.logprobs, other.logprobs),
        )


NOTHING = Needs()


def sampling_needs(seq: SequenceState, vocab_size: int) -> Needs:
    """What a request needs at its next token. Equal ones are one object."""
    request, sampling = seq.request, seq.request.sampling
    never = any(len(word) == 1 for word in request.bad_words)
    return _needs(
        _cuts(sampling, vocab_size),
        biased=bool(sampling.logit_bias) or sampling.allowed_tokens is not None or never,
        penalised=sampling.penalises,
        early=bool(request.stop_ids) and seq.new_tokens < request.min_new_tokens,
        logprobs=NO_LOGPROBS if request.logprobs is None else min(request.logprobs, 1) * MOST_LOGPROBS,
    )


def needs_mask(seq: SequenceState) -> bool:
    """Whether the host has to say which tokens may come: for a grammar, and for bad words of several tokens."""
    return seq.matcher is not None or any(len(word) > 1 for word in seq.request.bad_words)


def _cuts(sampling: Sampling, vocab_size: int) -> tuple[bool, bool, int, bool]:
    """Whether a request is sampled, and by which cuts."""
    if sampling.temperature == 0:
        return False, False, 0, False
    head = 0
    if 0 < sampling.top_k < vocab_size:
        head = _FIRST_HEAD
        while head < sampling.top_k:
            head *= _NEXT_HEAD
    return True, sampling.min_p > 0, min(head, vocab_size), sampling.top_p < 1


@lru_cache(maxsize=1024)
def _needs(cuts: tuple[bool, bool, int, bool], *, biased: bool, penalised: bool, early: bool, logprobs: int) -> Needs:
    sampled, min_p, top_k, top_p = cuts
    return Needs(
        sampled=sampled,
        min_p=min_p,
        top_k=top_k,
        top_p=top_p,
        biased=biased,
        penalised=penalised,
        early=early,
        logprobs=logprobs,
    )
