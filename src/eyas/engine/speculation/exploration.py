"""When to draft although it does not pay: to find out whether it would. No torch.

While nothing is drafted nothing is learnt, so now and then one request is drafted for anyway. What probes lose is
accounted for: the time a step took beyond a plain one, less what its accepted drafts would have taken plainly. The
account may never exceed SHARE of all time, plus CREDIT plain steps to begin with; a probe that could overdraw it
waits. A good drafter's probes therefore cost next to nothing and follow each other; a hopeless one's become rare.

So do those of a good one where it is the cost of drafts that forbids them: once a streak of hits has changed nothing,
another would tell nothing new, unless drafts have meanwhile become much worse than they were then.
"""

from math import ceil, inf

SHARE = 0.005
"""Of all time, the part that probes may lose."""
CREDIT = 3.0
"""Plain steps that probes may lose before that."""
SHORTEST, LONGEST, GROWTH = 4.0, 32.0, 1.5
"""Steps between probes: at first, at most, and how the wait grows with every probe that found nothing."""
LONG_ENOUGH = 3
"""Probes in a row that were accepted and yet did not bring speculation back: then it is its cost that forbids it."""
SELDOM = 128.0
"""Steps between probes as long as that is so."""
WORSE = 0.7
"""Acceptance, as a part of what it was then, below which a hit is news again."""
MOST_LOSS = 2.0
"""Plain steps that one probe is charged at most: a shape's first step may hold a compilation, which comes once."""


class Exploration:
    """The account, and the wait until the next probe."""

    def __init__(self) -> None:
        self.lost = 0.0
        """Seconds."""
        self.total = 0.0
        self.count = 0
        self.streak = 0
        """Probes in a row that had a draft accepted: the next follow at once, each with twice the requests."""
        self._in_vain: float | None = None
        """Acceptance of first drafts when a streak changed nothing; None: no streak has, or that is no longer so."""
        self._wait = SHORTEST
        self._next = 0.0

    def due(self, step: int) -> bool:
        """Whether the wait is over."""
        return self.streak > 0 or step >= self._next

    def steps_left(self, step: int) -> int:
        """Steps until the next is due."""
        return ceil(self._next - step)

    def affords(self, loss: float, plain: float) -> bool:
        """Whether a probe may lose so many seconds, where a plain step takes `plain`."""
        return self.lost + loss <= SHARE * self.total + CREDIT * plain

    def settle(self, step: int, *, seconds: float, plain: float, saved: float, hit: bool, chance: float) -> None:
        """Book a probe: the step took `seconds` instead of `plain`, and its accepted drafts saved `saved`.

        `chance` is what the acceptance of first drafts is now taken for.
        """
        loss = min(seconds - plain, MOST_LOSS * plain) - saved
        self.lost = max(0.0, self.lost + loss)
        self.count += 1
        if self._in_vain is not None and chance < WORSE * self._in_vain:
            self._in_vain, self._wait = None, SHORTEST
        if self._in_vain is not None:
            self.streak, self._wait = 0, SELDOM
        elif not hit:
            self.streak, self._wait = 0, min(LONGEST, self._wait * GROWTH)
        elif self.streak < LONG_ENOUGH:
            self.streak, self._wait = self.streak + 1, SHORTEST
        else:
            self.streak, self._wait, self._in_vain = 0, SELDOM, chance
        self._next = step + self._wait

    def rest(self) -> None:
        """Speculation pays again: the next time it does not, probing starts afresh."""
        self.streak, self._in_vain = 0, None
        self._wait = SHORTEST
        self._next = -inf
