"""How likely suffix drafts are accepted: learned from what came, whether they were verified or not. No torch.

Text that occurred before goes on as it did before, or not. How often it does depends on how much of the text before
matches, and on how many of the earlier occurrences went on alike. So drafts are told apart by both, and by where they
were found: in the request's own text, in earlier answers, or behind a drafter's chain, which was drafted because
nothing better was found before it. What counts is how often drafts of a kind were right. Of requests it is learnt how
much better or worse they fare, as for the drafter (`acceptance.py`): some copy, some do not.

A draft that nobody verified is judged all the same: the target's token at its place is known a step later. So there is
nothing to explore: looking on costs no pass.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import exp

from eyas.engine.speculation.acceptance import Own
from eyas.engine.speculation.decayed_counts import DecayedCounts
from eyas.engine.speculation.policy import POLICY


@dataclass(frozen=True, slots=True)
class SuffixOffer:
    """Tokens that may follow a request's own, since they followed the like before."""

    tokens: tuple[int, ...]
    match: int
    """Tokens before them that the likest occurrence has in common with the request."""
    votes: tuple[int, ...]
    voters: tuple[int, ...]
    """Occurrences that went on with each token, of those that had gone on with all before it."""
    shared: bool = False
    """Whether they come from earlier answers, not from the request's own text."""
    behind: bool = False
    """Whether they follow a drafter's chain that went another way than what was found without it."""

    def cut(self, count: int) -> "SuffixOffer":
        """The first of them."""
        first = slice(0, count)
        votes, voters = self.votes[first], self.voters[first]
        return SuffixOffer(self.tokens[first], self.match, votes, voters, self.shared, self.behind)

    def agrees(self, chain: Sequence[int]) -> bool:
        """Whether a drafter's chain goes the same way, as far as both go."""
        return bool(chain) and all(own == drafted for own, drafted in zip(self.tokens, chain, strict=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOffer:
    """An offer for a step that is launched before the step before it has landed."""

    known: int
    """Tokens of the request when it was made: it says what follows them."""
    ahead: int
    """The most of these that the step under way may give."""
    most: int
    """The most drafts that the request may have."""
    offer: SuffixOffer
    sent: bool = False
    """Whether it was sent to the device, to be drafted."""
    confirmed: bool = False
    """Then only behind what the drafter drafts, and only where that is the same as far as it goes."""


class SuffixAcceptance:
    """All estimates for suffix drafts."""

    def __init__(self) -> None:
        self._matches, self._shares = len(POLICY.suffix_matches), len(POLICY.suffix_shares) + 2
        self._counts = DecayedCounts(3 * self._matches * self._shares)
        self._requests: dict[int, Own] = {}
        self.rounds = 0

    def chances(self, key: int, offer: SuffixOffer) -> list[float]:
        """Of each token to be the target's if all before it were."""
        odds = self._odds(key)
        return [chance * odds / (1 - chance + chance * odds) for chance in self._usual(offer)]

    def survivals(self, key: int, offer: SuffixOffer, *, least: float = 0.0) -> list[float]:
        """Of each token to be accepted at all; of those before the first whose chance is below the least."""
        odds, survival, made = self._odds(key), 1.0, list[float]()
        for chance in self._usual(offer):
            survival *= chance * odds / (1 - chance + chance * odds)
            if survival < least:
                break
            made.append(survival)
        return made

    def observe(self, key: int, offer: SuffixOffer, came: Sequence[int]) -> None:
        """Take what came in the place of an offer: of tokens behind the first wrong one nothing is known."""
        tries = hits = 0
        for drafted, token in zip(offer.tokens, came, strict=False):
            tries += 1
            if drafted != token:
                break
            hits += 1
        if not tries:
            return
        self.rounds += 1
        judged = offer.cut(tries)
        expected = sum(self._usual(judged))
        self._counts.add(self._cells(judged), [1.0] * hits + [0.0] * (tries - hits))
        self._counts.fade(POLICY.acceptance_memory)
        own = self._requests.setdefault(key, Own())
        own.fade(1 - 1 / POLICY.request_memory)
        own.count(tries, hits, expected)
        own.settle()

    def forget(self, key: int) -> None:
        """Drop a request that has ended; what it taught of all stays."""
        self._requests.pop(key, None)

    def _odds(self, key: int) -> float:
        """How much better a request fares than any."""
        own = self._requests.get(key)
        return 1.0 if own is None else exp(POLICY.level_width * own.level)

    def _usual(self, offer: SuffixOffer) -> Iterator[float]:
        """The same of any request."""
        rate, tries = self._counts.rate, POLICY.suffix_tries
        for cell, votes, voters in zip(self._cells(offer), offer.votes, offer.voters, strict=True):
            belief = POLICY.suffix_beliefs[cell // self._shares % self._matches] * votes / voters
            yield min(rate(cell, belief, tries), 0.999)

    def _cells(self, offer: SuffixOffer) -> Iterator[int]:
        """Of each token its kind. What matches grows by every token that is accepted."""
        kind = (2 if offer.behind else int(offer.shared)) * self._matches
        for match, votes, voters in zip(count(offer.match), offer.votes, offer.voters, strict=False):
            level = kind + max(0, bisect_right(POLICY.suffix_matches, match) - 1)
            share = len(POLICY.suffix_shares) + (votes > 1)  # all agree
            if votes != voters:
                share = bisect_right(POLICY.suffix_shares, votes / voters)
            yield level * self._shares + share
