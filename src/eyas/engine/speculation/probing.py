"""Drafting although it does not seem to pay: single probes, and trials that go on for a while. No torch.

A probe drafts in one step, to time what drafts take and to see whether they are accepted. A trial (`trial.py`) follows
the best plan that drafts, step after step, where requests are few and passes are captured. Both are paid from one
account (`exploration.py`), which says what they may lose and when the next is due.
"""

from collections.abc import Sequence
from math import isfinite

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.choice import StepUnderWay
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.exploration import Exploration
from eyas.engine.speculation.planner import Planner, RowFacts, Situation
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.trial import DraftTrial
from eyas.plan.shapes import Plan


class Probing:
    """Decides when a step drafts for the sake of knowing. `now` is the number of the step."""

    def __init__(self, costs: CostModel, acceptance: Acceptance, planner: Planner) -> None:
        self.account = Exploration()
        self._costs, self._acceptance, self._planner = costs, acceptance, planner
        self._waits_until = 0
        self._trial: DraftTrial | None = None
        """The one that is under way."""

    def waits(self, now: int) -> bool:
        """Whether a probe is under way: until it is observed nothing is known of it."""
        return now < self._waits_until

    # --- trials ------------------------------------------------------------------------------------------------

    def in_trials(self, situation: Situation) -> bool:
        """Whether trials tell if drafting pays, and probes when to begin one."""
        return self._costs.shapes is not None and situation.rows <= POLICY.trial_requests

    def tries(self, step: StepUnderWay, drafts: Plan, now: int) -> bool:
        """Whether this step drafts by a plan that does not seem to pay: a trial goes on, or begins."""
        situation = step.situation
        if not self.in_trials(situation) or any(situation.fixed.values()) or not isfinite(drafts.seconds):
            return False
        plain = situation.rows * drafts.gain / drafts.rate
        if self._trial is not None and self._trial.lost > POLICY.trial_most_loss * plain:
            self.end_trial(now)
            return False
        if self._trial is None:
            loss = max(POLICY.trial_most_loss * plain, POLICY.trial_rounds * (1 - drafts.gain) * drafts.seconds)
            hopeful = self.account.streak >= POLICY.trial_streak or self.account.affords(loss, plain)
            if self.waits(now) or not hopeful or not self.account.due(now):
                return False
            self._trial = DraftTrial(plain=plain)
        step.trial = self._trial
        return True

    def end_trial(self, now: int) -> None:
        """Book the trial that is under way, if there is one."""
        trial, self._trial = self._trial, None
        if trial is not None:
            self.account.end_trial(now, trial)

    # --- probes ------------------------------------------------------------------------------------------------

    def probe(self, step: StepUnderWay, now: int, deepest: int) -> tuple[dict[int, int], str]:
        """Depths of a probe, if one is due and can be afforded, and what it is for; none is deeper than `deepest`."""
        shapes = self._costs.shapes
        if shapes is not None:
            return self._probe_captured(step, now, deepest, shapes)
        costs, account, situation, auto = self._costs, self.account, step.situation, step.situation.auto
        timed = bool(costs.first_draft.known) and costs.verify.tells(situation.rows + len(auto))
        if self.waits(now) or (timed and not account.due(now)):
            return {}, ""
        # Two deep, to know of deeper drafts at once: they may pay where shallow ones do not.
        depths = [1] if costs.further_draft.known else [min(2, deepest), 1]
        if timed:
            levels = dict(zip(auto, self._acceptance.levels([row.key for row in auto]), strict=True))
            auto = sorted(auto, key=lambda row: (-levels[row], row.pending))[: 1 << account.streak]
            if situation.rows <= POLICY.small_pass_tokens and not costs.verify.reaches(4 * situation.rows):
                depths = [min(3, deepest), 1]
        prices = self._planner.prices(situation)
        step.plain = prices.step(prices.verify(0), False)
        for depth in depths:
            passes = prices.verify(depth * len(auto))
            if timed:
                passes += prices.draft(depth, len(auto) * prices.reads, (depth - 1) * len(auto)) + self.debt(auto)
            step.with_probe = prices.step(passes, True)
            if account.affords(step.with_probe - step.plain, step.plain):
                whom = f"{len(auto)} of {len(situation.auto)} requests"
                return self._begin(step, now, auto, depth), _in_words(depth, whom, timed=timed)
        return {}, ""

    def _probe_captured(
        self, step: StepUnderWay, now: int, deepest: int, shapes: CapturedShapes
    ) -> tuple[dict[int, int], str]:
        """The same where passes are captured: to draft for all takes no longer than for one, and tells more."""
        situation, costs = step.situation, self._costs
        timed = any(curve.tells_any for curve in costs.chains.values())
        depths = [depth for depth in shapes.depths_for(situation.rows) if depth <= deepest]
        if self.waits(now) or (timed and not self.account.due(now)) or not depths:
            return {}, ""
        prices, rows = self._planner.captured_prices(situation), costs.plain_tokens(situation.rows)
        step.plain = prices.step(prices.verify(rows), 0)
        # Until drafts were timed, two deep: deeper ones may pay where shallow ones do not.
        for depth in depths[:1] if timed else reversed(depths[:2]):
            passes = prices.verify(rows * (1 + depth))
            passes += prices.draft(depth) + self.debt(situation.auto) if timed else 0.0
            step.with_probe = prices.step(passes, depth)
            # No more is ever charged: what says that a probe is dearer may be an outlier that only a probe can correct.
            loss = min(step.with_probe - step.plain, POLICY.probe_most_loss * step.plain)
            if self.account.affords(loss, step.plain):
                return self._begin(step, now, situation.auto, depth), _in_words(depth, "all requests", timed=timed)
        return {}, ""

    def _begin(self, step: StepUnderWay, now: int, rows: Sequence[RowFacts], depth: int) -> dict[int, int]:
        step.probe, step.bound = True, frozenset(row.key for row in rows)
        self._waits_until = now + POLICY.plan_steps
        return dict.fromkeys(step.bound, depth)

    def debt(self, rows: Sequence[RowFacts]) -> float:
        """Expected seconds of reading for requests that have rested, of which more waits than a draft reads by the way.

        So a probe that has to wait for its account comes when a request has just begun.
        """
        rested = sum(row.pending > self._acceptance.max_depth + 1 for row in rows)
        return self._costs.debt.at(rested) if self._costs.debt.tells_any else 0.0

    def settle(self, step: StepUnderWay, now: int) -> None:
        """Book a probe that was observed."""
        if not self.in_trials(step.situation) or self.account.misses > POLICY.hopeless_misses // 2:
            self._acceptance.note_probe()  # else hits lead to a trial, which tells more
        self._planner.forget()
        self._waits_until = 0
        self.account.settle(
            now,
            seconds=step.seconds if step.timed else step.with_probe,
            plain=step.plain,
            saved=step.accepted * step.plain / step.situation.rows,
            hit=step.accepted > 0,
            chance=self._acceptance.by_depth[0],
        )


def _in_words(depth: int, whom: str, *, timed: bool) -> str:
    what = "see whether drafts are accepted" if timed else "time drafting and a larger pass"
    return f"probe, {depth} deep for {whom} on auto: to {what}"
