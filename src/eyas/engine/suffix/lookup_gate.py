"""Whether requests are looked up at all, by what that did to the engine's speed. No torch.

Suffix drafts are weighed draft by draft (`suffix_choice.py`), but looking up, sending and judging them is work of the
host, and where a device is fast the host sets the pace: then all of it together may lose although each draft pays. What
it does is hard to foresee and easy to measure: so rounds are run with look-ups for a while and without for a while, and
their tokens per second are compared. The better way runs for long, the other one in short windows, ever more rarely
while the answer stays the same.

Numbers of requests are apart: with few of them a round waits for the device, with many for the host.
"""

from dataclasses import dataclass, field
from typing import Any

from eyas.engine.speculation.cost_model import bucket_of

SHORT = 16
"""Rounds of a window of the way that is not preferred."""
LONG, LONGEST = 128, 2048
"""Rounds that the other one runs between two of them: four times as many each time, up to the longest."""
SETTLING = 2
"""Rounds of a window that do not count: they were prepared while the one before it ran."""
ENOUGH = 2 * SHORT
"""Rounds that either way needs before one is preferred."""
WORTH = 1.02
"""How much faster rounds with look-ups must be: less is noise, and most often that of other text."""
MEMORY = 512
"""Rounds after which one weighs a third of what it did."""


@dataclass
class _Way:
    """Rounds with look-ups, or without."""

    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.rounds += 1
        self.tokens += (tokens - self.tokens) * self._weight
        self.seconds += (seconds - self.seconds) * self._weight

    @property
    def _weight(self) -> float:
        return max(1 / self.rounds, 1 / MEMORY)

    @property
    def speed(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Ways:
    """Both, for rounds of so many requests."""

    of: dict[bool, _Way] = field(default_factory=lambda: {True: _Way(), False: _Way()})
    """By whether requests are looked up."""
    now: bool = True
    left: int = SETTLING + ENOUGH
    """Rounds of this window."""
    settling: int = SETTLING
    long: int = LONG
    preferred: bool | None = None

    def turn(self) -> None:
        """Begin another window."""
        if min(way.rounds for way in self.of.values()) < ENOUGH:
            self.now, self.left = not self.now, SETTLING + ENOUGH
        elif self.now == self.preferred:
            self.now, self.left = not self.now, SETTLING + SHORT
        else:
            better = self.of[True].speed > WORTH * self.of[False].speed
            self.long = min(4 * self.long, LONGEST) if better == self.preferred else LONG
            self.preferred = self.now = better
            self.left = self.long
        self.settling = SETTLING


class LookupGate:
    """Says whether the next round's requests are looked up."""

    def __init__(self) -> None:
        self._ways: dict[int, _Ways] = {}

    def is_open(self, rows: int) -> bool:
        """Whether so many requests are."""
        ways = self._ways.get(bucket_of(rows, 1))
        return ways is None or ways.now

    def observe(self, rows: int, *, looked_up: bool, tokens: int, seconds: float) -> None:
        """Take what a round that only decoded gave, and how long after the one before it."""
        ways = self._ways.setdefault(bucket_of(rows, 1), _Ways())
        if looked_up != ways.now:
            return  # it was launched in the window before
        ways.left -= 1
        if ways.settling:
            ways.settling -= 1
        else:
            ways.of[looked_up].add(tokens, seconds)
        if ways.left <= 0:
            ways.turn()

    def report(self) -> dict[int, dict[str, Any]]:
        """By requests, up to so many: whether they are looked up, and tokens per second either way."""
        return {
            rows: {
                "looked_up": ways.preferred,
                "tokens_per_second": ways.of[True].speed,
                "tokens_per_second_without": ways.of[False].speed,
                "rounds": [ways.of[True].rounds, ways.of[False].rounds],
            }
            for rows, ways in sorted(self._ways.items())
        }
