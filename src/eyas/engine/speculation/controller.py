"""How deep to draft: chosen every step, for every request, from measured costs and measured acceptance. No torch.

Chains or trees: trees catch what the first candidate misses, and pay where further tokens of a pass are nearly free. To
know what they would catch, the drafter's further candidates are looked at in some of the rounds that draft chains.

    captured_plan.py     the same where passes come in captured shapes
    cost_model.py        what passes take on this machine, from the times of those that ran
    acceptance.py        how likely drafts are accepted, from the fate of those that were made
    plan/shapes.py       which drafts give the most tokens per second; none at all is always a candidate
    planner.py           the three brought together for the batch at hand, with a margin in favour of plain decoding,
                         and one in favour of chains
    plan_calibration.py  what chains and trees gave in the end, in parts of what was expected of them
    probing.py           while nothing is drafted, how to notice that drafting would pay: probes, and trials for a while
    exploration.py       what these may cost, and when the next is due
    while_drafting.py    where the host looks on: who drafts one deeper, and what is verified of it (verify_budget.py)
    drift.py             how deep the drafter is fit to be used at all
    step_times.py        what steps took beside what was expected of them
    policy.py            every tuned number of these

A request may take the choice away: `off` never drafts, `fixed` always drafts its depth, fit or not.

Losslessness. No choice made here can change what is generated: a request's token is a function of the target's
distribution and of the request's own noise, and a draft only decides in which pass it is computed. That is more than
rejection sampling allows: there, whether draft i is submitted may depend on the drafts before it but not on the drawn
draft i itself, or the output is biased. Of what while_drafting.py decides, `continue_drafting` would keep to that rule;
`keeps` and `prunes` look at draft i and would break it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.choice import Choice, StepUnderWay
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.drift import DriftAlarm
from eyas.engine.speculation.observations import DraftTiming, Rehearsal, RoundOutcome, TargetTiming
from eyas.engine.speculation.planner import Planner, RowFacts, Situation
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.probing import Probing
from eyas.engine.speculation.step_report import RepeatedStep, StepReport
from eyas.engine.speculation.step_times import WholeStepTimes
from eyas.engine.speculation.while_drafting import WhileDrafting
from eyas.plan.shapes import CHAIN, TREE_ROWS, Plan, Shape

__all__ = ["Choice", "Controller", "RowFacts", "Shape"]


class Controller:
    """Chooses depths and learns from what came of them."""

    def __init__(
        self,
        max_depth: int = 7,
        *,
        trees: bool = False,
        drift: DriftAlarm | None = None,
        recorded: Sequence[float] = (),
        costs: CostModel | None = None,
    ) -> None:
        """`recorded` is the drafter's acceptance by depth, as far as somebody has measured or estimated it.

        `costs` is what passes take, if they have been timed.
        """
        assert max_depth >= 1
        self.max_depth = max_depth
        self.drift = drift or DriftAlarm(max_depth)
        self.costs = costs or CostModel()
        self.acceptance = Acceptance(max_depth, recorded)
        self.while_drafting = WhileDrafting(self.acceptance, self.costs)
        self._times = WholeStepTimes()
        self._planner = Planner(self.costs, self.acceptance, self._times, trees=trees)
        self._probing = Probing(self.costs, self.acceptance, self._planner)
        self.probes = self._probing.account
        self.thinks_later = False
        """Whether the fate of drafts is taken in by `think`, a step late, instead of at once."""
        self._lessons: list[Callable[[], None]] = []
        self._latest: StepUnderWay | None = None
        """The step that was chosen for last."""
        self._surprises = 0
        """Of those that were known when that choice was made."""
        self._followed: Plan | None = None
        """The plan that the last of them followed which drafted and was held, and how many alike there were before."""
        self._alike = 0
        self._resting = False
        """Whether the drafter has collapsed, and probes have found nothing for long."""
        self._steps = 0
        self._plain_at = 0
        self._trees = trees
        self._drafting = self._looks = 0
        """Steps that drafted for few enough requests to consider trees, and those that looked at candidates."""
        self._in_trees = 0
        self._depths: Counter[int] = Counter()
        self._reason = "no step yet"

    def overlaps(self) -> None:
        """Steps overlap: passes are timed on the device, and a step takes as long as the slower of it and the host."""
        self.costs.overlap()

    def runs_graphs(self) -> None:
        """Steps are CUDA graphs: no trees but captured ones, and thinking comes later."""
        self._trees, self._planner.trees, self.thinks_later = False, False, True

    def captures(self, shapes: CapturedShapes) -> None:
        """Passes have these shapes, and what is not used of one is paid all the same."""
        self.costs.shapes = shapes
        self.acceptance.steady()

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Start from what passes took in a rehearsal."""
        self.costs.verify.rehearse(rehearsal.verify)
        self.costs.verify_alone.rehearse(rehearsal.verify_alone)
        self.costs.debt.rehearse(rehearsal.catch_up)
        for depth, seconds in rehearsal.draft.items():
            self.costs.chain_of(depth).rehearse(seconds)
        for shape, seconds in rehearsal.trees.items():
            self.costs.tree_of(shape).rehearse(seconds)

    # --- the choice --------------------------------------------------------------------------------------------

    def choose(self, rows: Sequence[RowFacts], *, after: int = 1) -> Choice:
        """Depths for the next step, which comes so many steps `after` the last one that was chosen for."""
        self._count_repeats(after - 1)
        self._steps += after
        self.acceptance.end_steps(after)
        situation = Situation(rows)
        assert all(depth <= self.max_depth for depth in situation.fixed.values()), "checked when the request came"
        self._latest = step = StepUnderWay(situation=situation, bound=frozenset(situation.fixed))
        self._surprises = self.acceptance.surprises
        wanted, shape, self._reason = self._decide(step)
        if self.drift.firing:
            self._reason += f"; no deeper than {self.drift.deepest}, since the drift alarm has fired"
        wanted |= situation.fixed
        depths = tuple([wanted.get(row.key, 0) for row in rows])
        step.limits = {
            row.key: depth if depth == 0 or row.key in step.bound else self.drift.deepest
            for row, depth in zip(rows, depths, strict=True)
        }
        self._note_rest(step, drafts=any(depth for key, depth in wanted.items() if key not in situation.fixed))
        rests = self._resting and not self._probing.waits(self._steps)
        if rests and not situation.auto:
            self._reason = "plain: hardly any draft was accepted, so the drafter follows nobody but for probes"
        self._depths.update(depths)
        self._in_trees += len(situation.auto) if shape.kind == "tree" else 0
        return Choice(
            depths=depths,
            limits=tuple(step.limits.values()),
            shape=shape,
            reason=self._reason,
            look=POLICY.ranks if any(depths) and self._looks_now(situation) else 1,
            budget=None if step.plan is None else step.plan.budget,
            holds=self._holds_drafts(step) if any(depths) else POLICY.resting_steps if rests else self._holds(step),
            rests=rests,
            under_way=step,
        )

    @property
    def surprised(self) -> bool:
        """Whether drafts have fared so differently since the last choice that it should not be held any longer."""
        return self.acceptance.surprises > self._surprises

    def follows_new(self) -> bool:
        """Whether the drafter follows a request on auto that comes now; to be asked once for each."""
        return not self._resting or self.probes.admits(self._steps)

    def _note_rest(self, step: StepUnderWay, *, drafts: bool) -> None:
        """A collapsed drafter rests until a probe hits or the plan is to draft; a probe alone changes nothing yet."""
        hopeless = self.acceptance.watch.collapsed and self.probes.hopeless
        if not hopeless or (drafts and not step.probe):
            self._resting = False
        elif not self._probing.waits(self._steps):
            self._resting = True

    def _holds_drafts(self, step: StepUnderWay) -> int:
        """Steps until there is a choice again behind one that drafts.

        Where the host looks on while drafts are made, each step is its own.
        """
        if self.costs.shapes is None:
            return 1
        if not step.situation.auto:
            return POLICY.plan_steps
        if step.plan is None:  # a probe, or a look at candidates
            return 1
        if step.trial is not None:
            return 1 + POLICY.timed_repeats
        if self.acceptance.rounds < POLICY.held_drafts * POLICY.plan_rounds_per_step:
            return min(POLICY.held_drafts, max(1, self.acceptance.rounds // POLICY.held_rounds_per_step))
        held = POLICY.held_drafts_of_many if step.situation.rows >= POLICY.many_rows else POLICY.held_drafts
        alike = self._followed is not None and step.plan.drafts_like(self._followed)
        self._alike = self._alike + 1 if alike else 0
        self._followed = step.plan
        return held * min(1 + self._alike // POLICY.alike_to_hold, POLICY.held_at_most)

    def _holds(self, step: StepUnderWay) -> int:
        """The same behind a plain one: choosing takes the host longer than the rest of it."""
        situation = step.situation
        verify, tokens = self.costs.verify_of(situation.rows), self.costs.plain_tokens(situation.rows)
        unsure = verify.samples(tokens) < POLICY.sure_samples
        if step.once or (situation.auto and unsure):
            return 1
        if not situation.auto:
            return POLICY.plan_steps
        if self._probing.waits(self._steps) and self._probing.in_trials(situation):
            return POLICY.held_after_probe
        longest = POLICY.plain_plan_steps if self._probing.in_trials(situation) else POLICY.plan_steps
        # A probe that is due and was not made is too dear for now.
        return longest if self.probes.due(self._steps) else min(longest, self.probes.steps_left(self._steps))

    def _looks_now(self, situation: Situation) -> bool:
        """Whether this step, which drafts, is one of those that note further candidates."""
        if not self._trees or not 0 < len(situation.auto) <= TREE_ROWS:
            return False
        self._drafting += 1
        looks = self._looks < POLICY.candidates_first + self._drafting // POLICY.candidates_every
        self._looks += looks
        return looks

    def _captured_look(self, situation: Situation, plan: Plan) -> Shape | None:
        """The tree to grow instead of a planned chain, where passes are captured and it is time to look at candidates.

        It gives tokens as the chain would, and some more; which candidates those were is what is to be learnt.
        """
        shapes = self.costs.shapes
        if shapes is None or not shapes.trees or situation.fixed or plan.shape.kind == "tree":
            return None
        trees = [shape for shape in shapes.trees_for(situation.rows) if shape.depth <= self.drift.deepest]
        if not trees or not isfinite(self.costs.tree(trees[0], self.costs.plain_tokens(situation.rows))):
            return None
        self._drafting += 1
        if self._looks >= POLICY.captured_looks_first + self._drafting // POLICY.captured_looks_every:
            return None
        self._looks += 1
        return trees[0]

    def _decide(self, step: StepUnderWay) -> tuple[dict[int, int], Shape, str]:
        """Depths of requests on auto, by key."""
        situation = step.situation
        if not situation.auto:
            return {}, CHAIN, "no request leaves its depth to the controller"
        if not self.costs.verify_of(situation.rows).tells_any:
            return {}, CHAIN, "plain: not enough steps have been timed yet"
        planned = self._planner.plan(situation, self._steps, self.drift.deepest)
        plan, reason = planned.plan, planned.reason
        if not plan.by_level and planned.drafts is not None and self._probing.tries(step, planned.drafts, self._steps):
            return self._follow(step, planned.drafts, f"a trial: {reason}")
        if not plan.by_level:
            self._plain_at = self._steps
            depths, why = dict[int, int](), ""
            if not any(situation.fixed.values()):
                depths, why = self._probing.probe(step, self._steps, self.drift.deepest)
            return depths, CHAIN, why or reason
        if self._doubts_plain(situation, plan):
            self._plain_at, step.once = self._steps, True
            return {}, CHAIN, "plain: to time a step without drafts again"
        self._probing.end_trial(self._steps)
        self.probes.rest()
        look = self._captured_look(situation, plan)
        if look is not None:
            step.rate = plan.rate
            why = f"{look.width} candidates of every draft, {look.depth} deep: to see what trees would catch"
            return {row.key: look.depth for row in situation.auto}, look, why
        return self._follow(step, plan, reason)

    def _follow(self, step: StepUnderWay, plan: Plan, reason: str) -> tuple[dict[int, int], Shape, str]:
        keys = [row.key for row in step.situation.auto]
        step.plan, step.rate = plan, plan.rate
        return dict(zip(keys, plan.depths(self.acceptance.levels(keys)), strict=True)), plan.shape, reason

    def _doubts_plain(self, situation: Situation, plan: Plan) -> bool:
        """Whether what speculation is compared with should be timed again."""
        verify, tokens = self.costs.verify_of(situation.rows), self.costs.plain_tokens(situation.rows)
        close = plan.gain < POLICY.close_gain and verify.samples(tokens) < POLICY.sure_samples
        return min(self._steps - self._plain_at, verify.age(tokens)) > (
            POLICY.plain_again_in_doubt if close else POLICY.plain_again_steps
        )

    # --- what came of it ---------------------------------------------------------------------------------------

    def observe(self, report: StepReport) -> None:
        """Learn from a step that is over. Others may have been chosen for since."""
        step = None if report.choice is None else report.choice.under_way
        assert step is None or not step.observed, "a step is observed once"
        if report.catch_up is not None:
            self.costs.debt.observe(report.catch_up.requests, report.catch_up.seconds)
            self._take_time(step, report.catch_up.seconds, 0.0)
        if report.draft is not None:
            self._observe_draft(step, report.draft)
        if report.target is not None:
            self._observe_target(step, report.target)
        # Of many rounds, some teach as much as all; requests take turns.
        rounds = report.rounds if report.chains is None else report.chains
        every = max(1, -(-len(rounds) // POLICY.lessons_of_step))
        for number in range(-self._steps % every, len(rounds), every):
            self._observe_round(step, rounds[number])
        if step is not None:
            step.rounds += len(rounds)
            step.accepted += report.accepted
        if report.seconds is not None and step is not None:
            self._observe_step(step, report.seconds, report.thinking)
        if report.repeated is not None:
            self._observe_repeated(report.repeated)
            report.repeated.step.try_again(len(rounds), report.accepted, report.repeated.seconds)
        for key in report.ended:
            self.forget(key)
        if step is not None:
            self._close(step)

    def _observe_draft(self, step: StepUnderWay | None, timing: DraftTiming) -> None:
        self.costs.observe_draft(timing)
        if step is not None:
            step.depth = timing.passes if timing.rows is not None else 1
            step.trees = timing.trees and timing.rows is not None
        if timing.rows is not None:
            costs = self.costs
            captured = costs.tree_of(timing.shape).at if timing.trees else partial(costs.chain, timing.passes)
            self._take_time(step, timing.seconds, captured(timing.rows))
            return
        reads = timing.tokens / timing.passes if timing.first is None else timing.first[0]
        price = self.costs.grow if timing.trees else self.costs.draft
        self._take_time(step, timing.seconds, price(timing.passes, reads, timing.tokens - reads))

    def _observe_target(self, step: StepUnderWay | None, timing: TargetTiming) -> None:
        verify = self.costs.verify if timing.rows is None else self.costs.verify_of(timing.rows)
        verify.observe(timing.tokens, timing.seconds, timing.context)
        self._take_time(step, timing.seconds, verify.at(timing.tokens, timing.context))
        if step is not None:
            step.timed = True

    def _observe_round(self, step: StepUnderWay | None, outcome: RoundOutcome) -> None:
        withheld, verified = None, outcome.drafted
        if self.costs.shapes is not None:  # the device has chosen what was verified of what was made
            if verified < len(outcome.confidences):
                (withheld,) = self.acceptance.chances_of(outcome.confidences[verified : verified + 1], verified + 1)
        elif step is not None and outcome.key in step.withheld:
            at, chance = step.withheld[outcome.key]
            withheld = chance if at == verified else None
        self._take_in(partial(self.acceptance.observe, outcome, withheld=withheld))

    def _observe_step(self, step: StepUnderWay, seconds: float, thinking: float) -> None:
        if step.timed:
            rows, step.passes = step.situation.rows, step.seconds
            self.costs.observe_step(
                rows, seconds, passes=step.passes, depth=step.depth, trees=step.trees, thinking=thinking
            )
            step.whole = self.costs.step(rows, step.expected, depth=step.depth, trees=step.trees)
            self._times.observe(rows, seconds - thinking, step.whole, depth=step.depth, trees=step.trees)
            self._take_time(step, max(0.0, seconds - step.seconds), step.whole - step.expected)

    def _observe_repeated(self, repeated: RepeatedStep) -> None:
        """The host's time of steps that were not chosen for: of those that were, there are too few."""
        step = repeated.step
        if step.passes:
            requests, seconds, thinking = repeated.requests, repeated.seconds, repeated.thinking
            self.costs.observe_step(
                requests, seconds, passes=step.passes, depth=step.depth, trees=step.trees, thinking=thinking
            )
            self._times.observe(requests, seconds - thinking, step.whole, depth=step.depth, trees=step.trees)

    def forget(self, key: int) -> None:
        """Drop a request that has ended."""
        self._take_in(partial(self.acceptance.forget, key))

    def think(self) -> None:
        """Take in what came of the step before this one, and plan for the next; to be called while a device is busy."""
        self._learn()
        self._planner.renew(self._steps)

    def events(self) -> list[str]:
        """What an operator should know and has not been told."""
        return self.acceptance.watch.take() + self.drift.take()

    def report(self) -> dict[str, Any]:
        """The state of things, for logs and for people."""
        verify, first, further = self.costs.verify, self.costs.first_draft, self.costs.further_draft
        alone, chosen = self.costs.verify_alone, max(1, self._depths.total())
        return {
            "reason": self._reason,
            "acceptance_by_depth": [round(chance, 4) for chance in self.acceptance.by_depth],
            "rounds": self.acceptance.rounds,
            "collapsed": self.acceptance.watch.collapsed,
            "drift": self.drift.report().as_json(),
            "target_seconds_by_tokens": {count: verify.at(count) for count in verify.known},
            "target_seconds_of_one_request_by_tokens": {count: alone.at(count) for count in alone.known},
            "target_seconds_per_context_token": verify.per_context_token,
            "first_draft_seconds_by_tokens": {count: first.at(count) for count in first.known},
            "further_draft_seconds_by_tokens": {count: further.at(count) for count in further.known},
            "seconds_beside_passes_by_depth_and_requests": {
                depth: {count: curve.at(count) for count in curve.known}
                for depth, curve in sorted(self.costs.rests.items())
            },
            "seconds_beside_passes_of_trees_by_requests": {
                count: self.costs.tree_rest.at(count) for count in self.costs.tree_rest.known
            },
            "steps_by_depth_and_requests": self._times.report(),
            "seconds": self.probes.total,
            "probes": self.probes.count,
            "seconds_lost_by_probes": self.probes.lost,
            "siblings": [round(share, 4) for share in self.acceptance.siblings.shares()],
            "rows_in_trees": self._in_trees,
            "rows_by_depth": dict(sorted(self._depths.items())),
            "share_of_depths": {depth: count / chosen for depth, count in sorted(self._depths.items())},
        }

    def _take_in(self, lesson: Callable[[], None]) -> None:
        if self.thinks_later:
            self._lessons.append(lesson)
        else:
            lesson()

    def _learn(self) -> None:
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            lesson()

    def _take_time(self, step: StepUnderWay | None, seconds: float, expected: float) -> None:
        self.probes.total += seconds
        if step is not None:
            step.seconds += seconds
            step.expected += expected

    def _count_repeats(self, steps: int) -> None:
        """So many steps ran like the one that was chosen for last."""
        if self._latest is not None:
            self.costs.verify_of(self._latest.situation.rows).skip(steps)
        if self._latest is not None and self._latest.observed:
            self._book(self._latest, steps)
        elif self._latest is not None:
            self._latest.repeats = steps  # booked once it is known how long they take

    def _book(self, step: StepUnderWay, repeats: int) -> None:
        """Book steps that ran like one that was observed."""
        self.probes.total += repeats * step.seconds
        if repeats and step.saved and step.trial is None:
            self.probes.put_aside(repeats * step.saved, step.plain)

    def _close(self, step: StepUnderWay) -> None:
        """Book a step that was observed: what came of its plan, or what it lost if it was a probe."""
        step.observed = True
        if step.plan is not None and step.timed and isfinite(step.expected):
            self._planner.promises.observe(step.plan, step.rounds + step.accepted, step.expected)
            step.plain = step.situation.rows * step.plan.gain / step.plan.rate
            step.saved = (step.rounds + step.accepted) / step.situation.rows * step.plain - step.seconds
            if step.trial is None:
                self.probes.put_aside(step.saved, step.plain)
            else:
                step.trial.take(step.saved, step.accepted)
                if step.trial.saved > POLICY.trial_most_loss * step.plain:
                    self.acceptance.note_trial()
        self._book(step, step.repeats)
        if step.probe:
            self._learn()  # the next may follow at once
            self._probing.settle(step, self._steps)
