"""The sampling options that a batch uses, so that unused ones are not computed.

The value is part of a captured graph's key, so it is coarse. Needs that exceed those of a batch give the same tokens,
because options that a row does not use are neutral.
"""

from functools import lru_cache
from typing import NamedTuple

from eyas.engine.request import MOST_LOGPROBS, SequenceState

NO_LOGPROBS = -1
_FIRST_HEAD, _NEXT_HEAD = 64, 8


class Needs(NamedTuple):
    """Options used by some row of a batch. With none of them, every row takes the largest raw logit."""

    sampled: bool = False
    """Temperature above 0. Cuts matter only then."""
    min_p: bool = False
    top_k: int = 0
    """Coarse upper bound of all top-k values; 0 if unused."""
    top_p: bool = False
    biased: bool = False
    """Logit bias, allowed tokens, or bad words of one token."""
    penalised: bool = False
    """Penalties on earlier tokens."""
    early: bool = False
    """Stop tokens banned before a minimum length."""
    masked: bool = False
    """A mask from the host."""
    logprobs: int = NO_LOGPROBS
    """Alternatives per chosen token, 0 or the maximum; `NO_LOGPROBS` if no logprobs are requested."""

    @property
    def greedy(self) -> bool:
        """Whether every row takes its largest raw logit."""
        return not (self.sampled or self.shaped)

    @property
    def shaped(self) -> bool:
        """Whether options may change the most likely token."""
        return self.biased or self.penalised or self.early

    def __or__(self, other: "Needs") -> "Needs":
        return Needs._make(map(max, self, other))


NOTHING = Needs()


def sampling_needs(seq: SequenceState, vocab_size: int) -> Needs:
    """Needs of a request for its next token. Equal values are one object."""
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
    """Whether the host must compute masks: for a grammar, and for bad words of several tokens."""
    return seq.matcher is not None or any(len(word) > 1 for word in seq.request.bad_words)
