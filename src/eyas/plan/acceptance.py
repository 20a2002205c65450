"""How likely drafts are accepted: given by position, as a length at a depth, or as measured.

S(j) is the share of rounds that accept the draft at position j; the length at depth k is 1 + S(1) + ... + S(k).
Positions are accepted in order, so S never rises.

Rounds of different depths start at different places: a short round leaves more of an easy stretch to the next one, so
the same position is accepted more often. Where lengths at several depths were measured, each depth gets an odds ratio
that reproduces its length. The log of the ratio is linear in depth up to the deepest measured one, and constant beyond.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import exp
from operator import mul

from eyas.errors import UserError

DECLINE = 0.97
"""Acceptance of a position over that of the one before it, beyond what was given."""
DEEPEST = 16
"""The deepest drafts that are planned for."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceProfile:
    """Acceptance by position, each given that all before it were accepted."""

    chances: tuple[float, ...]
    lengths: Mapping[int, float] = field(default_factory=dict)
    """Measured lengths by depth; without any, `chances` hold for every depth."""
    source: str
    """Where the numbers come from, for people."""

    def survivals(self, depth: int, *, like: int | None = None) -> list[float]:
        """S(1), ..., S(depth) in rounds of this depth, or in rounds that start where those of depth `like` do."""
        return _survivals(self._extended(depth), self._shift(depth if like is None else like))

    def length(self, depth: int) -> float:
        """Expected tokens of a round."""
        return 1 + sum(self.survivals(depth))

    def _extended(self, depth: int) -> list[float]:
        chances = list(self.chances[:depth])
        while len(chances) < depth:
            chances.append(chances[-1] * DECLINE)
        return chances

    def _shift(self, depth: int) -> float:
        """Log of the odds ratio at a depth."""
        known = sorted(self.lengths)
        if not known:
            return 0.0
        if len(known) == 1 or depth >= known[-1]:
            return self._shift_at(known[-1])
        place = max(bisect_left(known, depth), 1)
        low, high = known[place - 1], known[place]
        at_low, at_high = self._shift_at(low), self._shift_at(high)
        return at_low + (at_high - at_low) * (depth - low) / (high - low)

    def _shift_at(self, depth: int) -> float:
        chances, wanted = self._extended(depth), self.lengths[depth] - 1
        return _solve(lambda shift: sum(_survivals(chances, shift)) - wanted, -12.0, 12.0)


SHIPPED: Mapping[str, AcceptanceProfile] = {
    "smollm2-eagle3.1": AcceptanceProfile(
        chances=(0.69, 0.72, 0.77, 0.81, 0.84, 0.85, 0.86),
        lengths={3: 2.71, 5: 3.23, 7: 3.54},
        source="measured for smollm2-eagle3.1 on Spec-Bench (docs/shipped.md)",
    )
}
"""Profiles of the drafters that come with eyas."""


def usual_profile() -> AcceptanceProfile:
    """Profile for an unknown drafter: what vLLM's tests expect of an EAGLE-3 drafter of Llama-3.1-8B."""
    profile = read_acceptance("0.730,0.521,0.354")
    return AcceptanceProfile(
        chances=profile.chances, source="assumed: .730, .521, .354 by position, a usual EAGLE-3 drafter"
    )


def read_acceptance(text: str) -> AcceptanceProfile:
    """Read shares of rounds by position, as servers count them: 0.73,0.52,0.35."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--acceptance {text!r} is no list of numbers such as 0.73,0.52,0.35") from error
    if not all(0 < share <= 1 for share in shares):
        raise UserError(f"--acceptance {text!r} holds a share that is not above 0 and at most 1; give shares of rounds")
    for position, (share, after) in enumerate(pairwise(shares), 1):
        if after > share:
            raise UserError(
                f"--acceptance {text!r} has {after:g} at position {position + 1}, above the {share:g} before it; give "
                "the share of all rounds in which a position was accepted, not of those that got so far"
            )
    if len(shares) > DEEPEST:
        raise UserError(f"--acceptance has {len(shares)} positions; at most {DEEPEST} are planned for")
    chances = [share / before for share, before in zip(shares, [1.0, *shares], strict=False)]
    return AcceptanceProfile(chances=tuple(chances), source=f"given: {text} by position")


def read_length(text: str) -> AcceptanceProfile:
    """Read an acceptance length at a depth, 2.7@3; all positions are assumed to be accepted equally often."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)@(\d+)", text)
    if found is None:
        raise UserError(f"--length {text!r} is no LENGTH@DEPTH such as 2.7@3")
    length, depth = float(found[1]), int(found[2])
    if not 1 <= depth <= DEEPEST or not 1 < length <= depth + 1:
        raise UserError(
            f"--length {text!r} cannot be: depths from 1 to {DEEPEST} give lengths above 1 and up to the depth plus one"
        )
    chance = _solve(lambda a: sum(a**j for j in range(1, depth + 1)) - (length - 1), 0.0, 1.0)
    return AcceptanceProfile(chances=(chance,) * depth, source=f"given: {length:g} tokens per round at depth {depth}")


def profile_of_rounds(shares: Sequence[float], lengths: Mapping[int, float], source: str) -> AcceptanceProfile:
    """Build a profile from a bench: shares by position of the deepest rounds, lengths of all depths."""
    chances = [min(0.999, max(0.001, share / before)) for share, before in zip(shares, [1.0, *shares], strict=False)]
    return AcceptanceProfile(chances=tuple(chances), lengths=lengths, source=source)


def _survivals(chances: Sequence[float], shift: float) -> list[float]:
    odds = exp(shift)
    return list(accumulate((a * odds / (1 - a + a * odds) for a in chances), mul))


def _solve(rising: Callable[[float], float], low: float, high: float) -> float:
    """Find the zero of a rising function by bisection; the nearer end if there is none."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
