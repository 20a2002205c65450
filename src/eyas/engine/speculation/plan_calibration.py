"""What plans have kept of what they promised, chains and trees apart. No torch.

A plan says how many tokens a step gives. It takes all drafts of a depth for equally likely, and the chances behind a
second candidate for those behind a first. Neither is true: confidences are looked at while drafting, so that steps give
more, and paths off the likeliest one lead nowhere more often. What matters where a tree is weighed against a chain is
what both give in the end, so each is taken at its word times what that word was worth so far.

Tokens are counted, seconds are those that the costs say of what really ran: two kinds that ran at different times of a
machine are still compared fairly.
"""

from eyas.engine.speculation.decayed_counts import DecayedCounts
from eyas.engine.speculation.policy import POLICY
from eyas.plan.shapes import Plan


class PlanCalibration:
    """Tokens that came, in parts of those promised."""

    def __init__(self) -> None:
        self._kept = DecayedCounts(2)

    def observe(self, plan: Plan, tokens: int, seconds: float) -> None:
        """Take a step that followed a plan, gave so many tokens and should have taken so long."""
        promised = plan.rate * seconds
        self._kept.add([int(plan.shape.kind == "tree")], [tokens / promised], promised)
        self._kept.fade(POLICY.calibration_memory)

    @property
    def of_chains(self) -> float:
        """What the promise of a chain is worth."""
        return self._kept.rate(0, 1.0, POLICY.calibration_trust)

    @property
    def of_trees(self) -> float:
        """What the promise of a tree is worth; the same, until trees have been tried."""
        return self._kept.rate(1, self.of_chains, POLICY.calibration_trust)
