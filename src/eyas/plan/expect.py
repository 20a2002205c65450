"""What a step takes and gives, by depth and number of users: profile and roofline brought to `shapes.py`.

The engine's controller prices drafts with the same functions, from measured times instead of a roofline: there is one
account of when speculation pays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.plan.acceptance import AcceptanceProfile
from eyas.plan.roofline import Pair, Speed
from eyas.plan.shapes import MARGIN, Batch, Plan, plan_chains, plan_nothing


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A step of some users, each drafting so deep."""

    users: int
    depth: int
    length: float
    """Tokens of a round."""
    step_seconds: float
    tokens_per_second: float
    """Of all users together."""
    speedup: float
    """Against plain decoding of as many users."""


def expect(pair: Pair, speed: Speed, profile: AcceptanceProfile, *, users: int, depth: int, context: float) -> Expected:
    """Every user drafts at one depth, or not at all."""
    plain = _fixed(pair, speed, profile, users=users, depth=0, context=context)
    plan = _fixed(pair, speed, profile, users=users, depth=depth, context=context)
    return Expected(
        users=users,
        depth=depth,
        length=plan.tokens / users,
        step_seconds=plan.seconds,
        tokens_per_second=plan.rate,
        speedup=plan.rate / plain.rate,
    )


def _fixed(pair: Pair, speed: Speed, profile: AcceptanceProfile, *, users: int, depth: int, context: float) -> Plan:
    gained = sum(profile.survivals(depth)) if depth else 0.0
    batch = Batch(rows=users, levels={}, survivals={}, fixed=[users] * depth or [0], fixed_tokens=users * gained)
    return plan_nothing(batch, pair.prices(speed, rows=users, context=context, reads=1 + gained))


def best_depth(expected: Sequence[Expected]) -> Expected:
    """The depth of most tokens per second; none unless drafts promise what the engine's margin asks for."""
    best = max(expected, key=lambda one: one.tokens_per_second)
    return best if best.speedup > MARGIN else next(one for one in expected if one.depth == 0)


def auto_speedup(
    pair: Pair, speed: Speed, profile: AcceptanceProfile, *, users: int, deepest: int, like: int, context: float
) -> float:
    """The speedup of the engine's own choice, which may differ between users of one step; 1 is plain.

    Rounds are taken to start where those of depth `like` do.
    """
    batch = Batch(
        rows=users,
        levels={0: users},
        survivals={0: profile.survivals(deepest, like=like)},
        fixed=[0] * deepest,
        fixed_tokens=0.0,
    )
    prices = pair.prices(speed, rows=users, context=context, reads=profile.length(like))
    gain = plan_chains(batch, prices).rate / plan_nothing(batch, prices).rate
    return gain if gain > MARGIN else 1.0
