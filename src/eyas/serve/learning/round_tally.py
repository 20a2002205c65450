"""Counts drafts and acceptance in real answers, by request, since the drafter in service was swapped in.

The measure should depend on the drafter and on little else. Tokens per pass matter to users, but depend on the load
too: the controller drafts less deep for many requests at once. Drafts are therefore counted by position: how often the
draft of a position was verified behind accepted ones, and how often it was accepted. In a tree the first candidates
count, as if they were a chain. Suffix drafts do not count.

Requests that ran during a swap, even those in prefill, count for neither drafter: their drafter states come from the
old weights.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from eyas.engine.output import OutputDelta

POSITIONS = 3
"""Positions that are counted; deeper ones are reached too seldom."""
MOST_REQUESTS = 1024
"""The latest requests of a drafter that are kept."""


@dataclass(kw_only=True, slots=True)
class RoundTally:
    """The counts of one request's drafts."""

    passes: int = 0
    """Passes of the target, whether they verified drafts or not."""
    tries: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    hits: list[int] = field(default_factory=lambda: [0] * POSITIONS)

    def count(self, delta: OutputDelta) -> None:
        """Count one step."""
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
    """The tallies of the drafter in service. It is used on the event loop only."""

    def __init__(self) -> None:
        self.passes = 0
        """Passes of requests that began after the swap."""
        self._tallies: deque[RoundTally] = deque(maxlen=MOST_REQUESTS)
        self._open: dict[Hashable, RoundTally | None] = {}
        """Tallies by request; None if it began before the swap."""

    @property
    def tallies(self) -> list[RoundTally]:
        """The tallies of requests with output, the oldest first; running requests keep counting."""
        return [tally for tally in self._tallies if tally.passes]

    def begin(self, request: Hashable) -> None:
        """Open the tally of a request."""
        begun = self._open[request] = RoundTally()
        self._tallies.append(begun)

    def observe(self, request: Hashable, deltas: Sequence[OutputDelta]) -> None:
        """Count steps of a request."""
        tally = self._open.get(request)
        if tally is None:
            return
        for delta in deltas:
            if delta.tokens:
                tally.count(delta)
                self.passes += 1

    def end(self, request: Hashable) -> None:
        """Close the tally of a request."""
        self._open.pop(request, None)

    def begin_anew(self) -> None:
        """Start again after a swap."""
        self.passes = 0
        self._tallies.clear()
        self._open = dict.fromkeys(self._open)
