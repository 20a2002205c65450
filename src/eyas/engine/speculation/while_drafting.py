"""While the host looks on as drafts are made: which requests draft one deeper, and what is verified. No torch.

Where a device drafts by itself nobody asks: there the plan alone decides (`captured_plan.py`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.choice import Choice, StepUnderWay
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.verify_budget import share_budget
from eyas.plan.shapes import best_count


class WhileDrafting:
    """Decides from how sure the drafter was of every draft."""

    def __init__(self, acceptance: Acceptance, costs: CostModel) -> None:
        self.acceptance, self.costs = acceptance, costs

    def continue_drafting(
        self, choice: Choice, keys: Sequence[int], confidences: Sequence[Sequence[float]]
    ) -> list[bool]:
        """Which of the requests still drafting should draft one deeper, given how sure the drafter was of each draft.

        A further draft is worth its chance of acceptance; it costs its share of a drafter pass and of the target's.
        """
        step, acceptance, depth = _notes_of(choice), self.acceptance, len(confidences[0])
        going = [key in step.bound and step.limits[key] > depth for key in keys]
        worth = []
        for place, (key, level) in enumerate(zip(keys, acceptance.levels(keys), strict=True)):
            (chance,) = acceptance.chances_of(confidences[place][-1:], depth)
            step.survival[key] = survival = step.survival.get(key, 1.0) * chance
            step.made[key] = depth
            if step.limits[key] > depth and key not in step.bound:
                survivals = acceptance.survivals(level)
                worth.append((survival * survivals[depth] / max(survivals[depth - 1], 1e-9), place))
        worth.sort(reverse=True)
        forced, tokens = sum(going), step.situation.rows + sum(step.made.values())

        def seconds(count: int) -> float:
            rows = forced + count
            return self.costs.further(rows > 0, rows) + self.costs.verify.at(tokens + rows, step.situation.context)

        for _, place in worth[: best_count([value for value, _ in worth], seconds, step.rate)]:
            going[place] = True
        return going

    def keeps(self, choice: Choice, keys: Sequence[int], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many of each request's drafts are worth verifying, now that all of them are made."""
        step, chances = _notes_of(choice), [self.acceptance.chances_of(sure) for sure in confidences]
        kept = [
            len(nodes) for nodes in self._worth_verifying(step, keys, [list(accumulate(row, mul)) for row in chances])
        ]
        for key, first_left, row in zip(keys, kept, chances, strict=True):
            if first_left < len(row):
                step.withheld[key] = first_left, row[first_left]
        return kept

    def prunes(
        self,
        choice: Choice,
        keys: Sequence[int],
        parents: Sequence[Sequence[int]],
        confidences: Sequence[Sequence[float]],
    ) -> list[list[int]]:
        """The same for trees, given by the parents of their nodes: which of these are worth verifying."""
        grown = zip(parents, confidences, strict=True)
        return self._worth_verifying(_notes_of(choice), keys, [self.acceptance.of_nodes(*tree) for tree in grown])

    def _worth_verifying(
        self, step: StepUnderWay, keys: Sequence[int], survivals: Sequence[Sequence[float]]
    ) -> list[list[int]]:
        """Of each request's drafts, given by their chances to be accepted at all, those that are worth their price."""
        return share_budget(survivals, self.verify_price(step), bound=[key in step.bound for key in keys])

    def verify_price(self, step: StepUnderWay) -> Callable[[int], float]:
        """What it costs to verify so many drafts in a step, in tokens that the engine gives in that time."""
        verify, situation = self.costs.verify, step.situation
        return lambda drafts: step.rate * verify.at(situation.rows + drafts, situation.context)


def _notes_of(choice: Choice) -> StepUnderWay:
    assert choice.under_way is not None, "the controller made this choice"
    return choice.under_way
