"""Which passes there are, where they are captured: few, since each takes memory and time to capture. No torch.

All requests on auto of a step draft equally deep, since the drafter's pass is as wide for one row as for all. A batch
takes the passes of the next number of rows, and what is not used of a pass is paid all the same.
"""

from bisect import bisect_left
from dataclasses import dataclass

from eyas.plan.shapes import CAPTURED_TREE_ROWS, Shape

DEEP_ROWS, SHALLOW = 64, 5
"""Requests up to which all depths are captured, and the deepest draft of more: they fill a pass with fewer each."""
OFFERED_ROWS = 4
"""Requests up to which drafts that the host looks up may be deeper than the drafter's."""


@dataclass(frozen=True, kw_only=True)
class CapturedShapes:
    """The passes that there are."""

    rows: tuple[int, ...]
    """Ascending; a batch takes the next."""
    depths: tuple[int, ...]
    """Of drafts, ascending, from 1 on."""
    most_tokens: int
    """That a pass may have."""
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
