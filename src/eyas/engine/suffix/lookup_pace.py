"""How often requests are looked up: less and less while nothing of it is verified. No torch.

A look-up and what is learnt from it take the host time for each request, whether the text repeats or not, and a round
on the device may wait for the host. So whose offer was not sent sits out one round, then two, four, eight; who is sent
something is looked up in every round again.
"""

MOST_ROUNDS_OUT = 8
FEW_ROUNDS_OUT = 2
"""The same where few share a round: each of them can give many more drafts then, and there is little to look up."""


class LookupPace:
    """Says who is looked up in a round."""

    def __init__(self) -> None:
        self._out: dict[int, int] = {}
        """Rounds that a request still sits out."""
        self._next: dict[int, int] = {}
        """Rounds that it sits out when nothing is sent again."""

    def due(self, key: int) -> bool:
        """Whether a request is looked up in this round; to be asked once a round."""
        left = self._out.get(key, 0)
        if left:
            self._out[key] = left - 1
        return not left

    def note(self, key: int, *, sent: bool, longest: int = MOST_ROUNDS_OUT) -> None:
        """Take what became of a look-up; nobody sits out longer than the longest."""
        rounds = 0 if sent else min(self._next.get(key, 1), longest)
        self._out[key], self._next[key] = rounds, min(2 * rounds, longest) or 1

    def forget(self, key: int) -> None:
        """Drop a request that ended."""
        self._out.pop(key, None)
        self._next.pop(key, None)
