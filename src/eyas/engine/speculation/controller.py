"""How deep to draft: chosen for a step, or for some steps, from measured times and measured acceptance. No torch.

    step_times.py   seconds of a whole step, by its rows and by what it drafts; seeded by the rehearsal at start
    acceptance.py   how likely drafts are accepted; seeded by the drafter's record, or a guess
    probes.py       what drafting may lose, and when it is tried again
    drift.py        how deep the drafter is fit to be used at all
    captured_shapes.py  which passes there are, where they are captured

A step of n requests that draft k deep gives n (1 + S(1) + ... + S(k)) tokens in expectation. Steps follow each other,
so tokens per second over a long time are that number over the time of the step (renewal-reward): `choose` takes the
depth with the best such rate, or captured trees. Plain decoding is depth 0, and others have to beat it by a margin.

    draft   the best rate. Until drafts were accepted, the account has to bear that all of the step's are refused
    look    now and then plain, or what is nearly as good and has not been timed for longest
    probe   where nothing promises to pay, drafts as cheap as can be, when they are due and can be afforded
    plain   otherwise

All requests on auto draft alike. A request may take the choice away: `off` never drafts, `fixed` always drafts its
depth, fit or not.

No choice made here can change what is generated: a request's token is a function of the target's distribution and of
the request's own noise, and a draft only decides in which pass it is computed.
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
"""Drafts must promise this many times the tokens per second of plain decoding."""
LOOK_EVERY = 64
"""Steps between looks at something else than the best, once it is known well."""
NEARLY = 0.95
"""What gives this part of the best rate is worth a look."""
HOLD = 16
"""The most steps that a choice is meant for."""
FIRST_DEPTH = 2
"""Depth of the first drafts where no draft was ever timed: from it, deeper ones can be told."""


class Controller:
    """Chooses depths and learns from what came of them."""

    def __init__(
        self,
        max_depth: int,
        *,
        drift: DriftAlarm | None = None,
        recorded: Sequence[float] = (),
        costs: StepTimes | None = None,
    ) -> None:
        """`recorded` is the drafter's acceptance by depth, as far as somebody has measured or estimated it.

        `costs` is what steps take, if they have been timed.
        """
        assert max_depth >= 1
        self.max_depth = max_depth
        self.drift = drift or DriftAlarm(max_depth)
        self.costs = costs or StepTimes()
        self.acceptance = Acceptance(max_depth, recorded)
        self.account = Account()
        self.shapes: CapturedShapes | None = None
        """Passes that there are, where they are captured."""
        self._steps = 0
        self._surprises = 0
        """Those that were known when the latest choice was made."""
        self._looks: dict[int, tuple[int, int, bool]] = {}
        """By bucket of rows: the step of the next look, how long the wait for it was, and whether it is plain."""
        self._alike: tuple[Arm, int] = (0, 0)
        """What the latest choices had in common, and how many there were."""
        self._debt = 0.0
        """Seconds that a step took more than usual when the drafter last caught up with what had waited."""
        self._resting = False
        self._depths: Counter[int] = Counter()
        self._in_trees = 0
        self._reason = "no step yet"

    def captures(self, shapes: CapturedShapes) -> None:
        """Passes have these shapes, and what is not used of one is paid all the same."""
        self.shapes = shapes
        self.costs.bucket = shapes.rows_for

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Start from what steps took in a rehearsal."""
        self.costs.rehearse(rehearsal)

    # --- the choice --------------------------------------------------------------------------------------------

    def choose(self, rows: Sequence[RowFacts], *, after: int = 1) -> Choice:
        """Depths for the next step, which comes so many steps `after` the last one that was chosen for."""
        self._steps += after
        self._surprises = self.acceptance.surprises
        count, auto = len(rows), [row for row in rows if row.mode == "auto"]
        fixed = max((row.depth or 0 for row in rows if row.mode == "fixed"), default=0)
        assert fixed <= self.max_depth, "checked when the request came"
        backlog = any(row.pending > self.max_depth + 1 for row in rows)
        kind, arm, rate, self._reason = self._decide(count, len(auto), fixed, debt=self._debt if backlog else 0.0)
        if self.drift.firing:
            self._reason += f"; no deeper than {self.drift.deepest}, since the drift alarm has fired"
        deep = arm if isinstance(arm, int) else arm.depth
        own = {"auto": deep, "off": 0}
        depths = tuple([(row.depth or 0) if row.mode == "fixed" else own[row.mode] for row in rows])
        self._resting = self._rests(drafts=kind in ("draft", "look"))
        if self._resting and not auto:
            self._reason = "plain: hardly any draft was accepted, so the drafter follows nobody but for probes"
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
        """Whether drafts have fared so differently since the last choice that it should not be held any longer."""
        return self.acceptance.surprises > self._surprises or self.account.overdrawn

    def follows_new(self) -> bool:
        """Whether the drafter follows a request on auto that comes now; to be asked once for each."""
        return not self._resting or self.account.due(self._steps)

    def _rests(self, *, drafts: bool) -> bool:
        """Whether the drafter need not read along: it has collapsed, and probes have found nothing for long."""
        hopeless = PATIENCE * self.account.misses > LOOK_EVERY
        if drafts or not (self.acceptance.collapsed and hopeless):
            return False
        return self._resting or not self.account.in_spell

    def _decide(self, count: int, auto: int, fixed: int, *, debt: float) -> tuple[Kind, Arm, float, str]:
        """What requests on auto do in the next step, what for, the tokens per second expected, and the reason."""
        if not auto:
            return "plain", 0, 0.0, "no request leaves its depth to the controller"
        plain = self.costs.at(count, 0)
        if plain is None:
            return "plain", 0, 0.0, "plain: not enough steps have been timed yet"
        offers = {arm: s for arm in self._arms(count, fixed) if (s := self._seconds(count, auto, arm)) is not None}
        for arm in offers:  # a tree is a chain and more
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
                if self.account.misses or self.account.spells == 0:  # else the one before it was a success
                    self.acceptance.doubt()
                whom = f"{probe} deep for {auto} of {count} requests"
                return "probe", probe, usual, f"probe, {whom}: to see whether drafts are accepted and what they take"
            return "plain", 0, usual, f"plain, drafts would not pay: {promised:.3g} tokens/s expected {expected}"
        # A tree has to beat chains by the margin, too.
        best = max(paying, key=lambda arm: rates[arm] / (1.0 if isinstance(arm, int) else MARGIN))
        other = self._look(count, best, {arm: rates[arm] for arm in paying})
        if other is not None:
            why = "to time drafts that are nearly as good" if other else "plain: to time a step without drafts again"
            return "look", other, rates.get(other, usual), why
        what = f"{best} deep" if isinstance(best, int) else f"trees {best.depth} deep and {best.width} wide"
        why = f"{what} for {auto} of {count} requests: {rates[best]:.3g} tokens/s expected {expected}"
        return "draft", best, rates[best], why

    def _arms(self, count: int, fixed: int) -> list[Arm]:
        """Drafts that so many requests may make."""
        deepest = self.drift.deepest
        if self.shapes is None:
            return [*range(1, deepest + 1)]
        arms: list[Arm] = [depth for depth in self.shapes.depths_for(count) if depth <= deepest]
        return arms + [shape for shape in self.shapes.trees_for(count) if shape.depth <= deepest and not fixed]

    def _seconds(self, count: int, auto: int, arm: Arm) -> float | None:
        """Expected seconds of a step in which so many of its requests draft: captured passes have room for all."""
        if self.shapes is not None or auto == count:
            return self.costs.at(count, arm)
        plain, few, drafting = self.costs.at(count, 0), self.costs.at(auto, 0), self.costs.at(auto, arm)
        return None if plain is None or few is None or drafting is None else plain + drafting - few

    def _probe(self, count: int, auto: int, plain: float, offers: dict[Arm, float], left: float) -> int | None:
        """Depth of a probe, if one is due and affordable: the least that could pay if its drafts were accepted."""
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
        """What to run instead of the best for once, if it is time to."""
        bucket = self.costs.bucket(count)
        if bucket not in self._looks:  # all is compared with plain steps, so these are timed soon
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
        """Steps that this choice is meant for: twice as many whenever it is made again; one while all is doubtful."""
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
        """Learn from a step that is over. Others may have been chosen for since."""
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
        """Take the time of a step, and what its drafts have saved."""
        count = report.requests or len(choice.depths)
        arm: Arm = choice.shape if choice.shape.kind == "tree" else choice.depth
        plain, more = self.costs.at(count, 0), report.catching_up
        if report.seconds is not None:
            self.account.total += report.seconds
            seen, usual = report.seconds - report.thinking, self.costs.measured(count, arm)
            if arm and purpose.backlog and usual is not None and plain is not None:
                more = min(max(more, seen - usual), plain + more)  # a step may also be late for a reason of its own
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
        """What an operator should know and has not been told."""
        return self.acceptance.take_events() + self.drift.take()

    def report(self) -> dict[str, Any]:
        """The state of things, for logs and for people."""
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
