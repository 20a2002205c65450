"""Time and tokens of a step by depth and number of users, and the best depth.

A step of n users who draft k deep gives n (1 + S(1) + ... + S(k)) tokens in expectation, where S(j) is the share of
rounds that accept position j. Steps follow each other, so the rate is that number over the time of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.plan.acceptance import AcceptanceProfile
from eyas.plan.roofline import Pair, Speed
from eyas.plan.shapes import MARGIN

PORTIONS = 4
"""`auto_speedup` adds drafts for about this share of the users at once."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A step in which all users draft to one depth."""

    users: int
    depth: int
    length: float
    """Tokens of a round."""
    step_seconds: float
    tokens_per_second: float
    """Of all users together."""
    speedup: float
    """Over plain decoding for as many users."""


def expect(pair: Pair, speed: Speed, profile: AcceptanceProfile, *, users: int, depth: int, context: float) -> Expected:
    """Predict a step in which every user drafts to one depth, 0 for plain decoding."""
    gained = sum(profile.survivals(depth)) if depth else 0.0
    plain = pair.step_seconds(speed, rows=users, drafts=0, reads=1.0, context=context)
    seconds = pair.step_seconds(speed, rows=users, drafts=users * depth, reads=1 + gained, context=context)
    tokens = users + users * gained
    return Expected(
        users=users,
        depth=depth,
        length=tokens / users,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        speedup=(tokens / seconds) / (users / plain),
    )


def best_depth(expected: Sequence[Expected]) -> Expected:
    """Choose the depth with the most tokens per second; plain decoding unless drafts gain the engine's margin."""
    best = max(expected, key=lambda one: one.tokens_per_second)
    return best if best.speedup > MARGIN else next(one for one in expected if one.depth == 0)


def auto_speedup(
    pair: Pair, speed: Speed, profile: AcceptanceProfile, *, users: int, deepest: int, like: int, context: float
) -> float:
    """Speedup when some users of a step may draft one token deeper than others; 1 if plain decoding is best.

    Rounds are assumed to start where those of depth `like` do.
    """
    portion = max(1, users // PORTIONS)
    portions = sorted(min(portion, users - start) for start in range(0, users, portion))
    reads = profile.length(like)

    def rate(tokens: float, drafts: int) -> float:
        return tokens / pair.step_seconds(speed, rows=users, drafts=drafts, reads=reads, context=context)

    plain, tokens, drafts, best = rate(users, 0), float(users), 0, 0.0
    for survival in profile.survivals(deepest, like=like):
        for rows in portions:
            tokens, drafts = tokens + survival * rows, drafts + rows
            best = max(best, rate(tokens, drafts))
    gain = best / plain
    return gain if gain > MARGIN else 1.0
