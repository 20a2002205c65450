"""Estimates the seconds of a whole step by rows and drafts. No torch.

    measured    lower median of the latest steps with these rows and drafts, since steps may be late but not early.
                Drafts that were not used for long are dropped
    rehearsed   used until two steps were measured: interpolated between the rehearsed rows and depths, then shifted by
                the delay of plain steps, or scaled by their speed-up
    in order    an estimate is at least the measured time of a shallower draft, at most that of a deeper one

Estimates of unmeasured options are rather too low than too high: an option chosen by mistake is soon measured, one
passed over by mistake is not. Without a rehearsal, the first measured depths are extrapolated by a line.

Invariant: without any time of plain steps or of drafts the estimate is None, and is not used for choices.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median_low

from eyas.engine.speculation.acceptance import MEMORY
from eyas.engine.speculation.step_report import Arm, Rehearsal

WINDOW = 11
"""Number of latest times used."""
EARLY = 0.7
"""A step below this fraction of the typical time shows that steps became faster: older times are dropped."""


class StepTimes:
    """Measured and estimated step times."""

    def __init__(self) -> None:
        self.bucket: Callable[[int], int] = int
        """Maps rows to a captured number of rows, whose steps share their times."""
        self._times: dict[tuple[int, Arm], deque[float]] = {}
        self._at: dict[tuple[int, Arm], int] = {}
        """Number of the latest step of each kind."""
        self._observed = 0
        self._measured: dict[tuple[int, Arm], float] = {}
        self._rehearsed: dict[Arm, list[tuple[int, float]]] = {}
        """(rows, seconds), sorted by rows."""

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Set rehearsed times. A time above that of a larger step is replaced by it."""
        for rows, arm in rehearsal.steps:
            known = dict(self._rehearsed.get(arm, ())) | {rows: _mended(rehearsal.steps, rows, arm)}
            self._rehearsed[arm] = sorted(known.items())

    def observe(self, rows: int, arm: Arm, seconds: float) -> None:
        """Add the time of a step."""
        key = self.bucket(rows), arm
        times = self._times.setdefault(key, deque(maxlen=WINDOW))
        if seconds < EARLY * self._measured.get(key, seconds):
            times.clear()
        times.append(seconds)
        self._observed += 1
        self._at[key] = self._observed
        early = arm == 0 and seconds < (self._base(*key) or 0.0)
        if len(times) > 1 or key in self._measured or early or (arm and not self._rehearsed):
            self._measured[key] = median_low(times)
        for old in [old for old in self._measured if old[1] and self._observed - self._at[old] > MEMORY]:
            del self._measured[old], self._times[old], self._at[old]

    def measured(self, rows: int, arm: Arm) -> float | None:
        """Typical time, from two steps, or one plain step that was faster than rehearsed."""
        return self._measured.get((self.bucket(rows), arm))

    def settled(self, rows: int, arm: Arm) -> bool:
        """Whether the window of latest times is full."""
        return len(self._times.get((self.bucket(rows), arm), ())) == WINDOW

    def last(self, rows: int, arm: Arm) -> int:
        """Number of the latest such step; 0 if there was none."""
        return self._at.get((self.bucket(rows), arm), 0)

    def at(self, rows: int, arm: Arm) -> float | None:
        """Estimated seconds of such a step."""
        rows = self.bucket(rows)
        known = self._measured.get((rows, arm))
        if known is not None and (arm == 0 or self._rehearsed or len(self._times[rows, arm]) > 1):
            return known
        if known is not None:  # a single time may have been late
            return min(known, self._between(rows, arm) or known) if isinstance(arm, int) else known
        if not self._rehearsed:
            return self._between(rows, arm) if isinstance(arm, int) else None
        base, plain, late = self._base(rows, arm), self._base(rows, 0), self._late(rows)
        if base is None or plain is None:
            return None
        base = base + late if late > 0 else base * (plain + late) / plain
        if isinstance(arm, int):
            here = [(depth, seconds) for (at, depth), seconds in self._measured.items() if at == rows and depth]
            base = max([base, *(seconds for depth, seconds in here if isinstance(depth, int) and 0 < depth < arm)])
            base = min([base, *(seconds for depth, seconds in here if isinstance(depth, int) and depth > arm)])
        return base

    def report(self) -> dict[str, dict[int, float]]:
        """Typical seconds by draft and rows."""
        report: dict[str, dict[int, float]] = {}
        for (rows, arm), seconds in sorted(self._measured.items(), key=lambda item: item[0][0]):
            name = f"depth {arm}" if isinstance(arm, int) else f"{arm.kind} {arm.depth} x {arm.width}"
            report.setdefault(name, {})[rows] = seconds
        return report

    def _base(self, rows: int, arm: Arm) -> float | None:
        """Rehearsed seconds, interpolated between rehearsed depths."""
        points = self._rehearsed.get(arm)
        if points or not isinstance(arm, int):
            return _along(points, rows) if points else None
        lines = sorted((depth, line) for depth, line in self._rehearsed.items() if isinstance(depth, int))
        return _along([(depth, _along(line, rows)) for depth, line in lines], arm) if lines else None

    def _late(self, rows: int) -> float:
        """Delay of plain steps against the rehearsal, in seconds."""
        points = []
        for (at, arm), seconds in sorted(self._measured.items(), key=lambda item: item[0][0]):
            base = self._base(at, arm) if arm == 0 else None
            if base is not None:
                points.append((at, seconds - base))
        return level(points, rows)

    def _between(self, rows: int, depth: int) -> float | None:
        """Estimate from measured steps: by a line through depths, scaled to the plain steps of these rows."""
        plain = sorted((at, seconds) for (at, arm), seconds in self._measured.items() if arm == 0)
        if not plain:
            return None
        here = _along(plain, rows)
        if depth == 0:
            return here
        others = {key: seconds for key, seconds in self._measured.items() if key != (rows, depth)}
        drafts = {key: seconds for key, seconds in others.items() if isinstance(key[1], int) and key[1]}
        if not drafts:
            return None
        nearest = min((at for at, _ in drafts), key=lambda at: max(at, rows) / min(at, rows))
        points = {0: _along(plain, nearest)}
        points |= {arm: seconds for (at, arm), seconds in drafts.items() if at == nearest and isinstance(arm, int)}
        return here * max(1.0, _along(sorted(points.items()), depth) / points[0])


def level(points: Sequence[tuple[float, float]], count: float) -> float:
    """Interpolate linearly, constant before the first point and after the last; 0 without points."""
    if not points:
        return 0.0
    place = bisect_left([at for at, _ in points], count)
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (low, at_low), (high, at_high) = points[place - 1], points[place]
    return at_low + (at_high - at_low) * (count - low) / (high - low)


def _mended(steps: Mapping[tuple[int, Arm], float], rows: int, arm: Arm) -> float:
    """Seconds of a rehearsed step, or of a larger one that was faster."""
    if not isinstance(arm, int):
        return steps[rows, arm]
    chains = [(at, deep, seconds) for (at, deep), seconds in steps.items() if isinstance(deep, int)]
    return min(seconds for at, deep, seconds in chains if at >= rows and deep >= arm)


def _along(points: Sequence[tuple[int, float]], count: int) -> float:
    """Interpolate, constant before the first point; after the last, extrapolate by its last rising segment."""
    last, seconds = points[-1]
    if count <= last:
        return level(points, count)
    slopes = [(later - sooner) / (high - low) for (low, sooner), (high, later) in pairwise(points)]
    return seconds + max([0.0, *slopes[-1:]]) * (count - last) if slopes else seconds * count / max(last, 1)
