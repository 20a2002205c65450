"""One account for all that drafting may lose, and the wait between probes. No torch.

While nothing is drafted nothing is learnt, so now and then a step drafts although that does not seem to pay: a probe.
A stretch of drafting, whether it began with a probe or with a promise, is a spell. What a spell has saved so far is
compared with the most that it had ever saved: that drawdown is what it loses if it ends now.

    balance   a few plain steps of credit, a small share of all time, and a part of what spells have saved, less what
              ended spells have lost. No step drafts whose drawdown, if none of its drafts is accepted, exceeds it
    wait      after a spell that saved nothing the next probe waits, longer with every such spell in a row

So a useless drafter loses the credit and the share, whatever is believed of it; a good one earns its probes.
Savings are told from typical times and from drafts that really were accepted, so a step that was late for a reason of
its own costs nothing here.
"""

CREDIT = 2.2
"""Plain steps that may be lost in the beginning."""
DRAWDOWN = 6.0
"""Plain steps beyond the account that a spell may lose although its drafts were accepted before."""
AT_ONCE = 0.5
"""Part of the balance that one spell may lose: others will have to follow."""
SHARE = 0.004
"""Part of all time that may be lost later."""
PUT_BY = 0.2
"""Part of the seconds saved that may be lost again."""
MOST_PUT_BY = 32.0
"""The most of these, in plain steps."""
PATIENCE = 8
"""Steps until the next probe, times the spells in a row that saved nothing."""


class Account:
    """What may be lost, and when the next probe is due."""

    def __init__(self) -> None:
        self.total = 0.0
        """Seconds of all steps."""
        self.lost = 0.0
        """Seconds that ended spells have lost and not paid from savings."""
        self.earned = 0.0
        """Seconds put by."""
        self.saved = 0.0
        """Seconds that drafts have saved so far, losses taken off."""
        self.spells = 0
        self.misses = 0
        """Spells in a row that saved nothing."""
        self.began = 0
        """Step of the latest choice to draft."""
        self._spell: tuple[float, float] | None = None
        """Seconds that the spell under way has saved, and the most it had saved."""
        self._due = 0
        self._plain = 0.0
        """Seconds of a plain step, when a step was last booked."""

    @property
    def in_spell(self) -> bool:
        """Whether drafts are under way whose fate is not fully known."""
        return self._spell is not None

    @property
    def overdrawn(self) -> bool:
        """Whether the spell has lost more than any that deserves to be believed in."""
        return self.left(self._plain) < -DRAWDOWN * self._plain

    def due(self, now: int) -> bool:
        """Whether a probe may begin."""
        return self._spell is None and now >= self._due

    def wait(self, now: int, most: int) -> int:
        """Steps until a probe may begin: one where a spell ends first, and as many as may be where it is due already,
        but cannot be afforded."""
        if self._spell is not None:
            return 1
        return most if now >= self._due else self._due - now

    def left(self, plain: float) -> float:
        """Seconds that this spell may still lose, where a plain step takes `plain`."""
        saved, best = self._spell or (0.0, 0.0)
        return AT_ONCE * (self._balance(plain) + self.earned) - (best - saved)

    def _balance(self, plain: float) -> float:
        return CREDIT * plain + SHARE * self.total - self.lost

    def begin(self, now: int = 0) -> None:
        """Drafts are about to be made."""
        self._spell, self.began = self._spell or (0.0, 0.0), now

    def book(self, saved: float, plain: float) -> None:
        """Take what a step with drafts has saved."""
        self._plain = plain
        before, best = self._spell or (0.0, 0.0)
        now = before + saved
        if now > best:
            self.earned = min(self.earned + PUT_BY * (now - best), max(self.earned, MOST_PUT_BY * plain))
        self._spell = now, max(now, best)
        self.saved += saved

    def end(self, now: int, plain: float) -> None:
        """A plain step that was chosen behind them was observed: the drafts have all been booked."""
        if self._spell is None:
            return
        saved, best = self._spell
        drawdown, self._spell = best - saved, None
        paid = min(self.earned, drawdown)
        self.earned -= paid
        if saved <= 0:  # one that was believed in with good reason may have lost more; that is no price of probes
            self.lost += min(drawdown - paid, AT_ONCE * max(0.0, self._balance(plain)))
        self.spells += 1
        self.misses = 0 if saved > 0 else self.misses + 1
        self._due = now + PATIENCE * self.misses
