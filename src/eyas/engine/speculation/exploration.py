"""When to draft although it does not pay: to find out whether it would. No torch.

While nothing is drafted nothing is learnt, so now and then one request is drafted for anyway. What probes lose is
accounted for: the time a step took beyond a plain one, less what its accepted drafts would have taken plainly. The
account may never exceed SHARE of all time, plus CREDIT plain steps to begin with; a probe that could overdraw it
waits. A good drafter's probes therefore cost next to nothing and follow each other; a hopeless one's become rare.

A part of what drafts have saved is put by for probes, up to some plain steps, and is spent before the account. Where
drafts have paid, they soon may again: an answer leaves a passage that no drafter guesses, or begins to repeat itself.
So as long as there is something put by, the next probe is never far.

Where passes are captured and requests are few, there are trials as well (`trial.py`), on the same account: after some
probes in a row that hit, or when the account can bear what may be lost. What one gains pays for the next.

So do those of a good one where it is the cost of drafts that forbids them: once a streak of hits has changed nothing,
another would tell nothing new, unless drafts have meanwhile become much worse than they were then.

A drafter that is hopeless for long does not even read along: then a new request is followed now and then, for one
probe.
"""

from math import ceil, inf

from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.trial import DraftTrial


class Exploration:
    """The account, and the wait until the next probe."""

    def __init__(self) -> None:
        self.lost = 0.0
        """Seconds."""
        self.total = 0.0
        self.put_by = 0.0
        """Seconds of those that drafts have saved."""
        self.count = 0
        self.streak = 0
        """Probes in a row that had a draft accepted: the next follow at once, each with twice the requests."""
        self.misses = 0
        """Probes of late that had none accepted; one that had makes up for some."""
        self._in_vain: float | None = None
        """Acceptance of first drafts when a streak changed nothing; None: no streak has, or that is no longer so."""
        self._wait = POLICY.probe_shortest_wait
        self._next = 0.0
        self._admitted = -inf
        """The step in which a request was followed for a probe's sake."""

    def due(self, step: int) -> bool:
        """Whether the wait is over."""
        return self.streak > 0 or step >= self._next

    def steps_left(self, step: int) -> int:
        """Steps until the next is due."""
        return ceil(self._next - step)

    @property
    def hopeless(self) -> bool:
        """Whether probes have found nothing for long."""
        return self.misses >= POLICY.hopeless_misses

    def admits(self, step: int) -> bool:
        """Whether a request that comes now is to be followed for the next probe's sake, while no other is."""
        if not self.due(step) or step < self._admitted + max(self._wait, POLICY.probe_resting_wait):
            return False
        self._admitted = step
        return True

    def affords(self, loss: float, plain: float) -> bool:
        """Whether a probe may lose so many seconds, where a plain step takes `plain`."""
        return self.lost + loss - self.put_by <= POLICY.probe_share * self.total + POLICY.probe_credit * plain

    def put_aside(self, saved: float, plain: float) -> None:
        """Keep a part of the seconds that drafts have saved, where a plain step takes `plain`; a loss is taken off."""
        kept = self.put_by + POLICY.probe_part_of_gains * saved
        self.put_by = min(max(0.0, kept), POLICY.probe_most_put_by * plain)

    def settle(self, step: int, *, seconds: float, plain: float, saved: float, hit: bool, chance: float) -> None:
        """Book a probe: the step took `seconds` instead of `plain`, and its accepted drafts saved `saved`.

        `chance` is what the acceptance of first drafts is now taken for.
        """
        loss = min(seconds - plain, POLICY.probe_most_loss * plain) - saved
        self._book(loss, misses=1, hit=hit)
        longest, seldom = POLICY.probe_longest_wait, POLICY.probe_seldom
        if self.put_by > max(0.0, loss):
            longest = seldom = POLICY.probe_paid_wait
        if self._in_vain is not None and chance < POLICY.probe_worse * self._in_vain:
            self._in_vain, self._wait = None, POLICY.probe_shortest_wait
        if self._in_vain is not None:
            self.streak, self._wait = 0, seldom
        elif not hit:
            self.streak, self._wait = 0, min(longest, self._wait * POLICY.probe_wait_growth)
        elif self.streak < POLICY.probe_streak:
            self.streak, self._wait = self.streak + 1, POLICY.probe_shortest_wait
        else:
            self.streak, self._wait, self._in_vain = 0, seldom, chance
        self._next = step + self._wait

    def end_trial(self, step: int, trial: DraftTrial) -> None:
        """Book a trial; what it gained beyond what was lost before is put by for others."""
        gained = max(0.0, trial.saved - self.lost)
        self._book(-trial.saved, misses=trial.steps, hit=trial.accepted > 0)
        self.put_by = min(self.put_by + gained, POLICY.probe_most_put_by * trial.plain)
        longest = POLICY.probe_paid_wait if self.put_by > 0 else POLICY.probe_longest_wait
        longer = min(longest, self._wait * POLICY.probe_wait_growth)
        self.streak = 0
        self._wait = POLICY.probe_shortest_wait if trial.saved > 0 else longer
        self._next = step + self._wait

    def _book(self, loss: float, *, misses: int, hit: bool) -> None:
        """Take seconds off what was put by, then onto the account."""
        paid = min(self.put_by, max(0.0, loss))
        self.put_by -= paid
        self.lost = max(0.0, self.lost + loss - paid)
        self.count += 1
        self.misses += -POLICY.probe_hit_outweighs if hit else misses
        self.misses = min(max(0, self.misses), POLICY.hopeless_misses)

    def rest(self) -> None:
        """Speculation pays again: the next time it does not, probing starts afresh."""
        self.streak, self.misses, self._in_vain = 0, 0, None
        self._wait = POLICY.probe_shortest_wait
        self._next = -inf
