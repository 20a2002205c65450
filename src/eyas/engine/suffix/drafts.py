"""What may follow a request's text: looked up in the text itself, and in earlier answers to the same caller.

Every request has an index of its own, of its prompt and of what was committed of its answer. It is made when the
request first decodes and grows with it; preemption does not touch it.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eyas.engine.request import SequenceState
from eyas.engine.speculation.suffix_acceptance import SuffixAcceptance, SuffixOffer
from eyas.engine.suffix.config import MOST_DRAFTS, SuffixConfig
from eyas.engine.suffix.shared_answers import SharedAnswers
from eyas.kernels.suffix_index import Continuation, SuffixIndex, SuffixLimits

FIRST_ROOM = 256
"""Tokens that an answer may come to before its index is made anew, twice as large."""


@dataclass(slots=True)
class _OwnText:
    """A request's text."""

    index: SuffixIndex
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    """What the index has."""


class SuffixDrafts:
    """Continuations for requests under way."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.acceptance = SuffixAcceptance()
        self.answers = SharedAnswers(config, clock)
        self._texts: dict[int, _OwnText] = {}
        self._seqs: dict[int, SequenceState] = {}
        """Requests that may have suffix drafts, whether they were looked up or not."""
        self.bound = set[int]()
        """Those of a fixed depth: they have them wherever there are any."""

    @property
    def bytes(self) -> int:
        """Memory that all indexes can take."""
        return self.answers.bytes + sum(text.index.bytes for text in self._texts.values())

    def offer(
        self, seq: SequenceState, most: int, ahead: Sequence[int] = (), *, agreed: bool = False, under_way: int = 0
    ) -> SuffixOffer | None:
        """The most promising continuation behind a request's tokens, or behind tokens that may come next; None: none.

        Of at most so many tokens; so many more while as many may be `under_way`, which it must tell first. What may
        come next is `agreed` where it is what the text itself leads to.
        """
        text, config = self._follow(seq), self.config
        if len(text.tokens) < len(seq.tokens):
            return None
        context = text.tokens[-config.max_tree_depth :] + array("i", ahead)
        most = min(most, config.deepest) + under_way
        own = text.index.propose(context, most, ahead=len(ahead))
        shared = self.answers.propose(seq.request.cache_salt, context, most)
        behind = bool(ahead) and not agreed
        offers = [
            offer
            for found in (own, shared)
            if found is not None and (offer := self._within(found, under_way, shared=found is shared, behind=behind))
        ]
        if len(offers) < 2:
            return offers[0] if offers else None
        return max(offers, key=lambda offer: sum(self.acceptance.survivals(seq.key, offer)))

    def admit(self, seq: SequenceState) -> None:
        """Take note of a request that may have suffix drafts."""
        self._seqs[seq.key] = seq
        if seq.request.speculation.mode == "fixed":
            self.bound.add(seq.key)

    def forget(self, key: int) -> None:
        """Drop a request that ended; its answer may serve later ones."""
        self._texts.pop(key, None)
        self.acceptance.forget(key)
        self.bound.discard(key)
        seq = self._seqs.pop(key, None)
        if seq is not None:
            self.answers.add(seq.request.cache_salt, seq.tokens[seq.prompt_length :])

    def _follow(self, seq: SequenceState) -> _OwnText:
        """The index of a request, with all its tokens, or as many more of a long prompt as a step has time for."""
        text = self._texts.get(seq.key)
        if text is None or len(seq.tokens) > text.index.capacity:
            limits = SuffixLimits(longest_match=self.config.max_tree_depth)
            room = max(len(seq.tokens) + FIRST_ROOM, 0 if text is None else 2 * text.index.capacity)
            text = self._texts[seq.key] = _OwnText(SuffixIndex(min(room, max(seq.limit, FIRST_ROOM)), limits))
        if len(text.tokens) < len(seq.tokens):
            known = len(text.tokens)
            new = array("i", seq.tokens[known : known + text.index.portion])
            text.index.extend(new)
            text.tokens += new
        return text

    def _within(self, found: Continuation, under_way: int, *, shared: bool, behind: bool) -> SuffixOffer | None:
        """A continuation as far as the limits allow, and as many tokens more as are under way."""
        config = self.config
        allowed = max(1, int(min(config.max_spec_factor * found.match, MOST_DRAFTS)))
        most = min(len(found.tokens), allowed + under_way)
        count = 0
        while count < most and found.votes[count] >= config.min_token_prob * found.voters[count]:
            count += 1
        offer = SuffixOffer(found.tokens, found.match, found.votes, found.voters, shared, behind)
        return offer.cut(count) if count else None
