"""Chooses how many suffix drafts a round verifies. No torch.

Suffix drafts need no drafter pass; they cost the longer verification (`step_times.py`), and each is worth its
probability to be accepted (`suffix_acceptance.py`). A round of them must promise more tokens per second than plain
steps and than the drafter's plan. Behind a drafter's chains they must be worth more than their time.
"""

from collections.abc import Collection, Sequence

from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.step_times import StepTimes, level
from eyas.plan.shapes import MARGIN, offered

OVER_DRAFTER = 1.1
"""Tokens that suffix drafts must promise, relative to the drafter's drafts, to replace them."""
FRESH = 512
"""Uses of cached step times before they are read again."""
Survivals = Collection[Sequence[float]]
"""Per request with an offer: the probability of each draft to be accepted at all."""


class SuffixChoice:
    """Weighs suffix drafts against their time and against the drafter's drafts."""

    def __init__(self, times: StepTimes, shapes: CapturedShapes, *, exact: bool) -> None:
        """`exact`: passes have no padding, so only live tokens take time."""
        self.shapes, self._times, self._exact = shapes, times, exact
        self._lines: dict[int, tuple[int, list[tuple[int, float]]]] = {}
        """Per number of requests: uses left, and seconds by depth."""

    def round_depth(self, rows: int, survivals: Survivals, drafter_rate: float) -> int:
        """Depth of a round with suffix drafts only; 0 if it does not pay."""
        plain = self._times.at(rows, 0)
        if plain is None or not any(survivals):
            return 0
        rates = {
            depth: (rows + gained(survivals, depth)) / self.seconds(rows, depth, survivals)
            for depth in self.shapes.offered_for(rows)
        }
        best = max(rates, key=lambda depth: rates[depth], default=0)
        return best if best and rates[best] > max(MARGIN * rows / plain, OVER_DRAFTER * drafter_rate) else 0

    def round_beyond(self, rows: int, depth: int, gains: Survivals, rate: float) -> int:
        """Depth of a round in which suffix drafts go on behind the drafter's, at least `depth`.

        `gains` are probabilities of each request's further drafts; one second is worth `rate` tokens.
        """
        nets, without = {depth: (MARGIN - 1) * rows}, self.seconds(rows, depth, (), behind=depth)
        for deeper in self.shapes.offered_for(rows):
            if deeper > depth and (self._exact or deeper in self.shapes.offered):
                seconds = self.seconds(rows, deeper, gains, behind=depth) - without
                nets[deeper] = gained(gains, deeper - depth) - rate * seconds
        return max(nets, key=lambda deeper: nets[deeper])

    def seconds(self, rows: int, depth: int, survivals: Survivals, *, behind: int = 0) -> float:
        """Seconds of a step with these suffix drafts `behind` the drafter's, without the drafter's passes."""
        uses, line = self._lines.get(rows, (0, []))
        if not uses:
            uses, line = FRESH, [(0, self._times.at(rows, 0) or 0.0)]
            for known in self.shapes.offered_for(rows):
                # Untimed depths are assumed to be free: if chosen by mistake, they are timed at once.
                line.append((known, max(line[-1][1], self._times.at(rows, offered(known)) or 0.0)))
        self._lines[rows] = uses - 1 if line[0][1] else 0, line
        if self._exact:
            return level(line, behind + sum(min(len(row), depth - behind) for row in survivals) / rows)
        return level(line, depth)

    def observe(self, rows: int, depth: int, drafts: int, seconds: float) -> None:
        """Add the time of a step without drafter passes."""
        each, plain = drafts / rows, self._times.at(rows, 0)
        if self._exact and plain is not None and 0 < each < depth:
            known = self.shapes.offered_for(rows)
            depth = min(known, key=lambda one: abs(one - each))
            seconds = plain + max(0.0, seconds - plain) * depth / each
        arm = offered(depth) if depth else 0
        if self._times.measured(rows, arm) is None:
            self._lines.pop(rows, None)
        if drafts or not (depth and self._exact):
            self._times.observe(rows, arm, seconds)


def gained(survivals: Survivals, depth: int) -> float:
    """Expected tokens from this many drafts of each request."""
    return sum(sum(row[:depth]) for row in survivals)
