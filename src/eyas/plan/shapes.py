"""Which drafts pay: how deep to draft for each request of a step, in a chain or in a tree. Pure functions, no torch.

A step of a batch gives E = sum over requests of 1 + S(1) + ... + S(k) tokens in expectation, k being the request's
depth, and takes the time of one target pass over all tokens and of the drafter's passes. Steps follow each other, so
by renewal-reward tokens per second over a long time are E / time of the step: that ratio is maximised.

Where the ratio is best, at a rate of L tokens per second, no set of drafts has E - L * time above zero (Dinkelbach). So
one more draft pays if its chance of acceptance exceeds L times the seconds that it adds, and whichever number of
drafts is best, they are the likeliest ones, but for the depth to which the drafter runs at all: each depth is a pass
of its own. Hence the search: for each deepest depth, go through the drafts from the likeliest down, and keep the best
ratio met. A likelier draft never lies behind a less likely one of its request, so what is kept is a set of chains.
No curve is assumed to be smooth or convex: every set on the way is priced as it stands.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import nlargest
from itertools import accumulate
from math import inf
from typing import Literal

MARGIN = 1.02
"""Speculation must promise this many times the tokens per second of plain decoding."""
PORTIONS = 4
"""Drafts of requests that are alike are added in this many portions of the batch, not one by one."""
MOST_PRICED = 24
"""Sets of drafts of one deepest depth that are priced: requests of many levels make many more, which hardly differ."""
FINE_PORTIONS = 16
"""The same where drafts already made, or about to be, are weighed one against the other."""
TREE_ROWS = 8
"""Batches above this are not considered for trees: their chains already fill a pass."""
TREE_DEPTHS, TREE_WIDTHS, TREE_BUDGETS = (1, 2, 3, 4, 5, 7), (2, 4), (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""The trees that are considered."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is drafted for a request: a chain, a tree of at most `budget` tokens, or a chain that the host looks up."""

    kind: Literal["chain", "tree", "suffix"] = "chain"
    depth: int = 0
    """Of a tree or of what is looked up; chains have depths of their own."""
    width: int = 1
    """Candidates of a node, and nodes of a depth that get any."""
    budget: int = 0
    """Tokens of a tree that are verified; a chain has its depth."""


CHAIN = Shape()
CAPTURED_TREES = tuple(
    Shape(kind="tree", depth=depth, width=width, budget=budget) for depth, width, budget in ((3, 3, 7), (5, 4, 15))
)
"""The trees that are considered where passes are captured: few, since each takes some twenty graphs. With the newest
token they have 8 and 16 tokens, as many as a pass reads in the time of one."""
CAPTURED_TREE_ROWS = 4
"""Then batches up to this."""
OFFERED = 15
"""The deepest drafts that the host looks up: they take no pass of a drafter, and with the newest token are as many as a
pass reads in the time of one."""


@cache
def offered(depth: int) -> Shape:
    """Drafts so deep that the host looks up."""
    return Shape(kind="suffix", depth=depth)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of the parts of a step, for the batch at hand."""

    verify: Callable[[int], float]
    """The target's pass with so many drafts in it."""
    draft: Callable[[int, float, float], float]
    """The drafter's passes: how many, tokens of the first, tokens of all others together."""
    reads: float
    """Tokens that the first of these passes reads for a request."""
    grow: Callable[[int, float, float], float] | None = None
    """The same as `draft` where trees grow, which takes more of the host; None: no more than chains."""
    step: Callable[[float, bool], float] = lambda passes, drafting: passes
    """A whole step whose passes take so long, with drafts or without: the host works beside them or meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The requests of a step. Those that leave their depth to us are grouped by level: a level's requests are alike."""

    rows: int
    levels: Mapping[int, int]
    """How many requests of each level may be drafted for."""
    survivals: Mapping[int, Sequence[float]]
    """S(1), S(2), ... of each level, as deep as may be drafted."""
    fixed: Sequence[int]
    """How many requests draft at each depth, whatever we say; depth 1 first."""
    fixed_tokens: float
    """Tokens that they are expected to gain."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found best."""

    by_level: Mapping[int, Sequence[int]]
    """For each level the depths of its requests; no levels at all: plain decoding."""
    drafts: int
    """Of all requests together."""
    tokens: float
    """Expected."""
    seconds: float
    shape: Shape = CHAIN
    gain: float = 1.0
    """Its rate against that of plain decoding."""
    budget: int | None = None
    """Drafts that are verified of all that are made, where fewer are; which, their confidence tells."""

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds

    def drafts_like(self, other: "Plan") -> bool:
        """Whether both draft as deep and in the same shape; how many drafts a budget has follows from the batch."""
        depths, others = ({depth for level in plan.by_level.values() for depth in level} for plan in (self, other))
        return (depths, self.shape, self.budget is None) == (others, other.shape, other.budget is None)

    def depths(self, levels: Sequence[int]) -> list[int]:
        """Depths of requests of these levels.

        A plan outlives its batch by some steps: a level that it does not know is treated as the nearest one.
        """
        depths: list[int] = []
        places: dict[int, int] = {}
        for level in levels:
            place = places.get(level, 0)
            places[level] = place + 1
            planned = self.by_level.get(level)
            if planned is None:
                planned = self.by_level[min(self.by_level, key=lambda known: abs(known - level))]
            depths.append(planned[place % len(planned)])
        return depths


def plan_nothing(batch: Batch, prices: Prices) -> Plan:
    """Plain decoding, apart from requests whose depth is fixed."""
    drafts = sum(batch.fixed)
    passes = sum(rows > 0 for rows in batch.fixed)
    drafting = prices.draft(passes, batch.fixed[0] * prices.reads, drafts - batch.fixed[0])
    return Plan(
        by_level={},
        drafts=drafts,
        tokens=batch.rows + batch.fixed_tokens,
        seconds=prices.step(prices.verify(drafts) + drafting, drafts > 0),
    )


def plan_chains(batch: Batch, prices: Prices) -> Plan:
    """The best depths that are not all zero."""
    verify, draft, step = prices.verify, prices.draft, prices.step
    plain = plan_nothing(batch, prices)
    portion = max(1, sum(batch.levels.values()) // PORTIONS)
    offers = sorted(
        (-survival, depth, level, min(portion, rows - start))
        for level, rows in batch.levels.items()
        for depth, survival in enumerate(batch.survivals[level], 1)
        for start in range(0, rows, portion)
    )
    passes_before = sum(rows > 0 for rows in batch.fixed)
    best_rate, best, best_passes = 0.0, (plain.tokens, inf, 0, 0, 0), 0.0
    for deepest in range(1, min(len(survivals) for survivals in batch.survivals.values()) + 1):
        hoped = sum(rows * batch.survivals[level][deepest - 1] for level, rows in batch.levels.items())
        further_pass = draft(deepest, 1, deepest - 1) - draft(deepest - 1, 1, deepest - 2)
        if hoped < best_rate * (step(best_passes + further_pass, True) - step(best_passes, True)):
            break  # drafts of this depth would not pay for their pass, were they verified for nothing
        tokens, drafts, passes = plain.tokens, plain.drafts, passes_before
        first, further = batch.fixed[0] * prices.reads, drafts - batch.fixed[0]
        usable = [(number, *offer) for number, offer in enumerate(offers, 1) if offer[1] <= deepest]
        every = -(-len(usable) // MOST_PRICED)
        for place, (number, chance, depth, _, rows) in enumerate(usable, 1):
            passes = max(passes, depth)
            if depth == 1:
                first += rows * prices.reads
            else:
                further += rows
            drafts += rows
            tokens -= chance * rows
            if place % every and place < len(usable):
                continue
            in_passes = verify(drafts) + draft(passes, first, further)
            seconds = step(in_passes, True)
            if tokens > best_rate * seconds:
                best_rate, best, best_passes = tokens / seconds, (tokens, seconds, drafts, deepest, number), in_passes
    tokens, seconds, drafts, deepest, number = best
    by_level = {level: [0] * rows for level, rows in batch.levels.items()}
    starts: Counter[tuple[int, int]] = Counter()
    for _, depth, level, rows in offers[:number]:
        if depth <= deepest:
            start = starts[level, depth]
            starts[level, depth] += rows
            by_level[level][start : start + rows] = [depth] * rows
    return Plan(by_level=by_level, drafts=drafts, tokens=tokens, seconds=seconds)


def best_count(values: Sequence[float], seconds: Callable[[int], float], rate: float) -> int:
    """How many of the values, largest first, are worth their seconds: the argmax of their sum - rate * seconds."""
    portion = max(1, len(values) // FINE_PORTIONS)
    best, best_count, gained = -rate * seconds(0), 0, 0.0
    for count, value in enumerate(values, 1):
        gained += value
        if count % portion == 0 or count == len(values):
            net = gained - rate * seconds(count)
            if net > best:
                best, best_count = net, count
    return best_count


def plan_tree(batch: Batch, prices: Prices, chances: Sequence[float], siblings: Sequence[float]) -> Plan | None:
    """The best tree, the same for all requests that may draft; None where trees are not considered.

    A node's chance is the product along its path: a(j) for a first candidate, the rest shared out over its siblings
    as measured. Wider trees catch what the first candidate misses; they pay when tokens of a pass are nearly free.
    """
    rows = sum(batch.levels.values())
    if not 0 < rows <= TREE_ROWS or not any(siblings):
        return None
    plain, passes_before = plan_nothing(batch, prices), sum(rows > 0 for rows in batch.fixed)
    reads = (rows + batch.fixed[0]) * prices.reads
    grow = prices.grow or prices.draft
    coarse_chances, coarse_siblings = coarse(chances), coarse(siblings)
    best_rate, best = 0.0, (0.0, inf, CHAIN)
    for depth in TREE_DEPTHS:
        for width in TREE_WIDTHS if depth <= len(chances) else ():
            gains = tree_gains(coarse_chances[:depth], coarse_siblings[: width - 1])
            # The first candidates come of the reading; then the drafter runs `width` nodes of each depth but the last.
            nodes = plain.drafts - batch.fixed[0] + rows * width * (depth - 1)
            growing = grow(max(depth, passes_before), reads, nodes)
            for budget in TREE_BUDGETS:
                if not depth < budget <= len(gains):
                    continue
                tokens = plain.tokens + rows * gains[budget - 1]
                seconds = prices.step(prices.verify(plain.drafts + rows * budget) + growing, True)
                if tokens > best_rate * seconds:
                    shape = Shape(kind="tree", depth=depth, width=width, budget=budget)
                    best_rate, best = tokens / seconds, (tokens, seconds, shape)
    tokens, seconds, shape = best
    return Plan(
        by_level={level: [shape.depth] * count for level, count in batch.levels.items()},
        drafts=plain.drafts + rows * shape.budget,
        tokens=tokens,
        seconds=seconds,
        shape=shape,
    )


def coarse(chances: Sequence[float]) -> tuple[float, ...]:
    """Of few values, since gains are kept: a tree's gain is looked up far more often than it changes."""
    return tuple(round(chance * 50) / 50 for chance in chances)


@lru_cache(maxsize=512)
def tree_gains(chances: tuple[float, ...], siblings: tuple[float, ...]) -> list[float]:
    """Expected accepted tokens of the likeliest 1, 2, ... nodes of a tree: their chances, summed.

    It grows as EAGLE-2 has it: as many nodes of a depth get candidates as each of them gets.
    """
    width, level, nodes = 1 + len(siblings), [1.0], list[float]()
    for first in chances:
        candidates = (first, *((1 - first) * sibling for sibling in siblings))
        level = [above * chance for above in nlargest(width, level) for chance in candidates]
        nodes += level
    return list(accumulate(sorted(nodes, reverse=True)))
