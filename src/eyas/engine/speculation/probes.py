"""The account that limits what drafting may lose, and the wait between probes. No torch.

Nothing is learned without drafting, so now and then a step drafts although that does not seem to pay: a probe. A period
of drafting, whether it began with a probe or not, is a spell. A spell's drawdown is the difference between the most
that it had saved at any time and what it has saved now.

    balance   a credit of a few plain steps, plus a small share of all time, plus a part of earlier savings, minus
              losses of ended spells. A step may draft only if its drawdown stays below, even if all drafts are rejected
    wait      after spells that saved nothing, the next probe waits longer for each of them in a row

So a useless drafter loses at most the credit and the share, and a good one earns its probes. Savings are computed from
typical step times and accepted drafts, so a step that is late for another reason costs nothing here.
"""

CREDIT = 2.2
"""Plain steps that may be lost at the start."""
DRAWDOWN = 6.0
"""Plain steps beyond the account that a spell with accepted drafts may lose."""
AT_ONCE = 0.5
"""Part of the balance that one spell may lose, so that others can follow."""
SHARE = 0.004
"""Part of all time that may be lost later."""
PUT_BY = 0.2
"""Part of the savings that may be lost again."""
MOST_PUT_BY = 32.0
"""Most savings kept for that, in plain steps."""
PATIENCE = 8
"""Steps until the next probe, per failed spell in a row."""


class Account:
    """Balance of drafting, and when the next probe is due."""

    def __init__(self) -> None:
        self.total = 0.0
        self.lost = 0.0
        """Seconds lost by ended spells, minus what savings paid for."""
        self.earned = 0.0
        """Seconds of savings that may be lost again."""
        self.saved = 0.0
        """Net seconds saved by drafts."""
        self.spells = 0
        self.misses = 0
        """Failed spells in a row."""
        self.began = 0
        """Step of the latest choice to draft."""
        self._spell: tuple[float, float] | None = None
        """Seconds that the current spell has saved, now and at its best."""
        self._due = 0
        self._plain = 0.0
        """Seconds of a plain step at the latest booking."""

    @property
    def in_spell(self) -> bool:
        return self._spell is not None

    @property
    def overdrawn(self) -> bool:
        """Whether the current spell has lost more than even a proven drafter may."""
        return self.left(self._plain) < -DRAWDOWN * self._plain

    def due(self, now: int) -> bool:
        return self._spell is None and now >= self._due

    def wait(self, now: int, most: int) -> int:
        """Steps until a probe may begin, at most `most`; 1 during a spell, `most` if a probe is due but was not run."""
        if self._spell is not None:
            return 1
        return most if now >= self._due else self._due - now

    def left(self, plain: float) -> float:
        """Seconds that the current spell may still lose; a plain step takes `plain`."""
        saved, best = self._spell or (0.0, 0.0)
        return AT_ONCE * (self._balance(plain) + self.earned) - (best - saved)

    def _balance(self, plain: float) -> float:
        return CREDIT * plain + SHARE * self.total - self.lost

    def begin(self, now: int = 0) -> None:
        """Start or continue a spell."""
        self._spell, self.began = self._spell or (0.0, 0.0), now

    def book(self, saved: float, plain: float) -> None:
        """Book the seconds that a step with drafts saved."""
        self._plain = plain
        before, best = self._spell or (0.0, 0.0)
        now = before + saved
        if now > best:
            self.earned = min(self.earned + PUT_BY * (now - best), max(self.earned, MOST_PUT_BY * plain))
        self._spell = now, max(now, best)
        self.saved += saved

    def end(self, now: int, plain: float) -> None:
        """End the spell, at a plain step chosen after it, when all its drafts are booked."""
        if self._spell is None:
            return
        saved, best = self._spell
        drawdown, self._spell = best - saved, None
        paid = min(self.earned, drawdown)
        self.earned -= paid
        if saved <= 0:  # probes pay for losses of failed spells only, not for those of spells that had saved time
            self.lost += min(drawdown - paid, AT_ONCE * max(0.0, self._balance(plain)))
        self.spells += 1
        self.misses = 0 if saved > 0 else self.misses + 1
        self._due = now + PATIENCE * self.misses
