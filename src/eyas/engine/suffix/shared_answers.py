"""Recent answers, for later requests of the same caller.

Callers are told apart as the prefix cache does it, by `Request.cache_salt`: the server makes that of the API key, so
nothing that was said to one key is ever looked at for another. There is no way to share across salts. What enters are
the committed tokens of an answer that ended, which are the target's own; drafts never do, rejected or not, nor do
prompts.

Bounded by tokens and by the number of answers for each caller, by the number of callers, and by age.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from eyas.engine.suffix.config import SuffixConfig
from eyas.kernels.suffix_index import Continuation, SuffixIndex, SuffixLimits


class SharedAnswers:
    """The answers of all callers, each for themselves."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._callers: OrderedDict[str | None, tuple[SuffixIndex, deque[tuple[float, int]]]] = OrderedDict()
        """Of each caller the text, and of each answer when it came and where it begins, oldest first."""

    @property
    def bytes(self) -> int:
        """Memory that they can take."""
        return sum(index.bytes for index, _ in self._callers.values())

    def add(self, caller: str | None, answer: Sequence[int]) -> None:
        """Keep an answer, and let callers go that are too many or whose newest answer is too old."""
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
        if len(index) <= begins:  # it has begun anew
            starts.clear()
            begins = 0
        starts.append((self._clock(), begins))
        if len(starts) > config.max_cached_requests:
            starts.popleft()

    def propose(self, caller: str | None, context: Sequence[int], most: int) -> Continuation | None:
        """What followed the like of this in an answer to the same caller."""
        index, starts = self._callers.get(caller, (None, deque[tuple[float, int]]()))
        while starts and starts[0][0] < self._clock() - self._config.max_age_seconds:
            starts.popleft()
        if index is None or not starts:
            self._callers.pop(caller, None)
            return None
        self._callers.move_to_end(caller)
        return index.propose(context, most, since=starts[0][1])
