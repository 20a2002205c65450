"""Which requests are looked up: look-ups take the host time, whether a text repeats or not. No torch.

is_open   whether any are: as long as look-ups save more than they take. They have an account like that of the
          drafter's probes (`speculation/probes.py`), so where text never repeats they lose a few plain steps and a
          small share of all time
due       how often a request is: one whose offer was not sent sits out a round, then two, then four
"""

from typing import Any

from eyas.engine.speculation.probes import Account

MOST_ROUNDS_OUT = 4
"""Rounds that a request sits out at most."""


class LookupGate:
    """Says which requests of the next round are looked up."""

    def __init__(self) -> None:
        self._accounts: dict[int, tuple[Account, list[int]]] = {}
        """By octave of requests, with the number of its latest step."""
        self._pauses: dict[int, tuple[int, int]] = {}
        """By request: rounds that are left of its pause, and how many it has."""

    def is_open(self, rows: int, plain: float | None) -> bool:
        """Whether so many requests are, once a step; one without drafts takes `plain` seconds, if that is known."""
        if plain is None:
            return True
        account, step = self._accounts.setdefault((rows - 1).bit_length(), (Account(), [0]))
        step[0] += 1
        account.total += plain
        if account.in_spell and account.left(plain) < 0:
            account.end(step[0], plain)
        if account.due(step[0]):
            account.begin()
        return account.in_spell

    def book(self, rows: int, saved: float, plain: float) -> None:
        """Take the seconds that the look-ups of a step are expected to save, less those that they took."""
        account, _ = self._accounts.get((rows - 1).bit_length(), (Account(), 0))
        if account.in_spell:
            account.book(saved, plain)

    def due(self, key: int) -> bool:
        """Whether a request is looked up in this round; to be asked once a round."""
        left, rounds = self._pauses.get(key, (0, 0))
        if left:
            self._pauses[key] = left - 1, rounds
        return not left

    def note(self, key: int, *, sent: bool) -> None:
        """Take what became of a look-up."""
        _, before = self._pauses.get(key, (0, 0))
        rounds = 0 if sent else min(before + before or 1, MOST_ROUNDS_OUT)
        self._pauses[key] = rounds, rounds

    def forget(self, key: int) -> None:
        """Drop a request that ended."""
        self._pauses.pop(key, None)

    def report(self) -> dict[int, dict[str, Any]]:
        """By requests, up to so many: whether they are looked up, and seconds saved, which may be fewer than none."""
        return {
            1 << octave: {"looked_up": account.in_spell, "seconds": account.total, "seconds_saved": account.saved}
            for octave, (account, _) in sorted(self._accounts.items())
        }
