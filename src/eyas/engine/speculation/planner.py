"""The best depths for the batch at hand: costs and acceptance brought to `plan/shapes.py`, plans kept. No torch.

A plan is made from estimates that move slowly, for batches that come again: it is kept for some steps, by what the
batch is like. Kept plans speak of levels of acceptance, not of requests, so they fit whoever is in the batch now.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedPrices, plan_captured, plan_captured_tree
from eyas.engine.speculation.cost_model import CostModel, bucket_of
from eyas.engine.speculation.plan_calibration import PlanCalibration
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.step_times import WholeStepTimes
from eyas.plan.shapes import MARGIN, Batch, Plan, Prices, plan_chains, plan_nothing, plan_tree


# Not frozen, and each equal to itself alone: a step that drafts makes one for each of hundreds of requests.
@dataclass(eq=False, slots=True)
class RowFacts:
    """What the choice needs to know about one decoding request."""

    key: int
    context: int
    """Tokens that its newest one attends to."""
    mode: Literal["auto", "off", "fixed"] = "auto"
    depth: int | None = None
    """With `fixed`; at most the controller's `max_depth`."""
    pending: int = 1
    """Tokens that the drafter has not read yet."""


class Situation:
    """A batch before depths are chosen."""

    def __init__(self, rows: Sequence[RowFacts]) -> None:
        self.rows = len(rows)
        self.auto = [row for row in rows if row.mode == "auto"]
        self.fixed = {row.key: row.depth or 0 for row in rows if row.mode == "fixed"}
        self.context = sum(row.context for row in rows)


class KeptPlan(NamedTuple):
    """A plan that serves some steps."""

    plan: Plan
    reason: str
    drafts: Plan | None
    """The best that drafts, even where that does not pay."""
    steps: int
    until: int
    """The step from which on it is made again."""


class Planner:
    """Plans for batches, and what their parts cost."""

    def __init__(self, costs: CostModel, acceptance: Acceptance, times: WholeStepTimes, *, trees: bool) -> None:
        self._costs, self._acceptance, self._times, self.trees = costs, acceptance, times, trees
        self.promises = PlanCalibration()
        self._kept: dict[tuple[int, ...], KeptPlan] = {}
        self._news = 0
        self._latest: tuple[Situation, int] | None = None
        """The batch that was planned for last, and how deep it might draft."""

    def forget(self) -> None:
        """Something was learnt that all kept plans ignore."""
        self._kept.clear()

    def prices(self, situation: Situation) -> Prices:
        """What parts of this step cost."""
        verify, step, auto = self._costs.verify, self._costs.step, situation.auto
        tokens, context = situation.rows, situation.context
        # A backlog is a debt, whichever depth follows; what every round adds to it is a cost.
        round_adds = 1 + round(sum(self._acceptance.survivals(0)))
        return Prices(
            verify=cache(lambda drafts: verify.at(tokens + drafts, context)),
            step=lambda passes, drafting: step(situation.rows, passes, depth=int(drafting)),
            draft=self._costs.draft,
            grow=self._costs.grow,
            reads=sum(min(row.pending, round_adds) for row in auto) / max(1, len(auto)),
        )

    def captured_prices(self, situation: Situation) -> CapturedPrices:
        """The same where passes are captured."""
        costs, times, rows, context = self._costs, self._times, situation.rows, situation.context
        verify = costs.verify_of(rows)
        return CapturedPrices(
            verify=lambda tokens: verify.at(tokens, context),
            draft=lambda depth: costs.chain(depth, costs.plain_tokens(rows)),
            grow=lambda shape: costs.tree(shape, costs.plain_tokens(rows)),
            step=lambda passes, depth: costs.step(rows, passes, depth=depth) * times.ratio(rows, depth=depth),
            step_of_trees=lambda passes, depth: (
                costs.step(rows, passes, depth=depth, trees=True) * times.ratio(rows, depth=depth, trees=True)
            ),
        )

    def plan(self, situation: Situation, step: int, deepest: int) -> KeptPlan:
        """The best plan for such a batch that drafts no deeper, and the reason for it."""
        self._latest = situation, deepest
        return self._plan(situation, step, deepest)

    def renew(self, step: int) -> None:
        """Make the plan for the next step now, where that is the likes of this one."""
        if self._latest is not None:
            self._plan(self._latest[0], step + 1, self._latest[1])

    def _plan(self, situation: Situation, step: int, deepest: int) -> KeptPlan:
        likeness = self._likeness(situation, deepest)
        news = self._costs.news + self._acceptance.surprises
        if news > self._news or len(self._kept) >= POLICY.kept_plans:
            self._news = news
            self.forget()
        kept = self._kept.get(likeness)
        if kept is not None and step < kept.until:
            return kept
        plan, reason, drafts = self._make(situation, deepest)
        steps = POLICY.plain_plan_steps
        if plan.by_level:
            steps = max(1, min(POLICY.plan_steps, self._acceptance.rounds // POLICY.plan_rounds_per_step))
            if kept is not None and kept.steps >= POLICY.plan_steps and plan.drafts_like(kept.plan):
                steps = min(2 * kept.steps, POLICY.settled_plan_steps)
        self._kept[likeness] = made = KeptPlan(plan, reason, drafts, steps, until=step + steps)
        return made

    def _likeness(self, situation: Situation, deepest: int) -> tuple[int, ...]:
        """What batches have in common that one plan serves: where requests come and go, hardly two have as many."""
        shapes, counts = self._costs.shapes, (situation.rows, len(situation.auto))
        bucket = bucket_of if shapes is None else shapes.rows_for
        return *map(bucket, counts), deepest, *situation.fixed.values()

    def _make(self, situation: Situation, deepest: int) -> tuple[Plan, str, Plan | None]:
        acceptance, fixed = self._acceptance, situation.fixed.values()
        acceptance.refresh()
        levels = Counter(acceptance.settle(row.key) for row in situation.auto)
        batch = Batch(
            rows=situation.rows,
            levels=levels,
            survivals={level: acceptance.survivals(level)[:deepest] for level in levels},
            fixed=[sum(depth >= at for depth in fixed) for at in range(1, acceptance.max_depth + 1)],
            fixed_tokens=sum(sum(acceptance.survivals(0)[:depth]) for depth in fixed),
        )
        if self._costs.shapes is not None:
            shapes, captured = self._costs.shapes, self.captured_prices(situation)
            plain, best = plan_captured(batch, shapes, captured, acceptance.kept)
            best = best or plain
            if shapes.trees:
                tree = plan_captured_tree(batch, shapes, captured, _chances(batch), acceptance.siblings.shares())
                best = self._tree_or(best, tree)
            return self._compared(plain, best)
        prices = self.prices(situation)
        plain, plan = plan_nothing(batch, prices), plan_chains(batch, prices)
        if self.trees:
            tree = plan_tree(batch, prices, _chances(batch), acceptance.siblings.shares())
            plan = self._tree_or(plan, tree)
        return self._compared(plain, plan)

    def _tree_or(self, plan: Plan, tree: Plan | None) -> Plan:
        """A tree, if it is better than chains by the margin, both taken for what they kept of their promises."""
        worth = self.promises.of_trees / self.promises.of_chains
        return tree if tree is not None and worth * tree.rate > MARGIN * plan.rate else plan

    def _compared(self, plain: Plan, plan: Plan) -> tuple[Plan, str, Plan | None]:
        """The better of both, and why; then that which drafts, if there is any."""
        compared = (
            f"{plan.rate:.3g} tokens/s expected against {plain.rate:.3g} plain, "
            f"{self._acceptance.by_depth[0]:.0%} of first drafts accepted"
        )
        drafts = (
            replace(plan, gain=plan.rate / plain.rate) if plan.by_level and min(plan.rate, plain.rate) > 0 else None
        )
        if drafts is not None and drafts.gain > MARGIN:
            return drafts, f"{_in_words(drafts)}: {compared}", drafts
        return plain, f"plain, drafts would not pay: {compared}", drafts


def _chances(batch: Batch) -> list[float]:
    """a(1), a(2), ... of the requests at hand, all together: one tree is for all of them."""
    by_level = [[rows, *(rows * s for s in batch.survivals[level])] for level, rows in batch.levels.items()]
    survivals = [sum(at_depth) for at_depth in zip(*by_level, strict=True)]
    return [after / max(before, 1e-9) for before, after in pairwise(survivals)]


def _in_words(plan: Plan) -> str:
    depths = [depth for level in plan.by_level.values() for depth in level]
    drafting = [depth for depth in depths if depth]
    least, most = min(drafting), max(drafting)
    deep = f"{most} deep" if least == most else f"{least} to {most} deep"
    what = ""
    if plan.shape.kind == "tree":
        what = f" in trees {plan.shape.width} wide of at most {plan.shape.budget} tokens"
    elif plan.budget is not None:
        what = f", {plan.budget} drafts verified,"
    return f"{deep}{what} for {len(drafting)} of {len(depths)} requests"
