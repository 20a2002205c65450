"""The controller: chooses draft depths from measured step times and acceptance. No torch.

    step_times.py   seconds of a whole step by rows and drafts; seeded by the rehearsal at start
    acceptance.py   probability that drafts are accepted; seeded by the drafter's record or a guess
    probes.py       how much time drafting may lose, and when it is tried again
    drift.py        the depth up to which the drafter is reliable
    captured_shapes.py  shapes of captured passes

A step of n requests that draft k deep yields n (1 + S(1) + ... + S(k)) tokens in expectation. Over many steps, tokens
per second are this number divided by the step's time (renewal-reward). `choose` takes the depth or captured tree with
the best rate. Plain decoding is depth 0; drafts must beat it by a margin.

    draft   the best rate. Until drafts are proven, the account must cover the loss if all are rejected
    look    now and then a plain step, or the nearly best option that was timed longest ago
    probe   if nothing seems to pay: the cheapest useful drafts, when a probe is due and affordable
    plain   otherwise

All requests on auto draft equally deep. A request may override the controller: `off` never drafts, `fixed` always
drafts its depth, even while the drift alarm fires.

Choices never change what is generated: a token depends only on the target's distribution and the request's own noise;
drafts decide in which pass it is computed.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.choice import Choice, Kind, Purpose, RowFacts
from eyas.engine.speculation.drift import DriftAlarm
from eyas.engine.speculation.probes import PATIENCE, Account
from eyas.engine.speculation.step_report import Arm, Rehearsal, StepReport
from eyas.engine.speculation.step_times import StepTimes
from eyas.plan.shapes import CHAIN, Shape

__all__ = ["Choice", "Controller", "RowFacts", "Shape"]

MARGIN = 1.02
"""Tokens per second that drafts must promise, relative to plain decoding."""
LOOK_EVERY = 64
"""Steps between looks at other options, once the best one is well known."""
NEARLY = 0.95
"""Rate, relative to the best, from which an option is worth a look."""
HOLD = 16
"""Most steps for which a choice holds."""
FIRST_DEPTH = 2
"""Depth of the first drafts if no draft was timed; deeper ones are extrapolated from it."""


class Controller:
    """Chooses draft depths and learns from the results."""

    def __init__(
        self,
        max_depth: int,
        *,
        drift: DriftAlarm | None = None,
        recorded: Sequence[float] = (),
        costs: StepTimes | None = None,
    ) -> None:
        """`recorded` is the drafter's known acceptance by depth, `costs` known step times."""
        assert max_depth >= 1
        self.max_depth = max_depth
        self.drift = drift or DriftAlarm(max_depth)
        self.costs = costs or StepTimes()
        self.acceptance = Acceptance(max_depth, recorded)
        self.account = Account()
        self.shapes: CapturedShapes | None = None
        """Shapes of captured passes; None if passes are not captured."""
        self._steps = 0
        self._surprises = 0
        """Number of changes in acceptance at the latest choice."""
        self._looks: dict[int, tuple[int, int, bool]] = {}
        """Per bucket of rows: step of the next look, the wait before it, and whether it is a plain step."""
        self._alike: tuple[Arm, int] = (0, 0)
        """The latest choice, and for how many steps it holds."""
        self._debt = 0.0
        """Extra seconds of the latest step in which the drafter caught up."""
        self._resting = False
        self._depths: Counter[int] = Counter()
        self._in_trees = 0
        self._reason = "no step yet"

    def captures(self, shapes: CapturedShapes) -> None:
        """Set the shapes of captured passes. The whole pass is paid for, even if partly used."""
        self.shapes = shapes
        self.costs.bucket = shapes.rows_for

    def rehearse(self, rehearsal: Rehearsal) -> None:
        self.costs.rehearse(rehearsal)

    # --- the choice --------------------------------------------------------------------------------------------

    def choose(self, rows: Sequence[RowFacts], *, after: int = 1) -> Choice:
        """Choose depths for the next step, `after` steps since the previous choice."""
        self._steps += after
        self._surprises = self.acceptance.surprises
        count, auto = len(rows), [row for row in rows if row.mode == "auto"]
        fixed = max((row.depth or 0 for row in rows if row.mode == "fixed"), default=0)
        assert fixed <= self.max_depth, "must be checked when the request arrives"
        backlog = any(row.pending > self.max_depth + 1 for row in rows)
        kind, arm, rate, self._reason = self._decide(count, len(auto), fixed, debt=self._debt if backlog else 0.0)
        if self.drift.firing:
            self._reason += f"; no deeper than {self.drift.deepest}, since the drift alarm has fired"
        deep = arm if isinstance(arm, int) else arm.depth
        own = {"auto": deep, "off": 0}
        depths = tuple([(row.depth or 0) if row.mode == "fixed" else own[row.mode] for row in rows])
        self._resting = self._rests(drafts=kind in ("draft", "look"))
        if self._resting and not auto:
            self._reason = "plain: hardly any draft was accepted, so the drafter follows only probes"
        if deep:
            self.account.begin(self._steps)
        return Choice(
            depths=depths,
            shape=CHAIN if isinstance(arm, int) else arm,
            reason=self._reason,
            holds=self._holds(kind, arm, count, len(auto)),
            rests=self._resting,
            purpose=Purpose(kind=kind, at=self._steps, auto=len(auto), fixed=fixed > 0, backlog=backlog, rate=rate),
        )

    @property
    def surprised(self) -> bool:
        """Whether acceptance has changed so much since the latest choice that it should be dropped."""
        return self.acceptance.surprises > self._surprises or self.account.overdrawn

    def follows_new(self) -> bool:
        """Whether the drafter follows a new request on auto; called once per request."""
        return not self._resting or self.account.due(self._steps)

    def _rests(self, *, drafts: bool) -> bool:
        """Whether the drafter need not follow requests: it has collapsed and probes keep failing."""
        hopeless = PATIENCE * self.account.misses > LOOK_EVERY
        if drafts or not (self.acceptance.collapsed and hopeless):
            return False
        return self._resting or not self.account.in_spell

    def _decide(self, count: int, auto: int, fixed: int, *, debt: float) -> tuple[Kind, Arm, float, str]:
        """Decide what requests on auto do: kind, arm, expected tokens per second, reason."""
        if not auto:
            return "plain", 0, 0.0, "no request leaves its depth to the controller"
        plain = self.costs.at(count, 0)
        if plain is None:
            return "plain", 0, 0.0, "plain: not enough steps have been timed yet"
        offers = {arm: s for arm in self._arms(count, fixed) if (s := self._seconds(count, auto, arm)) is not None}
        for arm in offers:  # a tree takes at least as long as a chain of its depth
            offers[arm] = offers[arm] if isinstance(arm, int) else max(offers[arm], offers.get(arm.depth, 0.0))
        rates = {arm: (count + auto * self.acceptance.gain(arm)) / s for arm, s in offers.items()}
        left, usual = self.account.left(plain) - debt, count / plain
        if self.account.overdrawn:
            self.acceptance.doubt()
        free = self.acceptance.proven
        paying = [a for a, rate in rates.items() if rate > MARGIN * usual and (free or offers[a] - plain <= left)]
        expected = f"against {usual:.3g} plain, {self.acceptance.by_depth[0]:.0%} of first drafts accepted"
        if not paying:
            promised = max(rates.values(), default=0.0)
            probe = None if fixed else self._probe(count, auto, plain, offers, left)
            if probe is not None:
                if self.account.misses or self.account.spells == 0:  # not after a success
                    self.acceptance.doubt()
                whom = f"{probe} deep for {auto} of {count} requests"
                return "probe", probe, usual, f"probe, {whom}: to see whether drafts are accepted and what they take"
            return "plain", 0, usual, f"plain, drafts would not pay: {promised:.3g} tokens/s expected {expected}"
        # A tree must beat chains by the margin as well.
        best = max(paying, key=lambda arm: rates[arm] / (1.0 if isinstance(arm, int) else MARGIN))
        other = self._look(count, best, {arm: rates[arm] for arm in paying})
        if other is not None:
            why = "to time drafts that are nearly as good" if other else "plain: to time a step without drafts again"
            return "look", other, rates.get(other, usual), why
        what = f"{best} deep" if isinstance(best, int) else f"trees {best.depth} deep and {best.width} wide"
        why = f"{what} for {auto} of {count} requests: {rates[best]:.3g} tokens/s expected {expected}"
        return "draft", best, rates[best], why

    def _arms(self, count: int, fixed: int) -> list[Arm]:
        """Arms that so many requests may use."""
        deepest = self.drift.deepest
        if self.shapes is None:
            return [*range(1, deepest + 1)]
        arms: list[Arm] = [depth for depth in self.shapes.depths_for(count) if depth <= deepest]
        return arms + [shape for shape in self.shapes.trees_for(count) if shape.depth <= deepest and not fixed]

    def _seconds(self, count: int, auto: int, arm: Arm) -> float | None:
        """Expected seconds of a step in which `auto` of `count` requests draft; captured passes have room for all."""
        if self.shapes is not None or auto == count:
            return self.costs.at(count, arm)
        plain, few, drafting = self.costs.at(count, 0), self.costs.at(auto, 0), self.costs.at(auto, arm)
        return None if plain is None or few is None or drafting is None else plain + drafting - few

    def _probe(self, count: int, auto: int, plain: float, offers: dict[Arm, float], left: float) -> int | None:
        """Depth of a probe, if due and affordable: the cheapest that would pay if all its drafts were accepted."""
        if not self.account.due(self._steps):
            return None
        depths = {arm: seconds for arm, seconds in offers.items() if isinstance(arm, int)}
        if not depths:
            known = [arm for arm in self._arms(count, 0) if isinstance(arm, int) and arm <= FIRST_DEPTH]
            depths = {known[-1]: plain + plain} if known else {}
        could = [depth for depth, seconds in depths.items() if (count + auto * depth) * plain > count * seconds]
        depth = min(could or depths, key=lambda depth: depths[depth], default=None)
        return depth if depth is not None and depths[depth] - plain <= left else None

    def _look(self, count: int, best: Arm, rates: dict[Arm, float]) -> Arm | None:
        """Return an option to run once instead of the best, if a look is due."""
        bucket = self.costs.bucket(count)
        if bucket not in self._looks:  # plain steps are the reference, so time them soon
            wait = 1 if self.costs.measured(count, 0) is None else PATIENCE
            wait = LOOK_EVERY if self.costs.settled(count, 0) else wait
            self._looks[bucket] = self._steps + wait, wait, True
        at, wait, plain = self._looks[bucket]
        if self._steps < at:
            return None
        wait = min(max(wait + wait, PATIENCE), LOOK_EVERY)
        self._looks[bucket] = self._steps + wait, wait, not plain or self.costs.measured(count, 0) is None
        near = [arm for arm, rate in rates.items() if rate > NEARLY * rates[best] and arm != best]
        return 0 if plain else min(near, key=lambda arm: self.costs.last(count, arm), default=0)

    def _holds(self, kind: str, arm: Arm, count: int, auto: int) -> int:
        """Steps for which the choice holds: doubles with each repetition; one while acceptance is not proven."""
        before, wait = self._alike
        if kind in ("look", "probe"):
            return 1
        self._alike = arm, min(HOLD, wait + wait) if arm == before and wait else 1
        held = self._alike[1]
        if not auto:
            return HOLD
        if (arm and not self.acceptance.proven) or (not arm and self.costs.measured(count, 0) is None):
            return 1
        return held if arm else min(held, self.account.wait(self._steps, HOLD))

    # --- what came of it ---------------------------------------------------------------------------------------

    def observe(self, report: StepReport) -> None:
        """Learn from a committed step. Later steps may have been chosen already."""
        choice = report.choice
        if report.fates:
            self.acceptance.observe(report.fates)
        elif choice is not None and choice.shape.kind == "tree":
            self.acceptance.observe_trees(choice.shape, report.rounds)
        if choice is not None and choice.purpose is not None:
            self._depths.update(choice.depths)
            self._in_trees += choice.purpose.auto if choice.shape.kind == "tree" else 0
            self._book(choice, choice.purpose, report)

    def _book(self, choice: Choice, purpose: Purpose, report: StepReport) -> None:
        """Record a step's time and what its drafts saved."""
        count = report.requests or len(choice.depths)
        arm: Arm = choice.shape if choice.shape.kind == "tree" else choice.depth
        plain, more = self.costs.at(count, 0), report.catching_up
        if report.seconds is not None:
            self.account.total += report.seconds
            seen, usual = report.seconds - report.planning, self.costs.measured(count, arm)
            if arm and purpose.backlog and usual is not None and plain is not None:
                more = min(max(more, seen - usual), plain + more)  # the step may be late for another reason
            elif choice.uniform:
                self.costs.observe(count, arm, seen - more)
        if arm and purpose.backlog:
            self._debt = more
        plain, seconds = self.costs.at(count, 0), self._seconds(count, min(purpose.auto, count), arm)
        if purpose.fixed or plain is None:
            return
        if arm and seconds is not None:
            self.account.book((count + report.accepted) / count * plain - seconds - more, plain)
        elif not arm and purpose.kind == "plain" and purpose.at >= self.account.began:
            self.account.end(self._steps, plain)

    def events(self) -> list[str]:
        """Return messages for the operator and clear them."""
        return self.acceptance.take_events() + self.drift.take()

    def report(self) -> dict[str, Any]:
        chosen, account = max(1, self._depths.total()), self.account
        return {
            "reason": self._reason,
            "acceptance_by_depth": self.acceptance.by_depth,
            "rounds": self.acceptance.rounds,
            "collapsed": self.acceptance.collapsed,
            "drift": self.drift.report().as_json(),
            "step_seconds_by_depth_and_requests": self.costs.report(),
            "seconds": account.total,
            "seconds_saved_by_drafts": account.saved,
            "spells": account.spells,
            "seconds_lost_by_probes": account.lost,
            "rows_in_trees": self._in_trees,
            "rows_by_depth": dict(sorted(self._depths.items())),
            "share_of_depths": {depth: count / chosen for depth, count in sorted(self._depths.items())},
        }
