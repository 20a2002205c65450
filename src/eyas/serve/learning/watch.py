"""Whether a drafter that was swapped in holds up in real answers, by looks whose number is bounded.

What is compared is the acceptance length of chains as deep as both drafters were drafted to, three at most:
1 + a1 + a1 a2 + a1 a2 a3, with a(j) the share of drafts of position j that were accepted behind accepted ones. So it
does not matter that the controller chooses other depths for the new drafter. The requests before the swap stand
against those behind it. Answers differ more than rounds do, so the error is that of requests, not of rounds: each
moves the length by its influence (the delta method), and the squares of these add up. An error is never taken for less
than independent rounds would have.

There are `LOOKS` looks, after 64, 128, ... passes of the new drafter's requests, and `ERROR` is shared out among
them, so that a drafter that is as good as the old one is sent back in at most so many cases. The last look ends the
watch: who was not seen to be worse by then stays. A look with too few requests or drafts says nothing, and while the
last one does it is repeated; where nothing is known of the drafter before, it ends the watch all the same. But a
drafter that is hardly drafted with any more, where the one before was, is worse whatever its drafts would be worth: the
controller has given it up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import prod, sqrt
from statistics import NormalDist
from typing import Any, Literal

from eyas.serve.learning.round_tally import POSITIONS, RoundTally

FIRST_LOOK = 64
"""Passes; every other look comes after twice as many as the one before."""
LOOKS = 8
LAST_LOOK = FIRST_LOOK * 2 ** (LOOKS - 1)
ERROR = 0.05
"""The chance that a drafter that is as good is sent back, and that one that is no better is called better."""
LEAST_REQUESTS = 8
LEAST_TRIES = 16
"""Requests and first drafts without which nothing is said."""
GIVEN_UP = 0.25
"""Drafts per pass in parts of those of the drafter before, below which a drafter is hardly drafted with any more."""

Verdict = Literal["worse", "better", "undecided"]


@dataclass(frozen=True, kw_only=True)
class LengthEstimate:
    """An acceptance length, from requests."""

    acceptance_length: float
    error: float
    """Standard error."""
    requests: int
    """That had drafts."""
    rounds: int
    passes: int
    """Of all requests, those without drafts too."""

    def as_json(self) -> dict[str, Any]:
        """For records and for /status."""
        return {name: round(value, 4) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, told: Mapping[str, float]) -> "LengthEstimate":
        """What `as_json` wrote; KeyError if it did not."""
        return cls(
            acceptance_length=told["acceptance_length"],
            error=told["error"],
            requests=int(told["requests"]),
            rounds=int(told["rounds"]),
            passes=int(told["passes"]),
        )


@dataclass(frozen=True, kw_only=True)
class LookResult:
    """What a look saw."""

    verdict: Verdict
    depth: int
    """As deep as both lengths go."""
    before: LengthEstimate
    after: LengthEstimate
    change: float
    low: float
    high: float
    """after / before - 1, and where it may lie."""
    passes: int

    def as_json(self) -> dict[str, Any]:
        """For records and for /status."""
        return {
            "verdict": self.verdict,
            "depth": self.depth,
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "change": {"value": round(self.change, 4), "low": round(self.low, 4), "high": round(self.high, 4)},
            "passes": self.passes,
        }

    @property
    def words(self) -> str:
        """For logs."""
        return (
            f"acceptance length {self.before.acceptance_length:.3f} before and {self.after.acceptance_length:.3f} "
            f"after, {self.change:+.1%} ({self.low:+.1%} to {self.high:+.1%}), {self.depth} deep, by "
            f"{self.after.rounds} rounds of {self.after.requests} requests"
        )


def estimate_length(tallies: Sequence[RoundTally], depth: int) -> LengthEstimate:
    """The acceptance length of chains `depth` deep; every position must have been tried."""
    passes = sum(tally.passes for tally in tallies)
    tallies = [tally for tally in tallies if tally.tries[0]]
    tries = [sum(tally.tries[j] for tally in tallies) for j in range(depth)]
    hits = [sum(tally.hits[j] for tally in tallies) for j in range(depth)]
    share = [hit / count for hit, count in zip(hits, tries, strict=True)]
    slopes = [_slope(share, j) for j in range(depth)]
    influences = [
        sum(slopes[j] * (tally.hits[j] - share[j] * tally.tries[j]) / tries[j] for j in range(depth))
        for tally in tallies
    ]
    count = len(tallies)
    clustered = sum(one * one for one in influences) * count / max(1, count - 1)
    # Half a hit and half a miss that never were keep the error of "never accepted" above zero.
    smooth = [(hit + 0.5) / (tried + 1) for hit, tried in zip(hits, tries, strict=True)]
    independent = sum(_slope(smooth, j) ** 2 * smooth[j] * (1 - smooth[j]) / tries[j] for j in range(depth))
    length = 1 + sum(prod(share[: j + 1]) for j in range(depth))
    return LengthEstimate(
        acceptance_length=length,
        error=sqrt(max(clustered, independent)),
        requests=count,
        rounds=tries[0],
        passes=passes,
    )


def _slope(share: Sequence[float], position: int) -> float:
    """How much the length changes with the acceptance at a position."""
    return sum(
        prod(one for j, one in enumerate(share[: last + 1]) if j != position) for last in range(position, len(share))
    )


def lengths_of(tallies: Sequence[RoundTally]) -> list[LengthEstimate]:
    """The acceptance lengths of chains one deep, two deep, ..., as far as there is enough to say so."""
    tries = [sum(tally.tries[j] for tally in tallies) for j in range(POSITIONS)]
    if sum(1 for tally in tallies if tally.tries[0]) < LEAST_REQUESTS:
        return []
    reached = sum(1 for _ in takewhile(lambda count: count >= LEAST_TRIES, tries))
    return [estimate_length(tallies, depth) for depth in range(1, reached + 1)]


def look(before: Sequence[LengthEstimate], after: Sequence[LengthEstimate], *, passes: int) -> LookResult | None:
    """Hold the lengths of two drafters against each other; None if there is too little to say anything."""
    depth = min(len(before), len(after))
    if not depth:
        return None
    old, new = before[depth - 1], after[depth - 1]
    error = sqrt(old.error**2 + new.error**2)
    reach = _student(1 - ERROR / LOOKS, min(old.requests, new.requests) - 1) * error
    change = new.acceptance_length - old.acceptance_length
    verdict: Verdict = "worse" if change + reach < 0 else "better" if change - reach > 0 else "undecided"
    low, high = ((change + side) / old.acceptance_length for side in (-reach, reach))
    return LookResult(
        verdict=verdict,
        depth=depth,
        before=old,
        after=new,
        change=change / old.acceptance_length,
        low=low,
        high=high,
        passes=passes,
    )


def _student(chance: float, freedom: int) -> float:
    """Student's quantile, by Cornish and Fisher's series: errors of few requests are themselves uncertain."""
    z = NormalDist().inv_cdf(chance)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


class SwapWatch:
    """The watch over one drafter: looks when it is time, and says when it is over."""

    def __init__(self, before: Sequence[LengthEstimate]) -> None:
        self.before = list(before)
        """Of the drafter before, by depth."""
        self.last: LookResult | None = None
        self.over = False
        """Whether all has been seen that there is to see."""
        self.next_look = FIRST_LOOK
        """After so many passes."""

    def due(self, passes: int) -> bool:
        """Whether it is time for a look, after so many passes of the new drafter's requests."""
        return passes >= self.next_look

    def look(self, after: Sequence[RoundTally], passes: int) -> LookResult | None:
        """Take the look that is due; None if there is not enough to see."""
        last = passes >= LAST_LOOK
        while self.next_look <= passes:
            self.next_look += min(self.next_look, LAST_LOOK)
        self.over = self.over or (last and not self.before)
        seen = look(self.before, lengths_of(after), passes=passes)
        if seen is not None:
            self.last = seen
            self.over = self.over or last or seen.verdict != "undecided"
        return seen

    def given_up(self, after: Sequence[RoundTally], passes: int) -> str | None:
        """Whether the last look has passed without drafts to judge by, where there were some before; in words."""
        if passes < LAST_LOOK or self.over or not self.before:
            return None
        rounds, old = sum(tally.tries[0] for tally in after), self.before[0]
        passes = sum(tally.passes for tally in after)  # of the requests that are remembered, as the rounds are
        if rounds * old.passes >= GIVEN_UP * old.rounds * passes:
            return None
        return (
            f"it is hardly drafted with any more: {rounds} rounds in {passes} passes, "
            f"and {old.rounds} in {old.passes} before"
        )
