"""The drift alarm: detects drafters that get worse with depth, as the doctor does, while serving. No torch, no numpy.

Its input are check-ups (drift_probe.py), which measure rounds drafted to the deepest depth, and the acceptance of
drafts. Both signs compare depths with each other; a drafter that is equally weak at every depth raises no alarm.

    growth   the fed-back state grows: by the slope of ln(RMS) over depth in the latest check-ups, it is more than
             BEARABLE times as large at the deepest depth as at depth 1
    fading   conditional acceptance at a depth is less than FADED times that of depth 1

A sign fires when its confidence interval lies beyond the bound, and clears with some hysteresis. While a sign fires,
requests on auto draft no deeper than the healthy depth. Check-ups still go to the deepest depth.
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
"""Check-ups averaged, and the least number to judge by; also the rounds between two judgements of acceptance."""
ERRORS = 3.0
"""Half width of confidence intervals in standard errors; large, because the alarm is checked very often."""
BEARABLE = 2.0
"""Tolerated size of a state relative to depth 1. At depth 7 the shipped EAGLE-3.1 drafter has 1.03, an EAGLE-3 control
1.6 to 1.8 without loss of acceptance, a drafter whose `norm_output` was lost 5.0."""
FADED, UNFADED = 0.5, 0.7
"""Conditional acceptance relative to depth 1 below which a depth has faded, and above which it is healthy again. The
first two drafters above have at least 0.9 at every depth; with `norm_output` lost it is 0.4 at depth 2, 0.2 at 3."""
LARGEST = sqrt(float_info.max)
"""Replaces infinite sizes."""
MEMORY = 200
"""Drafts per depth after which the weight of an earlier one is 1/e."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """State of the drift alarm for metrics and status pages. Lists are by depth."""

    firing: bool
    fired: int
    """How often a sign has fired."""
    deepest: int
    """Depth limit of requests on auto."""
    signs: dict[str, str]
    """Signs that fire, with their evidence."""
    checkups: int
    seconds: float
    growth: Estimate
    """Growth of the fed-back state per depth in the latest check-ups; 0 is flat."""
    rms: list[float]
    mass: dict[str, list[float]]
    """Attention mass by region, averaged over the latest check-ups; `rms` is a geometric mean over them."""
    acceptance: list[float]
    """Conditional acceptance; NaN for depths without drafts."""

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "growth": self.growth.as_json(),
            "acceptance": [None if chance != chance else chance for chance in self.acceptance],
        }


class DriftAlarm:
    """Judges check-ups and acceptance by depth."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.checkups = 0
        self.seconds = 0.0
        self.fired = 0
        self.deepest = max_depth
        """Deepest healthy depth. Depth 1 always is healthy, because the others are compared with it."""
        self.growth = Estimate(value=nan, low=-inf, high=inf)
        """Mean slope of ln(RMS) by depth over the latest check-ups; unbounded while there are few."""
        self._sizes: deque[list[float]] = deque(maxlen=CHECKUPS)
        """ln(RMS) by depth in the latest check-ups."""
        self._masses: deque[Mapping[str, Sequence[float]]] = deque(maxlen=CHECKUPS)
        self._tries, self._hits = [0.0] * max_depth, [0.0] * max_depth
        self._rounds = 0
        self._grows = False
        self._faded: set[int] = set()
        self._events: list[str] = []

    def observe_checkup(self, rms: Sequence[float], mass: Mapping[str, Sequence[float]], seconds: float = 0.0) -> None:
        """Add a check-up. A state that overflowed counts as the largest size."""
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
        """Add `times` chains with these drafts. Drafts behind a rejected one say nothing."""
        # Each chain adds one try after fading the earlier ones by 1 / memory.
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
        """Whether any sign fires."""
        return self._grows or bool(self._faded)

    def fading(self, depth: int) -> Estimate:
        """Log of a depth's conditional acceptance relative to depth 1."""
        ratio = variance = 0.0
        for index, sign in ((depth - 1, 1), (0, -1)):
            # Half a hit and half a miss are added to keep the logarithm finite.
            tries = self._tries[index] + 1
            chance = (self._hits[index] + 0.5) / tries
            ratio += sign * log(chance)
            variance += (1 - chance) / (chance * tries)
        return _around(ratio, sqrt(variance))

    def take(self) -> list[str]:
        """Return messages for the operator and clear them."""
        events, self._events = self._events, []
        return events

    def report(self) -> DriftReport:
        """Current state; may be called from another thread."""
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
        for depth in range(1, self.max_depth + 1):  # depth 1 never fades relative to itself
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
        """Report changes of signs."""
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
