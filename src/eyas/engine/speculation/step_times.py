"""Seconds of a whole step by its rows and by what it drafts. No torch.

    measured    the lower median of the latest times of steps with as many rows that drafted alike: single steps are
                late, none is early. Drafts that were not made for long are forgotten
    rehearsed   before there are two times: what the rehearsal says, between its rows and depths by lines, moved by as
                much as plain steps took more than rehearsed, or scaled to what they took less
    in order    an estimate is never below what a shallower draft was measured to take, nor above what a deeper one did

Estimates of what was not measured are meant to be too low rather than too high: who is chosen by mistake is measured
soon, who is passed over by mistake is not. Without a rehearsal the two or three depths measured first are the line.

Invariant: where nothing is known of plain steps or of any draft the answer is None, and nothing is chosen by it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median_low

from eyas.engine.speculation.acceptance import MEMORY
from eyas.engine.speculation.step_report import Arm, Rehearsal

WINDOW = 11
"""Latest times that count."""
EARLY = 0.7
"""A step that takes less than this part of the typical time shows that times have fallen: older ones are dropped."""


class StepTimes:
    """What steps take on this machine."""

    def __init__(self) -> None:
        self.bucket: Callable[[int], int] = int
        """Rows that are taken for the same, where passes are captured for some numbers of them."""
        self._times: dict[tuple[int, Arm], deque[float]] = {}
        self._at: dict[tuple[int, Arm], int] = {}
        """Number of the latest of these."""
        self._observed = 0
        self._measured: dict[tuple[int, Arm], float] = {}
        self._rehearsed: dict[Arm, list[tuple[int, float]]] = {}
        """Rows and seconds, in order."""

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Take the times of a rehearsal. What took longer than more rows or deeper drafts did was late."""
        for rows, arm in rehearsal.steps:
            known = dict(self._rehearsed.get(arm, ())) | {rows: _mended(rehearsal.steps, rows, arm)}
            self._rehearsed[arm] = sorted(known.items())

    def observe(self, rows: int, arm: Arm, seconds: float) -> None:
        """Take the time of one step."""
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
        """Typical time of such steps, if there were two, or a plain one that took less than rehearsed."""
        return self._measured.get((self.bucket(rows), arm))

    def settled(self, rows: int, arm: Arm) -> bool:
        """Whether there are as many times of such steps as count."""
        return len(self._times.get((self.bucket(rows), arm), ())) == WINDOW

    def last(self, rows: int, arm: Arm) -> int:
        """Number of the latest such step; of one that was never seen, 0."""
        return self._at.get((self.bucket(rows), arm), 0)

    def at(self, rows: int, arm: Arm) -> float | None:
        """Expected seconds of such a step."""
        rows = self.bucket(rows)
        known = self._measured.get((rows, arm))
        if known is not None and (arm == 0 or self._rehearsed or len(self._times[rows, arm]) > 1):
            return known
        if known is not None:  # one time alone may have been late
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
        """Measured milliseconds by what is drafted and by rows."""
        told: dict[str, dict[int, float]] = {}
        for (rows, arm), seconds in sorted(self._measured.items(), key=lambda item: item[0][0]):
            name = f"depth {arm}" if isinstance(arm, int) else f"{arm.kind} {arm.depth} x {arm.width}"
            told.setdefault(name, {})[rows] = seconds
        return told

    def _base(self, rows: int, arm: Arm) -> float | None:
        """Rehearsed seconds; between two rehearsed depths by a line."""
        points = self._rehearsed.get(arm)
        if points or not isinstance(arm, int):
            return _along(points, rows) if points else None
        lines = sorted((depth, line) for depth, line in self._rehearsed.items() if isinstance(depth, int))
        return _along([(depth, _along(line, rows)) for depth, line in lines], arm) if lines else None

    def _late(self, rows: int) -> float:
        """Seconds that plain steps take more than rehearsed."""
        points = []
        for (at, arm), seconds in sorted(self._measured.items(), key=lambda item: item[0][0]):
            base = self._base(at, arm) if arm == 0 else None
            if base is not None:
                points.append((at, seconds - base))
        return level(points, rows)

    def _between(self, rows: int, depth: int) -> float | None:
        """From what was measured: at these rows by a line through depths, else in parts of what plain steps take."""
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
    """A polygon through points, level before the first and behind the last; 0 without any."""
    if not points:
        return 0.0
    place = bisect_left([at for at, _ in points], count)
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (low, at_low), (high, at_high) = points[place - 1], points[place]
    return at_low + (at_high - at_low) * (count - low) / (high - low)


def _mended(steps: Mapping[tuple[int, Arm], float], rows: int, arm: Arm) -> float:
    """Seconds of a rehearsed step, or of a larger one that took less."""
    if not isinstance(arm, int):
        return steps[rows, arm]
    chains = [(at, deep, seconds) for (at, deep), seconds in steps.items() if isinstance(deep, int)]
    return min(seconds for at, deep, seconds in chains if at >= rows and deep >= arm)


def _along(points: Sequence[tuple[int, float]], count: int) -> float:
    """Level before the first point; behind the last it goes on as the steepest part before."""
    last, seconds = points[-1]
    if count <= last:
        return level(points, count)
    slopes = [(later - sooner) / (high - low) for (low, sooner), (high, later) in pairwise(points)]
    return seconds + max([0.0, *slopes[-1:]]) * (count - last) if slopes else seconds * count / max(last, 1)
