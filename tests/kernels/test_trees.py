"""Trees on the device grow, are kept and are walked like the plain lists of the oracle, request by request."""

import random

import torch
from torch import Tensor

from each import each
from eyas.engine.runner.round_state import RoundState
from eyas.engine.speculation.draft import Candidates, Tree
from eyas.kernels.round_tensors import BlockShape
from eyas.kernels.tree_draft import grow, keep
from eyas.kernels.tree_nodes import TreeNodes
from eyas.kernels.tree_outcome import settle_trees
from oracle.draft import Draft
from oracle.tree_growth import TreeGrowth, within
from oracle.verify import accept_tree

CPU, SIZE, BLOCK_SIZE, BLOCKS = torch.device("cpu"), 200, 4, 24
SHAPE = BlockShape(blocks=BLOCKS, block_size=BLOCK_SIZE, null_slot=4000)
SHAPES = [(1, 2, 2), (3, 2, 6), (4, 3, 9), (4, 4, 24), (5, 1, 5), (2, 5, 30), (7, 4, 48)]
"""Depth, width and budget."""


class World:
    """Rows with room for trees of any size; many candidates are equally likely."""

    def __init__(self, seed: int, tree: Tree) -> None:
        self.chance, self.tree, self.generator = random.Random(seed), tree, torch.Generator().manual_seed(seed)
        self.rows = rows = self.chance.choice([1, 2, 7])
        self.state = RoundState(slots=rows + 2, blocks=BLOCKS, max_depth=tree.slots, like_X=None, device=CPU)
        self.trees = TreeNodes.of(
            rows, depth=tree.depth, width=tree.width, budget=tree.budget, device=CPU, states_like=None
        )
        state, slots = self.state, self.chance.sample(range(rows + 2), rows)
        state.table_SP[: rows + 2] = torch.randperm(1000, generator=self.generator)[: (rows + 2) * BLOCKS].view(
            -1, BLOCKS
        )
        state.tokens_SL[:] = torch.randint(SIZE, state.tokens_SL.shape, generator=self.generator)
        state.row_slot[:rows], state.row_samples[:rows] = torch.tensor(slots), 1
        state.depth_R[:rows] = torch.tensor([self.chance.randint(0, tree.slots) for _ in slots])
        longest = BLOCKS * BLOCK_SIZE - tree.slots - 2
        state.length_S[:] = torch.randint(1, longest, state.length_S.shape, generator=self.generator)
        state.limit_S[:] = state.length_S + 2 + tree.slots
        self.growths = [TreeGrowth(within(tree, most)) if most else None for most in state.depth_R[:rows].tolist()]

    def candidates(self, nodes: int) -> tuple[Tensor, Tensor]:
        """Candidates of `nodes` nodes, not in order of probability."""
        width = self.tree.width
        token_MW = torch.tensor([self.chance.sample(range(SIZE), width) for _ in range(nodes)])
        sure = [[self.chance.choice([0.0, 0.1, 0.25, 0.3, 0.5, 0.9]) for _ in range(width)] for _ in range(nodes)]
        return token_MW, torch.tensor(sure, dtype=torch.float32)

    def grow(self) -> None:
        """Grow all depths and compare each."""
        rows, width, layout = self.rows, self.tree.width, None
        newest: list[list[int]] = [[-1] for _ in range(rows)]
        for at in range(1, self.tree.depth + 1):
            nodes = 1 if at == 1 else width
            token_MW, sure_MW = self.candidates(rows * nodes)
            for row, growth in enumerate(self.growths):
                for place, node in enumerate(newest[row] if growth is not None else ()):
                    number = row * nodes + place
                    told = tuple(token_MW[number].tolist()), tuple(sure_MW[number].tolist())
                    growth.add(node, Candidates(*told))  # type: ignore[union-attr]
            layout = grow(self.state, self.trees, SHAPE, at=at, token_MW=token_MW, sure_MW=sure_MW, before=layout)
            assert (layout is None) == (at == self.tree.depth)
            before, newest = newest, [[] if one is None else one.grow(at + 1) for one in self.growths]
            if layout is None:
                return
            sees_RW = self.trees.grown_sees_RE[:, (at - 1) * width : at * width]
            for row, growth in enumerate(self.growths):
                if growth is not None and newest[row]:
                    here = slice(row * width, (row + 1) * width)
                    assert layout.ids_N[here].tolist() == [growth.tokens[node] for node in newest[row]]
                    behind = [before[row].index(growth.parents[node]) for node in newest[row]]
                    assert layout.parent_N[here].tolist() == [row * nodes + place for place in behind]
                    assert sees_RW[row].tolist() == [bits(seen) for seen in growth.seen()]

    def drafts(self) -> list[Draft]:
        """The kept nodes of each row, by the oracle."""
        return [Draft() if growth is None else growth.offered() for growth in self.growths]


def bits(seen: list[bool]) -> int:
    return sum(1 << place for place, is_seen in enumerate(seen) if is_seen)


@each("shape", SHAPES)
@each("seed", range(6))
def test_trees_grow_and_are_kept(seed: int, shape: tuple[int, int, int]) -> None:
    depth, width, budget = shape
    world = World(seed, Tree(depth=depth, width=width, budget=budget))
    world.grow()
    keep(world.state, world.trees)
    trees, state = world.trees, world.state
    assert trees.kept_count_R.tolist() == [len(draft.tokens) for draft in world.drafts()]
    for row, draft in enumerate(world.drafts()):
        places = slice(1, 1 + len(draft.tokens))
        slot = state.row_slot[row]
        assert trees.kept_token_RQ[row, 0] == state.tokens_SL[slot, state.length_S[slot] % state.ring]
        assert tuple(trees.kept_token_RQ[row, places].tolist()) == draft.tokens
        assert trees.kept_parent_RQ[row, places].tolist() == [1 + parent for parent in draft.parents]
        paths = [draft.path(node) for node in range(len(draft.tokens))]
        assert trees.kept_depth_RQ[row, places].tolist() == [len(path) for path in paths]
        assert trees.kept_sees_RQ[row, places].tolist() == [1 | sum(2 << node for node in path) for path in paths]
        for place in range(1 + len(draft.tokens)):
            group, known = int(trees.kept_group_RQ[row, place]), draft.candidates.get(place - 1)
            assert (group < 0) == (known is None)
            if known is not None:
                assert tuple(trees.token_RGW[row, group].tolist()) == known.tokens


@each("shape", SHAPES)
@each("seed", range(6))
def test_trees_are_walked_along_the_targets_tokens(seed: int, shape: tuple[int, int, int]) -> None:
    depth, width, budget = shape
    world = World(seed, Tree(depth=depth, width=width, budget=budget))
    world.grow()
    keep(world.state, world.trees)
    drafts, chance = world.drafts(), world.chance
    token_RQ = torch.randint(SIZE, (world.rows, 1 + budget), generator=world.generator)
    for row, draft in enumerate(drafts):  # often one of the children
        for place in range(1 + len(draft.tokens)):
            children = [draft.tokens[node] for node, parent in enumerate(draft.parents) if parent == place - 1]
            if children and (row + place == 0 or chance.random() < 0.8):
                token_RQ[row, place] = chance.choice(children)
    before = world.state.length_S.clone()
    made = settle_trees(world.state, world.trees, SHAPE, token_RQ=token_RQ)
    accepted = 0
    for row, draft in enumerate(drafts):
        own, slot = token_RQ[row, : 1 + len(draft.tokens)].tolist(), world.state.row_slot[row]
        path = accept_tree(draft.parents, draft.tokens, own)
        accepted += len(path)
        line = made.line_RC[row].tolist()
        assert line[:2] == [1 + len(path), len(path)]
        assert line[2 : 3 + len(path)] == [*(draft.tokens[node] for node in path), own[1 + path[-1] if path else 0]]
        assert line[3 + depth : 5 + depth] == [len(draft.tokens), draft.depth]
        assert world.state.length_S[slot] == before[slot] + 1 + len(path)
        assert made.path_RT[row, : 1 + len(path)].tolist() == [0, *(1 + node for node in path)]
        known = [draft.candidates.get(node) for node in (-1, *path)][:depth]
        for at, some in enumerate(known):
            told = line[5 + depth + at * width : 5 + depth + (at + 1) * width]
            assert told == ([-1] * width if some is None else list(some.tokens))
        table = world.state.table_SP[slot].tolist()

        def slot_at(offset: int, table: list[int] = table, length: int = int(before[slot])) -> int:
            return table[(length + offset) // BLOCK_SIZE] * BLOCK_SIZE + (length + offset) % BLOCK_SIZE

        moves = {slot_at(1 + at): slot_at(1 + node) for at, node in enumerate(path) if at != node}
        here = slice(row * depth, (row + 1) * depth)
        told_moves = dict(zip(made.to_M[here].tolist(), made.from_M[here].tolist(), strict=True))
        told_moves.pop(SHAPE.null_slot, None)
        assert told_moves == moves
    assert accepted > 0 or not drafts[0].tokens
