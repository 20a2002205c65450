"""How drafts fare in real answers, request by request, since the drafter at work came. Counts alone, no text.

A drafter is judged by what depends on it and on little else. Tokens per pass would do for users, and depend on the load
too: the controller drafts less deep for many requests at once. So drafts are counted by position: how often the
draft of a position was verified behind accepted ones, and how often it was accepted. Of a tree the first candidates
count, as if they had been a chain. Suffix drafts are no drafter's merit and are left out.

Requests that were under way at a swap, even those whose prompt was being read, count neither for the drafter before it
nor for the one behind it: what the drafter had read of them was read with the old weights.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from eyas.engine.output import OutputDelta

POSITIONS = 3
"""Deeper ones are reached too seldom to tell much."""
MOST_REQUESTS = 1024
"""The latest that are remembered of a drafter."""


@dataclass(kw_only=True, slots=True)
class RoundTally:
    """What one request's drafts came to."""

    passes: int = 0
    """Passes of the target, whether they verified drafts or not."""
    tries: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    hits: list[int] = field(default_factory=lambda: [0] * POSITIONS)

    def count(self, delta: OutputDelta) -> None:
        """Take what one step gave."""
        self.passes += 1
        if delta.ranks is None:
            drafted = delta.drafted - delta.suffix_drafted
            accepted = min(delta.accepted, drafted)
        else:
            drafted, accepted = len(delta.ranks), sum(1 for _ in takewhile(lambda rank: rank == 1, delta.ranks))
        for position in range(min(drafted, accepted + 1, POSITIONS)):
            self.tries[position] += 1
            self.hits[position] += position < accepted


class RoundLog:
    """The tallies of the drafter at work. Only the event loop touches it."""

    def __init__(self) -> None:
        self.passes = 0
        """Of requests that began since the drafter came."""
        self._tallies: deque[RoundTally] = deque(maxlen=MOST_REQUESTS)
        self._open: dict[Hashable, RoundTally | None] = {}
        """By request; None if it began before the drafter came."""

    @property
    def tallies(self) -> list[RoundTally]:
        """Of requests that have got something, the oldest first; those under way go on counting."""
        return [tally for tally in self._tallies if tally.passes]

    def begin(self, request: Hashable) -> None:
        """A request goes to the engine."""
        begun = self._open[request] = RoundTally()
        self._tallies.append(begun)

    def observe(self, request: Hashable, deltas: Sequence[OutputDelta]) -> None:
        """Take what steps gave a request."""
        tally = self._open.get(request)
        if tally is None:
            return
        for delta in deltas:
            if delta.tokens:
                tally.count(delta)
                self.passes += 1

    def end(self, request: Hashable) -> None:
        """A request has ended, however it did."""
        self._open.pop(request, None)

    def begin_anew(self) -> None:
        """Another drafter is at work."""
        self.passes = 0
        self._tallies.clear()
        self._open = dict.fromkeys(self._open)
