"""Tests whether a swapped-in drafter holds up in real answers, by a bounded number of looks.

The watch compares the acceptance length of chains as deep as both drafters were drafted to, three at most:
1 + a1 + a1 a2 + a1 a2 a3, with a(j) the share of drafts of position j that were accepted behind accepted ones. So it
does not matter that the controller chooses other depths for the new drafter. Requests before the swap are compared with
requests after it. Answers differ more than rounds do, so the error is that of requests, not of rounds: each moves the
length by its influence (the delta method), and the squares of these add up. The error is never assumed to be below that
of independent rounds.

There are `LOOKS` looks, after 64, 128, ... passes of the new drafter's requests, and `ERROR` is divided among them, so
that it bounds the chance that a drafter as good as the old one is rolled back. The last look ends the watch: a drafter
that was not found worse by then stays. A look with too few requests or drafts has no result, and the last one is
repeated while it has none; without a baseline it ends the watch nevertheless. A drafter that is hardly used any more,
unlike the one before it, counts as worse in any case: the controller has given it up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from math import prod, sqrt
from statistics import NormalDist
from typing import Any, Literal

from eyas.serve.learning.round_tally import POSITIONS, RoundTally

FIRST_LOOK = 64
"""Passes before the first look; each further look comes after twice as many."""
LOOKS = 8
LAST_LOOK = FIRST_LOOK * 2 ** (LOOKS - 1)
ERROR = 0.05
"""The chance that an equally good drafter is rolled back, or that one which is no better is called better."""
LEAST_REQUESTS = 8
LEAST_TRIES = 16
"""The least requests and first drafts for a result."""
GIVEN_UP = 0.25
"""Drafts per pass, relative to the drafter before, below which a drafter counts as hardly used."""

Verdict = Literal["worse", "better", "undecided"]


@dataclass(frozen=True, kw_only=True)
class LengthEstimate:
    """An acceptance length estimated from requests."""

    acceptance_length: float
    error: float
    """Standard error."""
    requests: int
    """Requests that had drafts."""
    rounds: int
    passes: int
    """Passes of all requests, with or without drafts."""

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, told: Mapping[str, float]) -> "LengthEstimate":
        """Read the output of `as_json`; KeyError for anything else."""
        return cls(
            acceptance_length=told["acceptance_length"],
            error=told["error"],
            requests=int(told["requests"]),
            rounds=int(told["rounds"]),
            passes=int(told["passes"]),
        )


@dataclass(frozen=True, kw_only=True)
class LookResult:
    """The result of a look."""

    verdict: Verdict
    depth: int
    """The depth to which both lengths are known."""
    before: LengthEstimate
    after: LengthEstimate
    change: float
    low: float
    high: float
    """after / before - 1, with its interval."""
    passes: int

    def as_json(self) -> dict[str, Any]:
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
    # Half a hit and half a miss are added, which keeps the error of "never accepted" above zero.
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
    """The derivative of the length by the acceptance at a position."""
    return sum(
        prod(one for j, one in enumerate(share[: last + 1]) if j != position) for last in range(position, len(share))
    )


def lengths_of(tallies: Sequence[RoundTally]) -> list[LengthEstimate]:
    """The acceptance lengths of chains one deep, two deep, ..., as far as there are enough drafts."""
    tries = [sum(tally.tries[j] for tally in tallies) for j in range(POSITIONS)]
    if sum(1 for tally in tallies if tally.tries[0]) < LEAST_REQUESTS:
        return []
    reached = sum(1 for _ in takewhile(lambda count: count >= LEAST_TRIES, tries))
    return [estimate_length(tallies, depth) for depth in range(1, reached + 1)]


def look(before: Sequence[LengthEstimate], after: Sequence[LengthEstimate], *, passes: int) -> LookResult | None:
    """Compare the lengths of two drafters; None if there is too little data."""
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
    """Student's quantile, by the Cornish-Fisher expansion: errors of few requests are themselves uncertain."""
    z = NormalDist().inv_cdf(chance)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


class SwapWatch:
    """The watch over one drafter: the looks that are due, and whether it is over."""

    def __init__(self, before: Sequence[LengthEstimate]) -> None:
        self.before = list(before)
        """The lengths of the previous drafter, by depth."""
        self.last: LookResult | None = None
        self.over = False
        """Whether the last look was taken."""
        self.next_look = FIRST_LOOK
        """The number of passes after which it is due."""

    def due(self, passes: int) -> bool:
        """Whether a look is due after this many passes of the new drafter's requests."""
        return passes >= self.next_look

    def look(self, after: Sequence[RoundTally], passes: int) -> LookResult | None:
        """Take the look that is due; None if there is too little data."""
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
        """The reason why the drafter counts as hardly used (no drafts up to the last look, unlike before), or None."""
        if passes < LAST_LOOK or self.over or not self.before:
            return None
        rounds, old = sum(tally.tries[0] for tally in after), self.before[0]
        passes = sum(tally.passes for tally in after)  # of the requests that are kept
        if rounds * old.passes >= GIVEN_UP * old.rounds * passes:
            return None
        return (
            f"it is hardly drafted with any more: {rounds} rounds in {passes} passes, "
            f"and {old.rounds} in {old.passes} before"
        )
