"""What is drafted for a request: its shape, how it grows, and what is offered to the target in the end.

Nothing is computed here. `runner/drafter.py` runs the drafter and tells what it said; the target decides.

Shapes: D drafter hidden.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from eyas.engine.request import SequenceState
from eyas.errors import UserError
from eyas.kernels.attention.metadata import MOST_IN_TREE

if TYPE_CHECKING:
    from torch import Tensor


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
        )

    def tokens_to(self, index: int) -> list[int]:
        """The tokens from the first depth down to `index`; none for -1."""
        return [self.tokens[i] for i in self.path(index)]

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == _LINE[: len(self.parents)]

    def path(self, index: int) -> list[int]:
        """Indices from the first depth down to `index`; empty for -1."""
        return _path(self.parents, index)


NO_DRAFT = Draft()
"""Of a request that is not drafted for."""

_LINE = tuple(range(-1, MOST_IN_TREE))
"""The parents of a chain."""


def _path(parents: Sequence[int], index: int) -> list[int]:
    path: list[int] = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path[::-1]


class Growth:
    """One request's tree while it grows."""

    def __init__(self, seq: SequenceState, shape: Tree) -> None:
        self.seq, self.shape = seq, shape
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.grown: list[int] = []
        """Nodes that the drafter has run, in the order of their slots."""
        self.newest: list[int] = []
        """The last of them, which it is about to run."""
        self.feedback_D: dict[int, Tensor] = {}
        self._sure: list[float] = []
        self._path_sure: list[float] = []
        self._candidates: dict[int, Candidates] = {}

    def add(self, parent: int, candidates: Candidates) -> None:
        """Take candidates behind a node, -1 for the root; the first of them are nodes from now on.

        Drawn ones need not come by their probability. They come by their promise, so one counts for no less than any
        after it.
        """
        self._candidates[parent] = candidates
        path_sure = 1.0 if parent < 0 else self._path_sure[parent]
        depth = 1 if parent < 0 else self.depths[parent] + 1
        confidences = candidates.confidences[: self.shape.width]
        for rank, sure in enumerate(confidences):
            self.tokens.append(candidates.tokens[rank])
            self.parents.append(parent)
            self.depths.append(depth)
            self._sure.append(sure)
            self._path_sure.append(path_sure * max(confidences[rank:]))

    def grow(self, depth: int) -> list[int]:
        """The most confident nodes of the depth before, which get children now."""
        nodes: list[int] = []
        if depth <= self.shape.depth:
            level = [node for node, at in enumerate(self.depths) if at == depth - 1]
            nodes = sorted(level, key=lambda node: -self._path_sure[node])[: self.shape.width]
        self.grown += nodes
        self.newest = nodes
        return nodes

    def ancestors(self) -> list[list[bool]]:
        """Whom the newest nodes see among the grown ones: themselves and those on their paths."""
        paths = [set(_path(self.parents, node)) for node in self.newest]
        return [[other in path for other in self.grown] for path in paths]

    def tokens_to(self, node: int) -> list[int]:
        """The tokens from the first depth to a node; none for the root."""
        return [self.tokens[i] for i in _path(self.parents, node)]

    def offered(self) -> Draft:
        """The most confident nodes. A child is never more confident than its parent, so what is kept is a tree."""
        everything = Draft(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            confidences=tuple(self._sure),
            candidates=self._candidates,
        )
        order = sorted(range(len(self.tokens)), key=lambda node: (-self._path_sure[node], self.depths[node]))
        return everything.only(sorted(order[: self.shape.budget], key=lambda node: (self.depths[node], node)))
