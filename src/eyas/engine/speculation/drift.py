"""The drift alarm: does the drafter hold as deep as it is served? The doctor's measures, live. Neither torch nor numpy.

It hears of check-ups, rounds that are drafted to the deepest depth and watched (drift_probe.py), and of the fate of
drafts. Both of its signs are about what changes with depth; a weak drafter may be the same at every depth.

    growth   the state handed on grows: the slope of ln(RMS) by depth, over the latest check-ups, makes the deepest more
             than BEARABLE times as large as that of depth 1
    fading   drafts of a depth are accepted, behind accepted ones, less than FADED times as often as first drafts

A sign fires when its interval lies beyond the bound and clears when things are well on this side of it. While one has
fired, requests on auto draft no deeper than what is healthy. Check-ups go on to the deepest depth all the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, inf, log, nan, sqrt
from statistics import fmean, stdev
from sys import float_info
from typing import Any

from eyas.drafter.drift import Estimate, log_sizes, slope

CHECKUPS, FEWEST_CHECKUPS = 32, 8
"""Check-ups that are judged together, and how few are too few; also the rounds between two looks at their drafts."""
ERRORS = 3.0
"""Standard errors on both sides of an estimate: the alarm is asked thousands of times a day."""
BEARABLE = 2.0
"""Times its size at depth 1 that a state may have at a depth that is drafted. At depth 7 the shipped EAGLE-3.1 drafter
has 1.03, the EAGLE-3 control beside it 1.6 to 1.8 with no loss of acceptance, one whose `norm_output` was lost 5.0."""
FADED, UNFADED = 0.5, 0.7
"""Conditional acceptance of a depth in parts of that of depth 1: less has faded, more is back. Both of the drafters
above have 0.9 and more at every depth; with `norm_output` lost it is 0.4 at depth 2 and 0.2 at depth 3."""
LARGEST = sqrt(float_info.max)
"""Stands for sizes beyond all numbers."""
MEMORY = 200
"""Drafts of a depth after which the fate of an earlier one has faded to a third."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """The state of things, for metrics and for people. Lists are by depth."""

    firing: bool
    fired: int
    """How often a sign has fired so far."""
    deepest: int
    """No deeper do requests on auto draft."""
    signs: dict[str, str]
    """What fires, and its evidence in words."""
    checkups: int
    seconds: float
    """What they took together."""
    growth: Estimate
    """Of the fed-back state per depth, over the latest check-ups: 0 is flat."""
    rms: list[float]
    mass: dict[str, list[float]]
    """Where the drafter looks, by region: means over the latest check-ups, as is `rms` (geometric)."""
    acceptance: list[float]
    """Given that all drafts before it were accepted; NaN where none was tried."""

    def as_json(self) -> dict[str, Any]:
        """Without NaN, which JSON does not know."""
        return {
            **asdict(self),
            "growth": self.growth.as_json(),
            "acceptance": [None if chance != chance else chance for chance in self.acceptance],
        }


class DriftAlarm:
    """Takes what is seen, says what it means."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.checkups = 0
        self.seconds = 0.0
        """What check-ups took so far."""
        self.fired = 0
        self.deepest = max_depth
        """The deepest depth that is healthy. Depth 1 always is: all others are compared with it."""
        self.growth = Estimate(value=nan, low=-inf, high=inf)
        """Slope of ln(RMS) by depth, mean over the latest check-ups; it may lie anywhere while these are few."""
        self._sizes: deque[list[float]] = deque(maxlen=CHECKUPS)
        """ln(RMS) by depth of the latest check-ups."""
        self._masses: deque[Mapping[str, Sequence[float]]] = deque(maxlen=CHECKUPS)
        self._tries, self._hits = [0.0] * max_depth, [0.0] * max_depth
        self._rounds = 0
        self._grows = False
        self._faded: set[int] = set()
        self._events: list[str] = []

    def observe_checkup(self, rms: Sequence[float], mass: Mapping[str, Sequence[float]], seconds: float = 0.0) -> None:
        """Take what a round showed at every depth. A state that overflows has grown, whatever it is now."""
        self._sizes.append(log_sizes([size if size < LARGEST else LARGEST for size in rms]))
        self._masses.append(mass)
        self.checkups += 1
        self.seconds += seconds
        slopes = [slope(sizes) for sizes in self._sizes]
        value, count = fmean(slopes), len(slopes)
        error = stdev(slopes) / sqrt(count) if count >= FEWEST_CHECKUPS else inf
        self.growth = _around(value, error)
        self._judge()

    def observe_round(self, drafted: int, accepted: int, times: int = 1) -> None:
        """Take the fate of a chain, or of so many alike. Of drafts behind the first refused one nothing is known."""
        # A try adds one and lets what was there fade by 1 / memory, so many times.
        memory, kept = MEMORY, (1 - 1 / MEMORY) ** times
        for index in range(min(drafted, accepted + 1)):
            self._tries[index] = memory + (self._tries[index] - memory) * kept
            hits = memory if index < accepted else 0
            self._hits[index] = hits + (self._hits[index] - hits) * kept
        before = self._rounds
        self._rounds += times
        if self._rounds // CHECKUPS > before // CHECKUPS:
            self._judge()

    @property
    def firing(self) -> bool:
        """Whether a sign has fired and not cleared."""
        return self._grows or bool(self._faded)

    def fading(self, depth: int) -> Estimate:
        """Log of conditional acceptance of a depth in parts of that of depth 1."""
        ratio = variance = 0.0
        for index, sign in ((depth - 1, 1), (0, -1)):
            # Half a hit and half a miss that never were keep the logarithm finite.
            tries = self._tries[index] + 1
            chance = (self._hits[index] + 0.5) / tries
            ratio += sign * log(chance)
            variance += (1 - chance) / (chance * tries)
        return _around(ratio, sqrt(variance))

    def take(self) -> list[str]:
        """What an operator should know and has not been told."""
        events, self._events = self._events, []
        return events

    def report(self) -> DriftReport:
        """The state of things; another thread may ask."""
        all_sizes, masses = list(self._sizes), list(self._masses)
        return DriftReport(
            firing=self.firing,
            fired=self.fired,
            deepest=self.deepest,
            signs=self._signs(),
            checkups=self.checkups,
            seconds=self.seconds,
            growth=self.growth,
            rms=[exp(fmean(sizes)) for sizes in zip(*all_sizes, strict=True)],
            mass={
                region: [fmean(shares) for shares in zip(*(mass[region] for mass in masses), strict=True)]
                for region in (masses[0] if masses else ())
            },
            acceptance=[hits / tries if tries else nan for hits, tries in zip(self._hits, self._tries, strict=True)],
        )

    def _judge(self) -> None:
        before = {"growth": self._grows, "fading": bool(self._faded)}
        growth, bound = self.growth, log(BEARABLE) / max(1, self.max_depth - 1)
        self._grows = growth.high > bound if self._grows else growth.low > bound
        for depth in range(1, self.max_depth + 1):  # depth 1, held against itself, never fades
            ratio = self.fading(depth)
            if ratio.high < log(FADED):
                self._faded.add(depth)
            elif ratio.value > log(UNFADED):
                self._faded.discard(depth)
        unfit = [*self._faded, self.max_depth + 1]
        if self._grows:
            sizes = [fmean(sizes) for sizes in zip(*self._sizes, strict=True)]
            too_large = (depth for depth, size in enumerate(sizes, start=1) if size - sizes[0] > log(BEARABLE))
            unfit.append(next(too_large, self.max_depth))
        self.deepest = min(unfit) - 1
        self._tell(before)

    def _tell(self, before: Mapping[str, bool]) -> None:
        """Say what has changed."""
        signs = self._signs()
        for name, was in before.items():
            if name in signs and not was:
                self.fired += 1
                self._events.append(
                    f"drift alarm: {signs[name]}. Requests on auto draft no deeper than {self.deepest}; `eyas doctor` "
                    "on this drafter and prompts like these says more"
                )
            elif was and name not in signs:
                rest = "they draft as deep as pays again" if not signs else f"no deeper than {self.deepest}, though"
                self._events.append(f"drift alarm: {name} has passed; requests on auto: {rest}")

    def _signs(self) -> dict[str, str]:
        signs = {}
        if self._grows:
            growth = self.growth
            signs["growth"] = (
                f"the fed-back state grows by {growth.value:.1%} a depth ({growth.low:.1%} to {growth.high:.1%} by the "
                f"last {len(self._sizes)} check-ups) and comes to {exp(growth.value * (self.max_depth - 1)):.1f} times "
                f"its size at depth {self.max_depth}"
            )
        if self._faded:
            depth = min(self._faded)
            first, here = (self._hits[i] / self._tries[i] for i in (0, depth - 1))
            signs["fading"] = (
                f"drafts of depth {depth} are accepted in {here:.0%} of {self._tries[depth - 1]:.0f} cases in which "
                f"all before them were, first drafts in {first:.0%}"
            )
        return signs


def _around(value: float, error: float) -> Estimate:
    return Estimate(value=value, low=value - ERRORS * error, high=value + ERRORS * error)
