"""What is drafted for a request: the shape of a tree, and what is offered to the target in the end.

Nothing is computed here. `runner/drafter.py` runs the drafter and tells what it said; the target decides.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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

    def within(self, slots: int) -> "Tree":
        """The same, as far as so many slots allow."""
        depth = min(self.depth, max(1, slots // self.width + 1))
        return Tree(depth=depth, width=self.width, budget=min(self.budget, slots))

    @property
    def shape(self) -> Shape:
        """The same as plans have it."""
        return Shape(kind="tree", depth=self.depth, width=self.width, budget=self.budget)

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


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Tokens proposed behind a request's newest one: a tree in which a parent precedes its children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each token's predecessor, -1 for the newest token of the request."""
    confidences: tuple[float, ...] = ()
    """The drafter's probability of each token behind its parent."""
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    """Behind some of the tokens, -1 included, all that was looked at, whether it is proposed or not."""
    by_suffix: int = 0
    """How many of the last tokens of a chain are suffix drafts; the drafter has made those before them."""

    @property
    def depth(self) -> int:
        """The most tokens that could be accepted."""
        if self.is_chain:
            return len(self.tokens)
        return max((len(self.path(index)) for index in range(len(self.tokens))), default=0)

    def only(self, nodes: Collection[int]) -> "Draft":
        """Some of the tokens, in their order, each with all that lead to it."""
        if len(nodes) == len(self.tokens):
            return self
        place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        return Draft(
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(place[self.parents[node]] for node in nodes),
            confidences=tuple(self.confidences[node] for node in nodes),
            candidates={place[node]: some for node, some in self.candidates.items() if node in place},
            by_suffix=sum(node >= self.by_drafter for node in nodes),
        )

    @property
    def by_drafter(self) -> int:
        """How many of the first tokens the drafter has made."""
        return len(self.tokens) - self.by_suffix

    def tokens_to(self, index: int) -> list[int]:
        """The tokens from the first depth down to `index`; none for -1."""
        return [self.tokens[i] for i in self.path(index)]

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == _LINE[: len(self.parents)]

    def path(self, index: int) -> list[int]:
        """Indices from the first depth down to `index`; empty for -1."""
        return path_to(self.parents, index)


NO_DRAFT = Draft()
"""Of a request that is not drafted for."""

_LINE = tuple(range(-1, MOST_IN_TREE))
"""The parents of a chain."""


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """Indices from the first depth down to `index`; empty for -1."""
    path: list[int] = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path[::-1]
