"""On a GPU the bookkeeping of trees equals torch's operations, number by number.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, numpy before 2.4, `--noconftest` against the skip.
"""

import copy

import pytest
import torch
from torch import Tensor

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.round_state import RoundState
from eyas.kernels import tree_draft, tree_outcome
from eyas.kernels.attention.dense import DenseBackend
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.round_tensors import BlockShape
from eyas.kernels.tree_nodes import TreeNodes
from gpu.test_round_kernels_cuda import DEVICE, assert_same_state, logits_with_ties, random_state

pytestmark = pytest.mark.gpu
SHAPES = [(1, 2, 2), (3, 2, 6), (4, 3, 9), (4, 4, 24), (5, 1, 5), (2, 5, 30), (7, 4, 48)]
"""Depth, width and budget."""


@pytest.fixture(autouse=True)
def _torch_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tree_draft, tree_outcome):
        monkeypatch.setattr(module, "has_triton", lambda: False)


def random_trees(seed: int, shape: tuple[int, int, int], rows: int) -> tuple[RoundState, TreeNodes]:
    depth, width, budget = shape
    state = random_state(seed, rows=rows, max_depth=max(budget, (depth - 1) * width), blocks=40)
    trees = TreeNodes.of(rows, depth=depth, width=width, budget=budget, device=DEVICE, states_like=None)
    return state, trees


def assert_same_trees(ours: TreeNodes, theirs: TreeNodes) -> None:
    for name, mine in vars(ours).items():
        if isinstance(mine, Tensor):
            assert torch.equal(mine, getattr(theirs, name)), name


def assert_same_layout(ours: AttentionMetadata, theirs: AttentionMetadata) -> None:
    a, b = ours.tables, theirs.tables
    live = b.seq_lens_R > 0
    for name in ("context_lens_R", "seq_lens_R", "query_start_loc_R", "query_lens", "max_seq_len"):
        mine, other = getattr(a, name), getattr(b, name)
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other, name
    assert a.tree_mask_N is not None
    assert b.tree_mask_N is not None
    assert torch.equal(a.tree_mask_N, b.tree_mask_N)
    assert torch.equal(ours.position_N, theirs.position_N)
    assert torch.equal(ours.slot_mapping_N, theirs.slot_mapping_N)
    for row in live.nonzero()[:, 0].tolist():
        used = -(-int(b.seq_lens_R[row]) // ours.block_size)
        assert torch.equal(a.block_table_RP[row, :used], b.block_table_RP[row, :used])


@pytest.mark.parametrize("size", [5, 97, 1024, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [False, True])
def test_candidates_are_the_largest_and_as_likely_as_softmax_says(size: int, dtype: torch.dtype, chosen: bool) -> None:
    from eyas.kernels.tree_draft_triton import choose_candidates_by_triton

    nodes, width = 8, 4
    logits_MV = logits_with_ties(nodes, size, dtype, seed=size)
    logits_MV[2] = logits_MV[5]  # all but one impossible, so siblings are arbitrary
    logits_MV[3] = logits_MV[6]  # infinite: no token is likely
    token_V = torch.randperm(3 * size, generator=torch.Generator().manual_seed(1))[:size].to(DEVICE)
    index_MW = (torch.arange(nodes * width, device=DEVICE).view(nodes, width) * 7919) % size if chosen else None
    token_MW, sure_MW = choose_candidates_by_triton(logits_MV, token_V, width, index_MW)
    their_token_MW, their_sure_MW = tree_draft.choose_candidates(logits_MV, token_V, width, index_MW)
    torch.testing.assert_close(sure_MW, their_sure_MW, rtol=1e-5, atol=1e-7)
    assert all(len(set(row)) == width for row in token_MW.tolist()) or chosen
    of_V = torch.empty(3 * size, dtype=torch.int64, device=DEVICE)
    of_V[token_V] = torch.arange(size, device=DEVICE)
    ours, theirs = (logits_MV.gather(1, of_V[token]) for token in (token_MW, their_token_MW))
    assert torch.equal(ours, theirs), "the same but for equals"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_grow_and_are_kept_by_the_same_law(seed: int, shape: tuple[int, int, int]) -> None:
    from eyas.kernels.tree_draft_triton import grow_by_triton, keep_by_triton, lay_out_trees_by_triton, new_table

    depth, width, _ = shape
    rows = 1 if seed == 0 else 5
    ours, trees = random_trees(seed, shape, rows)
    theirs, their_trees = copy.deepcopy(ours), copy.deepcopy(trees)
    blocks = BlockShape(blocks=40, block_size=4, null_slot=4000)
    generator = torch.Generator().manual_seed(seed)
    table_RP = new_table(rows, blocks, DEVICE)
    for at in range(1, depth + 1):
        nodes = rows if at == 1 else rows * width
        token_MW = torch.randint(0, 500, (nodes, width), generator=generator).to(DEVICE)
        # Few values, so that there are many ties.
        sure_MW = (torch.randint(1, 6, (nodes, width), generator=generator) / 8).to(DEVICE)
        layout = grow_by_triton(ours, trees, blocks, at=at, token_MW=token_MW, sure_MW=sure_MW, table_RP=table_RP)
        expected = tree_draft.grow(theirs, their_trees, blocks, at=at, token_MW=token_MW, sure_MW=sure_MW)
        assert_same_trees(trees, their_trees)
        assert (expected is None) == (at == depth)
        if expected is not None:
            assert_same_layout(layout.metadata(blocks), expected.tokens)
            assert torch.equal(layout.id_N, expected.ids_N)
            assert torch.equal(layout.parent_N, expected.parent_N)
    keep_by_triton(ours, trees)
    tree_draft.keep(theirs, their_trees)
    assert_same_trees(trees, their_trees)
    assert_same_state(ours, theirs)
    expected_layout = tree_draft.lay_out_trees(theirs, their_trees, blocks)
    assert_same_layout(lay_out_trees_by_triton(ours, trees, blocks), expected_layout)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given", ["logits", "tokens", "coin"])
def test_rounds_are_settled_by_the_same_law(seed: int, shape: tuple[int, int, int], given: str) -> None:
    from eyas.kernels.tree_outcome_triton import settle_trees_by_triton

    depth, width, budget = shape
    rows = 1 if seed == 0 else 5
    ours, trees = random_trees(seed, shape, rows)
    blocks = BlockShape(blocks=40, block_size=4, null_slot=4000)
    generator = torch.Generator().manual_seed(seed)
    for at in range(1, depth + 1):
        nodes = rows if at == 1 else rows * width
        token_MW = torch.stack([torch.randperm(9, generator=generator)[:width] for _ in range(nodes)]).to(DEVICE)
        sure_MW = torch.rand(nodes, width, generator=generator).to(DEVICE)
        tree_draft.grow(ours, trees, blocks, at=at, token_MW=token_MW, sure_MW=sure_MW)
    tree_draft.keep(ours, trees)
    # The target often agrees with the tree: at a node with children, its token is one of theirs.
    token_RQ = torch.randint(0, 9, (rows, 1 + budget), generator=generator).to(DEVICE)
    for row, parents in enumerate(trees.kept_parent_RQ.tolist()):
        for place in range(1, 1 + int(trees.kept_count_R[row])):
            if torch.rand((), generator=generator) < 0.6:
                token_RQ[row, parents[place]] = trees.kept_token_RQ[row, place]
    logits_NV = logits_with_ties(rows * (1 + budget), 3000, torch.float32, seed).clamp(-15, 15)
    logits_NV.scatter_(1, token_RQ.view(-1, 1), 50.0)
    chance = torch.tensor(0.7, dtype=torch.float64, device=DEVICE) if given == "coin" else None
    theirs = copy.deepcopy(ours)
    manner = (
        {"logits_NV": None, "token_RQ": token_RQ} if given == "tokens" else {"logits_NV": logits_NV, "token_RQ": None}
    )
    made = settle_trees_by_triton(ours, trees, blocks, chance=chance, **manner)
    expected = tree_outcome.settle_trees(theirs, trees, blocks, chance=chance, **manner)
    for name, mine, other in zip(expected._fields, made, expected, strict=True):
        assert torch.equal(mine, other), name
    assert_same_state(ours, theirs)
    assert seed == 0 or given == "coin" or width == 1 or int(made[0][:, 1].max()) > 0, "some are accepted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [7, 64])
def test_slots_move_in_all_layers(dtype: torch.dtype, size: int) -> None:
    from eyas.kernels.move_slots_triton import addresses, move_slots_by_triton

    ours, theirs = KVCache(blocks=10, block_size=4), KVCache(blocks=10, block_size=4)
    for layer in range(3):
        ours.memory(layer, *(torch.empty(1, 2, size, dtype=dtype, device=DEVICE) for _ in range(2)))
        for x in ours.layers[layer]:
            x.copy_(torch.randn(x.shape))
    theirs.layers = copy.deepcopy(ours.layers)
    null = ours.null_slot
    from_M = torch.tensor([5, 6, 9, null, 22, 25], device=DEVICE)
    to_M = torch.tensor([4, 5, 6, null, 21, 22], device=DEVICE)
    tensors = [x for pair in ours.layers.values() for x in pair]
    move_slots_by_triton(addresses(tensors), tensors[0], from_M, to_M, 2)
    theirs.move(from_M, to_M)
    for layer, pair in ours.layers.items():
        for mine, other in zip(pair, theirs.layers[layer], strict=True):
            assert torch.equal(mine.float(), other.float())


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("begun", [False, True])
def test_nodes_see_their_ancestors_alone(window: int | None, begun: bool) -> None:
    """Also for trees that earlier passes have begun, with padding rows and trees of few nodes."""
    from eyas.kernels.attention.triton import TritonBackend

    generator = torch.Generator().manual_seed(5)
    parents, rows, size = [0, 0, 0, 1, 1, 2, 4], 4, 4
    sees = [1]
    for place, parent in enumerate(parents[1:], 1):
        sees.append(1 << place | sees[parent])
    depths = [bin(bits).count("1") - 1 for bits in sees]
    count = 4 if begun else len(sees)
    sees_RQ, depth_RQ = (torch.tensor(x[-count:], device=DEVICE).expand(rows, -1) for x in (sees, depths))
    live_R = torch.tensor([4, 0, 4, 4] if begun else [7, 0, 3, 1], device=DEVICE)
    table_RP = torch.randperm(40, generator=generator)[: rows * 10].view(rows, 10).int().to(DEVICE)
    layout = AttentionMetadata.trees(
        table_RP,
        torch.tensor([21, 30, 0, 2], device=DEVICE),
        live_R,
        sees_RQ,
        depth_RQ,
        tail=len(sees),
        block_size=size,
        null_slot=160,
    )
    q_NHK = torch.randn(rows * count, 4, 8, generator=generator).to(DEVICE)
    keys_GCK, values_GCK = torch.randn(2, 2, 164, 8, generator=generator).to(DEVICE)
    ours = TritonBackend(layout, sinks=1).attend(q_NHK, keys_GCK, values_GCK, 0.3, None, window)
    theirs = DenseBackend(layout, sinks=1).attend(q_NHK, keys_GCK, values_GCK, 0.3, None, window)
    live_N = (torch.arange(count, device=DEVICE) < live_R[:, None]).flatten()
    torch.testing.assert_close(ours[live_N], theirs[live_N], rtol=1e-4, atol=1e-5)
    assert ours.isfinite().all()


def test_siblings_race_by_the_same_noise() -> None:
    from eyas.kernels.noise import first_many
    from eyas.kernels.noise_triton import scores_by_triton

    rows, size, width = 6, 5000, 4
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(rows, size, generator=generator).to(DEVICE)
    p_NV = logits_NV.softmax(dim=-1)
    greedy_N, seed_N = (torch.arange(rows, device=DEVICE) % 2, torch.arange(rows, device=DEVICE) * 77)
    position_N, token_V = torch.arange(rows, device=DEVICE) + 5, torch.randperm(size, generator=generator).to(DEVICE)
    score_NV = scores_by_triton(p_NV, logits_NV, greedy_N, seed_N, position_N, token_V)
    given = (p_NV.cpu(), logits_NV.cpu(), greedy_N.cpu(), seed_N.cpu(), position_N.cpu(), token_V.cpu())
    assert torch.equal(score_NV.topk(width, dim=-1).indices.cpu(), first_many(*given, width))
