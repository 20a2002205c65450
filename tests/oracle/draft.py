"""A request's drafts as lists: a tree in which a parent precedes its children."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from eyas.engine.speculation.draft import MOST_IN_TREE, Candidates


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Draft tokens after a request's newest token: a tree in which a parent precedes its children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each token's predecessor, -1 for the newest token of the request."""
    confidences: tuple[float, ...] = ()
    """The drafter's probability of each token behind its parent."""
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    """All candidates considered after some tokens, -1 included, proposed or not."""

    @property
    def depth(self) -> int:
        """Maximum number of tokens that can be accepted."""
        if self.is_chain:
            return len(self.tokens)
        return max((len(self.path(index)) for index in range(len(self.tokens))), default=0)

    def only(self, nodes: Collection[int]) -> "Draft":
        """A subset of the tokens, which includes their parents."""
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
        return path_to(self.parents, index)


_LINE = tuple(range(-1, MOST_IN_TREE))
"""The parents of a chain."""


def path_to(parents: Sequence[int], index: int) -> list[int]:
    """Indices from the first depth down to `index`; empty for -1."""
    path: list[int] = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path[::-1]
