"""Shapes of captured passes. There are few, because each takes memory and time to capture. No torch.

All requests on auto draft equally deep in a step, because the drafter's pass has the same width for all rows. A batch
uses the next larger number of rows and pays for the whole pass.
"""

from bisect import bisect_left
from dataclasses import dataclass

from eyas.plan.shapes import CAPTURED_TREE_ROWS, Shape

DEEP_ROWS, SHALLOW = 64, 5
"""Most requests for which all depths are captured, and the deepest draft for more of them, which fill a pass sooner."""
OFFERED_ROWS = 4
"""Most requests for which suffix drafts may be deeper than the drafter's."""


@dataclass(frozen=True, kw_only=True)
class CapturedShapes:
    """Shapes of captured passes."""

    rows: tuple[int, ...]
    """Numbers of rows, ascending; a batch uses the next larger."""
    depths: tuple[int, ...]
    """Draft depths, ascending, from 1 on."""
    most_tokens: int
    trees: tuple[Shape, ...] = ()
    offered: tuple[int, ...] = ()
    """Further depths for suffix drafts."""

    def rows_for(self, rows: int) -> int:
        """Rows of the pass for so many requests."""
        bucket = self.rows[min(bisect_left(self.rows, rows), len(self.rows) - 1)]
        return bucket if rows <= bucket <= self.most_tokens else rows

    def depth_for(self, depth: int) -> int:
        """Drafts per row of the pass for this depth."""
        return 0 if not depth else next((deeper for deeper in (*self.depths, *self.offered) if deeper >= depth), depth)

    def depths_for(self, rows: int) -> list[int]:
        """Depths that so many requests may draft."""
        bucket = self.rows_for(rows)
        deepest = SHALLOW if bucket > DEEP_ROWS else self.depths[-1] if self.depths else 0
        return [depth for depth in self.depths if depth <= deepest and bucket * (1 + depth) <= self.most_tokens]

    def offered_for(self, rows: int) -> list[int]:
        """Depths that so many requests may draft with suffix drafts."""
        bucket, deeper = self.rows_for(rows), list[int]()
        if bucket <= OFFERED_ROWS:
            deeper = [depth for depth in self.offered if bucket * (1 + depth) <= self.most_tokens]
        return self.depths_for(rows) + deeper

    def trees_for(self, rows: int) -> list[Shape]:
        """Tree shapes that so many requests may grow."""
        bucket = self.rows_for(rows)
        if bucket > CAPTURED_TREE_ROWS:
            return []
        return [shape for shape in self.trees if bucket * (1 + shape.budget) <= self.most_tokens]

    def have(self, rows: int, shape: Shape, depth: int) -> bool:
        """Whether passes for this number of rows, shape and depth are captured."""
        if shape.kind == "tree":
            return shape in self.trees_for(rows)
        return depth <= max(self.depths_for(rows), default=0)
