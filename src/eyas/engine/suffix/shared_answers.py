"""Recent answers, searched for suffix drafts of later requests of the same caller.

Callers are separated by `Request.cache_salt`, like the prefix cache. The server derives it from the API key, so no key
sees another key's answers; there is no sharing across salts. Only the committed tokens of finished answers are kept,
never drafts or prompts.

Bounded by tokens and answers per caller, by callers, and by age.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from eyas.engine.suffix.config import SuffixConfig
from eyas.kernels.suffix_index import Continuation, SuffixIndex, SuffixLimits


class SharedAnswers:
    """Indexes of answers, one per caller."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._callers: OrderedDict[str | None, tuple[SuffixIndex, deque[tuple[float, int]]]] = OrderedDict()
        """Per caller: the index, and each answer's time and start, oldest first."""

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index, _ in self._callers.values())

    def add(self, caller: str | None, answer: Sequence[int]) -> None:
        """Keep an answer; drop callers that are too many or too old."""
        config, oldest = self._config, self._clock() - self._config.max_age_seconds
        if not config.max_cached_requests or len(answer) < 2:
            return
        if caller not in self._callers:
            limits = SuffixLimits(longest_match=config.max_tree_depth)
            self._callers[caller] = SuffixIndex(config.max_cached_tokens, limits), deque()
        self._callers.move_to_end(caller)
        for other, (_, theirs) in list(self._callers.items())[:-1]:
            if len(self._callers) > config.max_callers or theirs[-1][0] < oldest:
                del self._callers[other]
        index, starts = self._callers[caller]
        begins = len(index)
        index.extend(answer[-(index.capacity - 1) :])
        index.end_text()
        if len(index) <= begins:  # the index was full and started over
            starts.clear()
            begins = 0
        starts.append((self._clock(), begins))
        if len(starts) > config.max_cached_requests:
            starts.popleft()

    def propose(self, caller: str | None, context: Sequence[int], most: int) -> Continuation | None:
        """Find a continuation of this context in the caller's answers."""
        index, starts = self._callers.get(caller, (None, deque[tuple[float, int]]()))
        while starts and starts[0][0] < self._clock() - self._config.max_age_seconds:
            starts.popleft()
        if index is None or not starts:
            self._callers.pop(caller, None)
            return None
        self._callers.move_to_end(caller)
        return index.propose(context, most, since=starts[0][1])
