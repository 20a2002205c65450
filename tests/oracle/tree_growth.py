"""Growth of an EAGLE-2 tree for one request, by lists."""

from eyas.engine.speculation.draft import Candidates, Tree
from oracle.draft import Draft, path_to


def within(tree: Tree, slots: int) -> Tree:
    """A tree limited to a number of slots."""
    depth = min(tree.depth, max(1, slots // tree.width + 1))
    return Tree(depth=depth, width=tree.width, budget=min(tree.budget, slots))


class TreeGrowth:
    """The growing tree of one request."""

    def __init__(self, shape: Tree) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.grown: list[int] = []
        """Nodes that the drafter has run, in the order of their slots."""
        self.newest: list[int] = []
        """The nodes that the drafter runs next."""
        self._sure: list[float] = []
        self._path_sure: list[float] = []
        self._candidates: dict[int, Candidates] = {}

    def add(self, parent: int, candidates: Candidates) -> None:
        """Add candidates after a node, -1 for the root; the first `width` become nodes.

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
        """The most confident nodes of the previous depth, which get children."""
        nodes: list[int] = []
        if depth <= self.shape.depth:
            level = [node for node, at in enumerate(self.depths) if at == depth - 1]
            nodes = sorted(level, key=lambda node: -self._path_sure[node])[: self.shape.width]
        self.grown += nodes
        self.newest = nodes
        return nodes

    def seen(self) -> list[list[bool]]:
        """Which grown nodes the newest nodes attend to: themselves and their ancestors."""
        paths = [set(path_to(self.parents, node)) for node in self.newest]
        return [[other in path for other in self.grown] for path in paths]

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
