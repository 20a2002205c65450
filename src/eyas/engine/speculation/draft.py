"""What may be drafted for a request: how long a chain, how large a tree. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

from eyas.errors import UserError
from eyas.plan.shapes import Shape

MOST_IN_TREE = 64
"""Slots behind the committed ones that a tree may take, the newest token included; attention keeps who sees whom as
bits of an int64."""
MOST_IN_CHAIN = 48
"""Tokens that a drafter may draft in a row: with the newest token before them and suffix drafts behind them, a chain
stays within what a tree may take."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """How wide a tree grows."""

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
        """A tree as plans name it."""
        return cls(depth=shape.depth, width=shape.width, budget=shape.budget)

    @property
    def grown(self) -> int:
        """Nodes that the drafter runs; the first candidates come of its reading."""
        return (self.depth - 1) * self.width

    @property
    def slots(self) -> int:
        """Cache slots that growing and verifying it take at most."""
        return max(self.budget, self.grown)


class Candidates(NamedTuple):
    """What the drafter would put behind a token, the most promising first."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
