"""Suffix drafts: continuations found in a request's own text and in earlier answers to the same caller.

Each request has an index of its prompt and its committed answer. It is built at the first look-up and grows with the
request; preemption does not affect it.
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
"""Answer tokens that a new index has room for; a full index is rebuilt twice as large."""


class SuffixDrafts:
    """Finds continuations for running requests."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self.acceptance = SuffixAcceptance()
        self.answers = SharedAnswers(config, clock)
        self.gate = LookupGate()
        self._texts: dict[int, tuple[SuffixIndex, array[int]]] = {}
        """Index of each request that was looked up, with the indexed tokens."""
        self._seqs: dict[int, SequenceState] = {}
        """All requests that may have suffix drafts."""

    @property
    def bytes(self) -> int:
        return self.answers.bytes + sum(index.bytes for index, _ in self._texts.values())

    def offer(self, seq: SequenceState, deepest: int) -> RoundOffer | None:
        """Find the best continuation of a request, up to `deepest` tokens behind those that steps in flight may add."""
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
        """Register a request that may have suffix drafts."""
        self._seqs[seq.key] = seq

    def observe(self, key: int, offer: RoundOffer) -> None:
        """Learn from the tokens that came after an offer; cancelled requests are ignored."""
        seq = self._seqs.get(key)
        if seq is not None:
            self.acceptance.observe(key, offer, seq.tokens[offer.known :])

    def forget(self, key: int) -> None:
        """Drop a finished request and keep its answer for later ones."""
        self._texts.pop(key, None)
        self.acceptance.forget(key)
        self.gate.forget(key)
        seq = self._seqs.pop(key, None)
        if seq is not None:
            self.answers.add(seq.request.cache_salt, seq.tokens[seq.prompt_length :])

    def _follow(self, seq: SequenceState) -> "tuple[SuffixIndex, array[int]]":
        """Update a request's index; a long prompt is indexed in portions, one per step."""
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
        """Cut a continuation to the limits, plus the tokens that are in flight."""
        allowed = max(1, int(min(self.config.max_spec_factor * found.match, MOST_DRAFTS)))
        most, count = min(len(found.tokens), allowed + ahead), 0
        while count < most and found.votes[count] >= self.config.min_token_prob * found.voters[count]:
            count += 1
        return Continuation(found.match, found.tokens[:count], found.votes[:count], found.voters[:count])
