"""What may follow a request's text: looked up in the text itself, and in earlier answers to the same caller.

Every request has an index of its own, of its prompt and of what was committed of its answer. It is made when the
request is first looked up and grows with it; preemption does not touch it.
"""

from array import array
from collections.abc import Callable

from eyas.engine.request import SequenceState
from eyas.engine.speculation.suffix_acceptance import RoundOffer, SuffixAcceptance
from eyas.engine.suffix.config import MOST_DRAFTS, SuffixConfig
from eyas.engine.suffix.lookup_gate import LookupGate
from eyas.engine.suffix.shared_answers import SharedAnswers
from eyas.kernels.suffix_index import Continuation, SuffixIndex, SuffixLimits

FIRST_ROOM = 256
"""Tokens that an answer may come to before its index is made anew, twice as large."""


class SuffixDrafts:
    """Continuations for requests under way."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self.acceptance = SuffixAcceptance()
        self.answers = SharedAnswers(config, clock)
        self.gate = LookupGate()
        self._texts: dict[int, tuple[SuffixIndex, array[int]]] = {}
        """The index of each request that was looked up, and the tokens that it has."""
        self._seqs: dict[int, SequenceState] = {}
        """Requests that may have suffix drafts, whether they were looked up or not."""

    @property
    def bytes(self) -> int:
        """Memory that all indexes can take."""
        return self.answers.bytes + sum(index.bytes for index, _ in self._texts.values())

    def offer(self, seq: SequenceState, deepest: int) -> RoundOffer | None:
        """The most promising continuation behind a request's tokens, so deep behind what steps under way may give."""
        config, known, depth = self.config, len(seq.tokens), seq.request.speculation.depth
        ahead = sum(flight.most for flight in seq.flights)
        most = min(deepest, depth or config.deepest, config.deepest, seq.limit - known - 1 - ahead)
        index, text = self._follow(seq)
        if most <= 0 or len(text) < known:
            return None
        context, offers = text[-config.max_tree_depth :], list[RoundOffer]()
        shared = self.answers.propose(seq.request.cache_salt, context, most + ahead)
        for found in (index.propose(context, most + ahead), shared):
            if found is not None and (within := self._within(found, ahead)).tokens:
                offer = RoundOffer(known=known, most=most, shared=found is shared, **within._asdict())
                offer.chances = self.acceptance.survivals(seq.key, offer)[ahead:]
                offers.append(offer)
        return max(offers, key=lambda offer: sum(offer.chances), default=None)

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that may have suffix drafts."""
        self._seqs[seq.key] = seq

    def observe(self, key: int, offer: RoundOffer) -> None:
        """Take what came in the place of an offer; requests that were cancelled meanwhile teach nothing."""
        seq = self._seqs.get(key)
        if seq is not None:
            self.acceptance.observe(key, offer, seq.tokens[offer.known :])

    def forget(self, key: int) -> None:
        """Drop a request that ended; its answer may serve later ones."""
        self._texts.pop(key, None)
        self.acceptance.forget(key)
        self.gate.forget(key)
        seq = self._seqs.pop(key, None)
        if seq is not None:
            self.answers.add(seq.request.cache_salt, seq.tokens[seq.prompt_length :])

    def _follow(self, seq: SequenceState) -> "tuple[SuffixIndex, array[int]]":
        """The index of a request, with all its tokens, or as many more of a long prompt as a step has time for."""
        index, text = self._texts.get(seq.key, (None, array("i")))
        if index is None or len(seq.tokens) > index.capacity:
            room = max(len(seq.tokens) + FIRST_ROOM, 0 if index is None else 2 * index.capacity)
            limits = SuffixLimits(longest_match=self.config.max_tree_depth)
            index, text = SuffixIndex(min(room, max(seq.limit, FIRST_ROOM)), limits), array("i")
            self._texts[seq.key] = index, text
        new = array("i", seq.tokens[len(text) : len(text) + index.portion])
        index.extend(new)
        text.extend(new)
        return index, text

    def _within(self, found: Continuation, ahead: int) -> Continuation:
        """A continuation as far as the limits allow, and as many tokens more as are under way."""
        allowed = max(1, int(min(self.config.max_spec_factor * found.match, MOST_DRAFTS)))
        most, count = min(len(found.tokens), allowed + ahead), 0
        while count < most and found.votes[count] >= self.config.min_token_prob * found.voters[count]:
            count += 1
        return Continuation(found.match, found.tokens[:count], found.votes[:count], found.voters[:count])
