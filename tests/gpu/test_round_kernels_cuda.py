"""On a GPU the bookkeeping of a round equals torch's operations, number by number.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import copy
import random

import pytest
import torch
from torch import Tensor

from eyas.engine.runner.round_state import RoundState
from eyas.kernels import draft_choice, round_layout, round_outcome
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.round_tensors import BlockShape

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _torch_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_choice, round_layout, round_outcome):
        monkeypatch.setattr(module, "has_triton", lambda: False)


def logits_with_ties(rows: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_NV = 3 * torch.randn(rows, size, generator=generator)
    logits_NV[0] = logits_NV[0].round()  # many ties
    logits_NV[1 % rows] = 0
    logits_NV[2 % rows, : size - 1] = -torch.inf
    logits_NV[3 % rows, size // 2] = torch.inf
    logits_NV[4 % rows, size // 3 :: 5] = 20
    return logits_NV.to(DEVICE, dtype)


def random_state(seed: int, *, rows: int, max_depth: int, block_size: int = 4, blocks: int = 24) -> RoundState:
    """Decoding requests, some at their limit, some without drafter, with padding rows between them."""
    chance = random.Random(seed)
    slots = rows + 2
    state = RoundState(
        slots=slots, blocks=blocks, max_depth=max_depth, like_X=torch.empty(3, device=DEVICE), device=DEVICE
    )
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.zeros(3, slots, dtype=torch.int64)
    chosen = chance.sample(range(slots), rows)
    for slot in range(slots):
        length = chance.randint(1, blocks * block_size - max_depth - 1)
        state.length_S[slot] = length
        state.drafted_S[slot] = length - chance.randint(1, min(length, 1 + max_depth))
        state.limit_S[slot] = length + chance.choice([0, 1, 2, 3, max_depth + 1, 100])
        state.follows_S[slot] = int(chance.random() < 0.8)
    state.tokens_SL[:slots] = torch.randint(9, 1000, (slots, state.ring), generator=generator).to(DEVICE)
    state.table_SP[:slots] = torch.randint(1, 500, (slots, blocks), generator=generator).to(DEVICE)
    for row in range(rows):
        nobody = row > 0 and chance.random() < 0.25
        numbers[:, row] = torch.tensor(
            [
                state.nobody if nobody else chosen[row],
                0 if nobody else chance.randint(0, max_depth),
                0 if nobody else int(chance.random() < 0.8),
            ]
        )
    state.row_slot.copy_(numbers[0])
    state.row_depth.copy_(numbers[1])
    state.row_samples.copy_(numbers[2])
    state.drafts_RK.copy_(torch.randint(0, 7, state.drafts_RK.shape, generator=generator))
    state.sure_RK.copy_(torch.rand(state.sure_RK.shape, generator=generator))
    state.depth_R.copy_(torch.tensor([chance.randint(0, max_depth) for _ in range(slots)]))
    return state


def assert_same_state(ours: RoundState, theirs: RoundState) -> None:
    """Except for padding."""
    for name in ("length_S", "drafted_S", "limit_S", "follows_S", "tokens_SL", "table_SP"):
        assert torch.equal(getattr(ours, name)[:-1], getattr(theirs, name)[:-1]), name
    for name in ("drafts_RK", "sure_RK", "depth_R", "row_slot", "row_depth", "row_samples"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 97, 1024, 4100, 9001])
@pytest.mark.parametrize("chosen", [False, True])
def test_drafts_are_the_largest_and_as_likely_as_softmax_says(size: int, dtype: torch.dtype, chosen: bool) -> None:
    from eyas.kernels.draft_choice_triton import choose_drafts_by_triton

    rows = 6
    logits_RW = logits_with_ties(rows, size, dtype, seed=size)
    token_W = torch.randperm(3 * size, generator=torch.Generator().manual_seed(1))[:size].to(DEVICE)
    index_R = (torch.arange(rows, device=DEVICE) * 7919) % size if chosen else None
    drafts_RK = torch.zeros(rows + 2, 5, dtype=torch.int64, device=DEVICE)
    sure_RK = torch.zeros(rows + 2, 5, device=DEVICE)
    theirs = drafts_RK.clone(), sure_RK.clone()
    token_R = choose_drafts_by_triton(logits_RW, token_W, drafts_RK, sure_RK, 3, index_R)
    assert torch.equal(token_R, draft_choice.choose_drafts(logits_RW, token_W, *theirs, 3, index_R))
    assert torch.equal(drafts_RK, theirs[0])
    torch.testing.assert_close(sure_RK, theirs[1], rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("given", ["logits", "tokens", "coin"])
def test_rounds_are_settled_by_the_same_law(seed: int, depth: int, given: str) -> None:
    from eyas.kernels.round_outcome_triton import settle_by_triton

    rows = 1 if seed == 0 else 9
    ours = random_state(seed, rows=rows, max_depth=max(depth, seed))
    size = [7, 97, 5000][seed % 3]
    chance = torch.tensor(0.7, dtype=torch.float64, device=DEVICE) if given == "coin" else None
    logits_NV = logits_with_ties(rows * (1 + depth), size, DTYPES[seed % 2], seed)
    # Drafts that are often right.
    token_RQ = logits_NV.argmax(dim=-1).view(rows, 1 + depth)
    right_RK = torch.rand(rows, depth, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < 0.8
    drafts_RK = ours.drafts_RK[:rows, :depth]
    drafts_RK.copy_(torch.where(right_RK, token_RQ[:, :depth], drafts_RK))
    theirs = copy.deepcopy(ours)
    manner = {"token_RQ": token_RQ} if given == "tokens" else {"logits_NV": logits_NV}
    line_RC = settle_by_triton(ours, rows=rows, depth=depth, chance=chance, **manner)
    assert torch.equal(line_RC, round_outcome.settle(theirs, rows=rows, depth=depth, chance=chance, **manner))
    assert_same_state(ours, theirs)


def test_what_is_undefined_wins_within_the_vocabulary() -> None:
    from eyas.kernels.round_outcome_triton import settle_by_triton

    state = random_state(0, rows=4, max_depth=0)
    logits_NV = torch.full((4, 5000), torch.nan, device=DEVICE)
    logits_NV[1, :4999] = 0.0
    logits_NV[2] = -torch.inf
    logits_NV[3] = torch.inf
    assert settle_by_triton(state, rows=4, depth=0, logits_NV=logits_NV)[:, 2].tolist() == [0, 4999, 0, 0]


def assert_same_chains(ours: AttentionMetadata, theirs: AttentionMetadata) -> None:
    assert torch.equal(ours.position_N, theirs.position_N)
    assert torch.equal(ours.slot_mapping_N, theirs.slot_mapping_N)
    a, b = ours.tables, theirs.tables
    assert (ours.block_size, a.query_lens, a.max_seq_len) == (theirs.block_size, b.query_lens, b.max_seq_len)
    for name in ("context_lens_R", "seq_lens_R", "query_start_loc_R"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert getattr(a, name).dtype == torch.int32
    used_R = -(-b.seq_lens_R // ours.block_size)
    seen_RP = torch.arange(b.block_table_RP.shape[1], device=DEVICE) < used_R[:, None]
    assert a.block_table_RP.dtype == torch.int32
    assert torch.equal(a.block_table_RP[seen_RP], b.block_table_RP[seen_RP])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", range(8))
def test_verification_is_laid_out_alike(seed: int, depth: int) -> None:
    from eyas.kernels.round_layout_triton import lay_out_verify_by_triton

    rows, max_depth = 1 if seed == 0 else 2 + seed, max(1, depth, seed)
    ours = random_state(seed, rows=rows, max_depth=max_depth)
    ours.depth_R.clamp_(max=depth)
    theirs, shape = copy.deepcopy(ours), BlockShape(blocks=24 - seed % 2, block_size=4, null_slot=2000)
    a = lay_out_verify_by_triton(ours, shape, rows=rows, depth=depth)
    b = round_layout.lay_out_verify(theirs, shape, rows=rows, depth=depth)
    assert_same_chains(a.tokens, b.tokens)
    assert torch.equal(a.ids_N, b.ids_N)
    assert torch.equal(a.place_N, b.place_N)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("depth", "kept"), [(0, 1), *((depth, 0) for depth in range(1, 8))])
def test_drafts_are_laid_out_alike(seed: int, depth: int, kept: int) -> None:
    from eyas.kernels.round_layout_triton import lay_out_draft_by_triton

    rows, max_depth = 1 if seed == 0 else 2 + seed, max(1, depth, seed)
    ours = random_state(seed, rows=rows, max_depth=max_depth)
    reads = ours.ring if kept else 1 + max_depth
    theirs, shape = copy.deepcopy(ours), BlockShape(blocks=24 - seed % 2, block_size=4, null_slot=2000)
    manner = {"rows": rows, "reads": reads, "depth": depth, "kept": kept}
    a = lay_out_draft_by_triton(ours, shape, **manner)
    b = round_layout.lay_out_draft(theirs, shape, **manner)
    assert_same_chains(a.tokens, b.tokens)
    for name in ("ids_N", "place_N", "last_R"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert len(a.deeper) == len(b.deeper) == max(0, depth - 1)
    for one, other in zip(a.deeper, b.deeper, strict=True):
        assert_same_chains(one, other)
    assert_same_state(ours, theirs)


def test_tables_of_long_contexts_are_copied_by_several_programs() -> None:
    from eyas.kernels.round_layout_triton import lay_out_verify_by_triton

    state = random_state(3, rows=3, max_depth=2, blocks=2500)
    state.length_S[state.row_slot[0]], state.limit_S[state.row_slot[0]] = 9990, 20000
    shape = BlockShape(blocks=2500, block_size=4, null_slot=9999)
    a = lay_out_verify_by_triton(state, shape, rows=3, depth=2)
    assert_same_chains(a.tokens, round_layout.lay_out_verify(state, shape, rows=3, depth=2).tokens)
