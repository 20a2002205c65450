"""The best depth and budget where passes come in captured shapes, all of which is paid, used or not. No torch.

A step drafts equally deep for all requests on auto, since the drafter's pass is as wide for one row as for all. What it
verifies is either every draft, padded to rows x (1 + depth) tokens, or a budget of them: a flat pass of fewer tokens,
which the device fills with the drafts that are likeliest to survive (`runner/flat_verify.py`). For few requests there
are some trees, too. There are few shapes, so all are priced.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from eyas.plan.shapes import CAPTURED_TREE_ROWS, MARGIN, Batch, Plan, Shape, coarse, tree_gains

FLAT_FROM = 64
"""Padded tokens above which there are flat passes: up to here a target's pass reads weights and little else, and takes
as long with fewer tokens."""
FLAT_PARTS = 4
"""Flat passes have room for one, two, ... of so many equal parts of all drafts."""
FLAT_TILE = 8
"""And for a multiple of so many tokens."""


DEEP_ROWS = 64
"""Requests up to which all depths are considered; more of them fill a pass with fewer drafts of each."""
OFFERED_ROWS = 4
"""Requests up to which drafts that the host looks up may be deeper than the drafter's."""
SHALLOW = 3
"""The deepest draft for more of them, so that there are not too many shapes."""


@dataclass(frozen=True, kw_only=True)
class CapturedShapes:
    """The passes that there are."""

    rows: tuple[int, ...]
    """Ascending; a batch takes the next."""
    depths: tuple[int, ...]
    """Of drafts, ascending, from 1 on."""
    most_tokens: int
    """That a pass may have."""
    flat: bool = False
    """Whether there are flat passes."""
    trees: tuple[Shape, ...] = ()
    offered: tuple[int, ...] = ()
    """Depths beyond, of drafts that the host looks up."""

    def rows_for(self, rows: int) -> int:
        """Rows of a pass for so many requests."""
        bucket = self.rows[min(bisect_left(self.rows, rows), len(self.rows) - 1)]
        return bucket if rows <= bucket <= self.most_tokens else rows

    def depth_for(self, depth: int) -> int:
        """Drafts of each row in a pass for drafts that deep."""
        return 0 if not depth else next((deeper for deeper in (*self.depths, *self.offered) if deeper >= depth), depth)

    def depths_for(self, rows: int) -> list[int]:
        """Depths that so many requests may be drafted for."""
        bucket = self.rows_for(rows)
        deepest = SHALLOW if bucket > DEEP_ROWS else self.depths[-1] if self.depths else 0
        return [depth for depth in self.depths if depth <= deepest and bucket * (1 + depth) <= self.most_tokens]

    def offered_for(self, rows: int) -> list[int]:
        """The same where the host looks drafts up."""
        bucket, deeper = self.rows_for(rows), list[int]()
        if bucket <= OFFERED_ROWS:
            deeper = [depth for depth in self.offered if bucket * (1 + depth) <= self.most_tokens]
        return self.depths_for(rows) + deeper

    def trees_for(self, rows: int) -> list[Shape]:
        """Trees that so many requests may grow."""
        bucket = self.rows_for(rows)
        if bucket > CAPTURED_TREE_ROWS:
            return []
        return [shape for shape in self.trees if bucket * (1 + shape.budget) <= self.most_tokens]

    def have(self, rows: int, shape: Shape, depth: int) -> bool:
        """Whether there are passes in which so many requests draft like that."""
        if shape.kind == "tree":
            return shape in self.trees_for(rows)
        return depth <= max(self.depths_for(rows), default=0)

    def flat_tokens(self, rows: int, depth: int) -> list[int]:
        """Tokens of the flat passes for so many requests and drafts, all of them fewer than padded."""
        bucket = self.rows_for(rows)
        padded = bucket * (1 + depth)
        if not self.flat or padded <= FLAT_FROM:
            return []
        parts = (bucket + -(-bucket * depth * part // FLAT_PARTS) for part in range(1, FLAT_PARTS))
        tiled = {-(-tokens // FLAT_TILE) * FLAT_TILE for tokens in parts}
        return sorted(tokens for tokens in tiled if tokens < padded)

    def tokens_for(self, rows: int, depth: int, budget: int | None) -> int | None:
        """Tokens of the flat pass that verifies so many drafts of all rows together; None: all of them, padded."""
        if budget is None:
            return None
        return next((tokens for tokens in self.flat_tokens(rows, depth) if tokens >= rows + budget), None)


@dataclass(frozen=True, kw_only=True)
class CapturedPrices:
    """Seconds of the parts of a step, for the batch at hand."""

    verify: Callable[[int], float]
    """The target's pass of so many tokens, those of nobody included."""
    draft: Callable[[int], float]
    """All passes of the drafter, for all rows, by depth."""
    step: Callable[[float, int], float]
    """A whole step whose passes take so long, by the depth of its chains."""
    step_of_trees: Callable[[float, int], float] = lambda passes, depth: inf
    """The same where trees grow."""
    grow: Callable[[Shape], float] = lambda shape: inf
    """All passes of the drafter where trees grow."""


def plan_captured(
    batch: Batch, shapes: CapturedShapes, prices: CapturedPrices, kept: Callable[[int, float], float]
) -> tuple[Plan, Plan | None]:
    """Plain decoding, and the best plan that drafts for requests on auto, if there is any.

    `kept(depth, part)` is what the likeliest part of all drafts is expected to give, in parts of what all give. Where
    some requests have a fixed depth, all drafts are verified.
    """
    rows, forced = shapes.rows_for(batch.rows), shapes.depth_for(sum(count > 0 for count in batch.fixed))
    plain = Plan(
        by_level={},
        drafts=sum(batch.fixed),
        tokens=batch.rows + batch.fixed_tokens,
        seconds=prices.step(prices.verify(rows * (1 + forced)) + (prices.draft(forced) if forced else 0.0), forced),
    )
    auto = sum(batch.levels.values())
    deepest = min((len(survivals) for survivals in batch.survivals.values()), default=0)
    padded: Plan | None = None
    flat: Plan | None = None
    for depth in shapes.depths_for(batch.rows):
        if not auto or depth > deepest:
            continue
        gained = sum(count * sum(batch.survivals[level][:depth]) for level, count in batch.levels.items())
        in_passes, drafting = max(depth, forced), prices.draft(max(depth, forced))
        offers: list[tuple[int, int | None, float]] = [(rows * (1 + in_passes), None, gained)]
        for tokens in shapes.flat_tokens(batch.rows, depth) if not forced else ():
            verified = min(tokens - batch.rows, auto * depth)
            offers.append((tokens, verified, gained * kept(depth, verified / (auto * depth))))
        for tokens, budget, worth in offers:
            plan = Plan(
                by_level={level: [depth] * count for level, count in batch.levels.items()},
                drafts=plain.drafts + (auto * depth if budget is None else budget),
                tokens=plain.tokens + worth,
                seconds=prices.step(prices.verify(tokens) + drafting, in_passes),
                budget=budget,
            )
            # Deeper drafts give most to requests that are well ahead: for little more, all of them are not to wait.
            if budget is None and (padded is None or plan.rate > MARGIN * padded.rate):
                padded = plan
            elif budget is not None and (flat is None or plan.rate > flat.rate):
                flat = plan
    # Every flat shape is one more to capture: for little gain it is not worth that.
    worth_it = flat is not None and padded is not None and flat.rate > MARGIN * padded.rate
    return plain, flat if worth_it else padded


def plan_captured_tree(
    batch: Batch,
    shapes: CapturedShapes,
    prices: CapturedPrices,
    chances: Sequence[float],
    siblings: Sequence[float],
) -> Plan | None:
    """The best tree for requests on auto, if there is any: none beside requests of a fixed depth."""
    auto = sum(batch.levels.values())
    if not auto or any(batch.fixed) or not any(siblings):
        return None
    best: Plan | None = None
    for shape in shapes.trees_for(batch.rows):
        if shape.depth > len(chances):
            continue
        gains = tree_gains(coarse(chances[: shape.depth]), coarse(siblings[: shape.width - 1]))
        tokens = shapes.rows_for(batch.rows) * (1 + shape.budget)
        plan = Plan(
            by_level={level: [shape.depth] * count for level, count in batch.levels.items()},
            drafts=auto * shape.budget,
            tokens=batch.rows + auto * gains[shape.budget - 1],
            seconds=prices.step_of_trees(prices.verify(tokens) + prices.grow(shape), shape.depth),
            shape=shape,
        )
        if best is None or plan.rate > best.rate:
            best = plan
    return best
