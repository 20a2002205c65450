"""How likely suffix drafts are accepted: learned from what came, whether they were verified or not. No torch.

Text that occurred before goes on as it did before, or not. How often it does depends on how much of the text before
matches, and on how many of the earlier occurrences went on alike. So drafts are told apart by both, and by where they
were found: in the request's own text or in earlier answers. What counts is how often drafts of a kind were right, and
of a request, how much better or worse it fares than all of them: some copy, some do not.

A draft that nobody verified is judged all the same: the target's token at its place is known a step later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

EVEN_MATCH = 4.0
"""Tokens of a match behind which the text is believed to go on as before in half the cases."""
TRIES = 6.0
"""Drafts of a kind, or of a request, that weigh as much as what is believed."""
MEMORY = 300
"""Drafts of a kind, or of a request, after which one has faded to a third."""
SUREST, LEAST = 0.999, 0.02
"""The most that is believed of a draft; and how likely one must be for those behind it to be weighed."""
Kind = tuple[bool, int, int]


@dataclass(kw_only=True, slots=True)
class RoundOffer:
    """Drafts for a request, looked up for a step that may be launched before the step before it has landed."""

    known: int
    """Tokens of the request when they were looked up: they follow these."""
    most: int
    """The most drafts that the request may have."""
    tokens: tuple[int, ...]
    match: int
    """Tokens before them that the likest occurrence has in common with the request."""
    votes: tuple[int, ...]
    voters: tuple[int, ...]
    """Occurrences that went on with each token, of those that had gone on with all before it."""
    shared: bool = False
    """Whether they come from earlier answers, not from the request's own text."""
    chances: Sequence[float] = ()
    """Of each draft to be accepted at all, if the step under way gives as many of the tokens as it can."""
    sent: bool = False
    """Whether it is sent to the device, to be drafted."""
    confirmed: bool = False
    """Then only behind what the drafter drafts, and only where that is the same as far as it goes."""


class SuffixAcceptance:
    """All estimates for suffix drafts."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, tuple[float, float]] = {}
        """Hits and tries."""
        self._requests: dict[int, tuple[float, float, float]] = {}
        """Hits, those that any request would have had, and tries."""

    def chances(self, key: int, offer: RoundOffer) -> list[float]:
        """Of each token to be the target's if all before it were."""
        odds = self._odds(key)
        return [chance * odds / (1 - chance + chance * odds) for _, chance in self._usual(offer)]

    def survivals(self, key: int, offer: RoundOffer) -> list[float]:
        """Of each token to be accepted at all; of those before the first that hardly is."""
        survival, made = 1.0, list[float]()
        for chance in self.chances(key, offer):
            survival *= chance
            if survival < LEAST:
                break
            made.append(survival)
        return made

    def observe(self, key: int, offer: RoundOffer, came: Sequence[int]) -> None:
        """Take what came in the place of an offer: of tokens behind the first wrong one nothing is known."""
        kept, own = 1 - 1 / MEMORY, self._requests.get(key, (0.0, 0.0, 0.0))
        for (kind, chance), drafted, token in zip(list(self._usual(offer)), offer.tokens, came, strict=False):
            hits, tries = self._kinds.get(kind, (0.0, 0.0))
            self._kinds[kind] = kept * hits + (drafted == token), kept * tries + 1
            own = kept * own[0] + (drafted == token), kept * own[1] + chance, kept * own[2] + 1
            if drafted != token:
                break
        self._requests[key] = own

    def forget(self, key: int) -> None:
        """Drop a request that has ended; what it taught of all stays."""
        self._requests.pop(key, None)

    def _odds(self, key: int) -> float:
        """How much better a request fares than any, drawn towards no difference by tries that never were."""
        hits, expected, tries = self._requests.get(key, (0.0, 0.0, 0.0))
        return (hits + TRIES) / (expected + TRIES) * (tries - expected + TRIES) / (tries - hits + TRIES)

    def _usual(self, offer: RoundOffer) -> Iterator[tuple[Kind, float]]:
        """Of each token its kind, and the chance of any request's. What matches grows by every token accepted."""
        for match, votes, voters in zip(count(offer.match), offer.votes, offer.voters, strict=False):
            agree = 2 + (votes > 1) if votes == voters else int(votes + votes > voters)
            kind = offer.shared, match.bit_length(), agree
            hits, tries = self._kinds.get(kind, (0.0, 0.0))
            belief = match / (match + EVEN_MATCH) * votes / voters
            yield kind, min((hits + TRIES * belief) / (tries + TRIES), SUREST)
