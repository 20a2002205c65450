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


class _Answers:
    """Those of one caller."""

    def __init__(self, config: SuffixConfig) -> None:
        self.index = SuffixIndex(config.max_cached_tokens, SuffixLimits(longest_match=config.max_tree_depth))
        self.starts: deque[tuple[float, int]] = deque()
        """Of each answer when it came and where it begins, oldest first."""


class SharedAnswers:
    """The answers of all callers, each for themselves."""

    def __init__(self, config: SuffixConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._callers: OrderedDict[str | None, _Answers] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory that they can take."""
        return sum(answers.index.bytes for answers in self._callers.values())

    def add(self, caller: str | None, answer: Sequence[int]) -> None:
        """Keep an answer."""
        config = self._config
        if not config.max_cached_requests or len(answer) < 2:
            return
        answers = self._callers.get(caller)
        if answers is None:
            answers = self._callers[caller] = _Answers(config)
        self._callers.move_to_end(caller)
        self._forget_callers()
        answer = answer[-(answers.index.capacity - 1) :]
        begins = len(answers.index)
        answers.index.extend(answer)
        answers.index.end_text()
        if len(answers.index) <= begins:  # it has begun anew
            answers.starts.clear()
            begins = 0
        answers.starts.append((self._clock(), begins))
        if len(answers.starts) > config.max_cached_requests:
            answers.starts.popleft()

    def _forget_callers(self) -> None:
        """Let those go that are too many, and those whose newest answer is too old."""
        oldest = self._clock() - self._config.max_age_seconds
        for caller, answers in list(self._callers.items())[:-1]:  # the newest has just got an answer
            if len(self._callers) > self._config.max_callers or answers.starts[-1][0] < oldest:
                del self._callers[caller]

    def propose(self, caller: str | None, context: Sequence[int], most: int) -> Continuation | None:
        """What followed the like of this in an answer to the same caller."""
        answers = self._callers.get(caller)
        if answers is None:
            return None
        oldest, starts = self._clock() - self._config.max_age_seconds, answers.starts
        while starts and starts[0][0] < oldest:
            starts.popleft()
        if not starts:
            del self._callers[caller]
            return None
        self._callers.move_to_end(caller)
        return answers.index.propose(context, most, since=starts[0][1])
