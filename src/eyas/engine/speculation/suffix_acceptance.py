"""Estimates how likely suffix drafts are accepted, from the tokens that came. No torch.

Repeated text may go on as before or not. How often it does depends on the length of the match and on how many earlier
occurrences agree. So drafts are grouped by both, and by source: the request's own text or earlier answers. Estimates
combine the hit rate of a group with how much better or worse the request fares than average.

Drafts that were not verified count too: the target's token at their place is known a step later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

EVEN_MATCH = 4.0
"""Match length at which half of the continuations are assumed to be right."""
TRIES = 6.0
"""Weight of the prior, in drafts of a group or of a request."""
MEMORY = 300
"""Drafts of a group or of a request after which the weight of one is 1/e."""
SUREST, LEAST = 0.999, 0.02
"""Upper bound of an estimate, and the probability below which a draft and those behind it are ignored."""
Kind = tuple[bool, int, int]


@dataclass(kw_only=True, slots=True)
class RoundOffer:
    """Suffix drafts for a request, looked up while the previous step may still be in flight."""

    known: int
    """Length of the request at the look-up; the drafts follow it."""
    most: int
    """Most drafts of the request."""
    tokens: tuple[int, ...]
    match: int
    """Length of the longest matching text before them."""
    votes: tuple[int, ...]
    voters: tuple[int, ...]
    """Occurrences that continued with each token, of those that continued with all tokens before it."""
    shared: bool = False
    """Whether they come from earlier answers instead of the request's own text."""
    chances: Sequence[float] = ()
    """Probability of each draft to be accepted at all, if the step in flight confirms as many tokens as it can."""
    sent: bool = False
    """Whether it was sent to the device for verification."""
    confirmed: bool = False
    """Whether it only extends the drafter's own drafts, where these agree with it."""


class SuffixAcceptance:
    """Acceptance estimates for suffix drafts."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, tuple[float, float]] = {}
        """Hits and tries by group."""
        self._requests: dict[int, tuple[float, float, float]] = {}
        """Per request: hits, hits expected of an average request, tries."""

    def chances(self, key: int, offer: RoundOffer) -> list[float]:
        """Probability that each token is the target's, given that all before it were."""
        odds = self._odds(key)
        return [chance * odds / (1 - chance + chance * odds) for _, chance in self._usual(offer)]

    def survivals(self, key: int, offer: RoundOffer) -> list[float]:
        """Probability that each token is accepted at all, up to the first one that is too unlikely."""
        survival, made = 1.0, list[float]()
        for chance in self.chances(key, offer):
            survival *= chance
            if survival < LEAST:
                break
            made.append(survival)
        return made

    def observe(self, key: int, offer: RoundOffer, came: Sequence[int]) -> None:
        """Count an offer against the tokens that came. Drafts behind a wrong one say nothing."""
        kept, own = 1 - 1 / MEMORY, self._requests.get(key, (0.0, 0.0, 0.0))
        for (kind, chance), drafted, token in zip(list(self._usual(offer)), offer.tokens, came, strict=False):
            hits, tries = self._kinds.get(kind, (0.0, 0.0))
            self._kinds[kind] = kept * hits + (drafted == token), kept * tries + 1
            own = kept * own[0] + (drafted == token), kept * own[1] + chance, kept * own[2] + 1
            if drafted != token:
                break
        self._requests[key] = own

    def forget(self, key: int) -> None:
        """Drop a finished request; the groups keep its counts."""
        self._requests.pop(key, None)

    def _odds(self, key: int) -> float:
        """Odds ratio of a request against the average, with a neutral prior."""
        hits, expected, tries = self._requests.get(key, (0.0, 0.0, 0.0))
        return (hits + TRIES) / (expected + TRIES) * (tries - expected + TRIES) / (tries - hits + TRIES)

    def _usual(self, offer: RoundOffer) -> Iterator[tuple[Kind, float]]:
        """Group and average probability of each token. Each accepted token makes the match longer."""
        for match, votes, voters in zip(count(offer.match), offer.votes, offer.voters, strict=False):
            agree = 2 + (votes > 1) if votes == voters else int(votes + votes > voters)
            kind = offer.shared, match.bit_length(), agree
            hits, tries = self._kinds.get(kind, (0.0, 0.0))
            belief = match / (match + EVEN_MATCH) * votes / voters
            yield kind, min((hits + TRIES * belief) / (tries + TRIES), SUREST)
