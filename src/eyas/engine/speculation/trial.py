"""Drafting for a while although that does not seem to pay, for as long as it does. No torch.

Text comes in stretches: an answer goes through a passage that no drafter guesses, then begins to list or to repeat. For
one request, or a few, the latest rounds therefore say little about the next hundred, and one draft says nothing. So
where the plan is not to draft, the best plan that drafts is tried now and then, over some steps in a row, and what
these really gave is held against what they really took. A trial goes on until it has lost some plain steps since it was
at its best; meanwhile what is expected of drafts may have changed, and then the plan itself is to draft.
"""

from dataclasses import dataclass

from eyas.engine.speculation.policy import POLICY


@dataclass(kw_only=True)
class DraftTrial:
    """What came of it so far."""

    plain: float
    """Seconds of a plain step."""
    saved: float = 0.0
    """Seconds, against as many tokens of plain steps; less than none is a loss."""
    best: float = 0.0
    """The most that it had ever saved."""
    steps: int = 0
    accepted: int = 0

    def take(self, saved: float, accepted: int) -> None:
        """A step of it saved so many seconds, and had so many drafts accepted.

        One step loses no more than a probe would: something else was late then.
        """
        self.saved += max(saved, -POLICY.probe_most_loss * self.plain)
        self.best = max(self.best, self.saved)
        self.steps += 1
        self.accepted += accepted

    @property
    def lost(self) -> float:
        """Seconds since it was at its best."""
        return self.best - self.saved
