"""How many suffix drafts a round verifies. No torch.

Suffix drafts take no pass of a drafter: they cost what the step takes longer for them (`step_times.py`). Each is worth
its chance to be accepted at all (`suffix_acceptance.py`). So a round of them must promise more tokens per second than
plain steps and than the drafter's plan do, and behind a drafter's chains they must be worth more than their time.
"""

from collections.abc import Collection, Sequence

from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.step_times import StepTimes, level
from eyas.plan.shapes import MARGIN, offered

OVER_DRAFTER = 1.1
"""Times what the drafter promises that suffix drafts must promise to be verified in place of its own."""
FRESH = 512
"""Uses of the times of so many requests before they are gathered anew."""
Survivals = Collection[Sequence[float]]
"""Of each request with an offer, the chances of its drafts to be accepted at all."""


class SuffixChoice:
    """Weighs suffix drafts against the time that they take, and against the drafter's."""

    def __init__(self, times: StepTimes, shapes: CapturedShapes, *, exact: bool) -> None:
        """`exact` says that a pass is as large as what is live in it; else all of its shape is paid."""
        self.shapes, self._times, self._exact = shapes, times, exact
        self._lines: dict[int, tuple[int, list[tuple[int, float]]]] = {}
        """By requests: uses left, and seconds by depth."""

    def round_depth(self, rows: int, survivals: Survivals, drafter_rate: float) -> int:
        """How deep a round goes that verifies suffix drafts alone; 0 where it does not pay."""
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
        """How deep a round goes whose drafter drafts `depth` deep; that, where more does not pay.

        `gains` are the chances of each request's drafts beyond; a second is worth as many tokens as the `rate` says.
        """
        nets, without = {depth: (MARGIN - 1) * rows}, self.seconds(rows, depth, (), behind=depth)
        for deeper in self.shapes.offered_for(rows):
            if deeper > depth and (self._exact or deeper in self.shapes.offered):
                seconds = self.seconds(rows, deeper, gains, behind=depth) - without
                nets[deeper] = gained(gains, deeper - depth) - rate * seconds
        return max(nets, key=lambda deeper: nets[deeper])

    def seconds(self, rows: int, depth: int, survivals: Survivals, *, behind: int = 0) -> float:
        """Of a step with such drafts but without the drafter's passes, where they go on `behind` its chains."""
        uses, line = self._lines.get(rows, (0, []))
        if not uses:
            uses, line = FRESH, [(0, self._times.at(rows, 0) or 0.0)]
            for known in self.shapes.offered_for(rows):
                # What was never timed is taken to be free: whatever is chosen by mistake is timed at once.
                line.append((known, max(line[-1][1], self._times.at(rows, offered(known)) or 0.0)))
        self._lines[rows] = uses - 1 if line[0][1] else 0, line
        if self._exact:
            return level(line, behind + sum(min(len(row), depth - behind) for row in survivals) / rows)
        return level(line, depth)

    def observe(self, rows: int, depth: int, drafts: int, seconds: float) -> None:
        """Take the time of a step without a drafter's pass, so deep and with so many drafts."""
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
    """Tokens that so many drafts of each request are expected to give."""
    return sum(sum(row[:depth]) for row in survivals)
