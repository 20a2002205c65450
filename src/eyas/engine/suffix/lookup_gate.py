"""Decides which requests are looked up for suffix drafts, since each look-up costs host time. No torch.

is_open   whether any request is looked up: look-ups must save more time than they take. Their account is like that of
          the drafter's probes (`speculation/probes.py`), so on text that never repeats they lose a few plain steps and
          a small share of the time
due       whether a request's turn has come: after offers that were not sent it skips one round, then two, then four
"""

from typing import Any

from eyas.engine.speculation.probes import Account

MOST_ROUNDS_OUT = 4
"""Most rounds that a request skips."""


class LookupGate:
    """Selects the requests to look up in the next round."""

    def __init__(self) -> None:
        self._accounts: dict[int, tuple[Account, list[int]]] = {}
        """Account and step count by power of two of the number of requests."""
        self._pauses: dict[int, tuple[int, int]] = {}
        """Per request: rounds left of its pause, and the pause's length."""

    def is_open(self, rows: int, plain: float | None) -> bool:
        """Whether to look requests up, called once per step; a plain step takes `plain` seconds, if known."""
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
        """Book the seconds that the look-ups of a step should save, minus their cost."""
        account, _ = self._accounts.get((rows - 1).bit_length(), (Account(), 0))
        if account.in_spell:
            account.book(saved, plain)

    def due(self, key: int) -> bool:
        """Whether to look a request up in this round; called once per round."""
        left, rounds = self._pauses.get(key, (0, 0))
        if left:
            self._pauses[key] = left - 1, rounds
        return not left

    def note(self, key: int, *, sent: bool) -> None:
        """Record whether a look-up led to verified drafts."""
        _, before = self._pauses.get(key, (0, 0))
        rounds = 0 if sent else min(before + before or 1, MOST_ROUNDS_OUT)
        self._pauses[key] = rounds, rounds

    def forget(self, key: int) -> None:
        self._pauses.pop(key, None)

    def report(self) -> dict[int, dict[str, Any]]:
        """Statistics by the most requests of a round: whether it looks up, its seconds, seconds saved (may be < 0)."""
        return {
            1 << octave: {"looked_up": account.in_spell, "seconds": account.total, "seconds_saved": account.saved}
            for octave, (account, _) in sorted(self._accounts.items())
        }
