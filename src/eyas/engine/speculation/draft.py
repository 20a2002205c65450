"""Limits of draft chains and trees. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

from eyas.errors import UserError
from eyas.plan.shapes import Shape

MOST_IN_TREE = 64
"""Most slots of a tree, the newest token included; attention masks of nodes are bits of an int64."""
MOST_IN_CHAIN = 48
"""Most tokens that a drafter may draft in a row; with the newest token and suffix drafts they fit into the slots of a
tree."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Shape of a draft tree."""

    depth: int
    width: int
    budget: int

    def __post_init__(self) -> None:
        for name in ("depth", "width", "budget"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} of the tree is {getattr(self, name)}; it must be 1 or more")
        if self.slots >= MOST_IN_TREE:
            raise UserError(
                f"a tree of depth {self.depth}, width {self.width} and budget {self.budget} takes {self.slots} slots, "
                f"above the {MOST_IN_TREE - 1} there are; lower one of them"
            )

    @classmethod
    def of(cls, shape: Shape) -> "Tree":
        return cls(depth=shape.depth, width=shape.width, budget=shape.budget)

    @property
    def grown(self) -> int:
        """Nodes that the drafter runs; the first candidates come from reading."""
        return (self.depth - 1) * self.width

    @property
    def slots(self) -> int:
        return max(self.budget, self.grown)


class Candidates(NamedTuple):
    """The drafter's candidates behind a token, most likely first."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
