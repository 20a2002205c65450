"""Exact rounds equal padded ones at their live places, compiled or not."""

from collections.abc import Callable

import pytest
import torch

from eyas.engine.runner.round_state import RoundState
from eyas.kernels import exact_rounds
from eyas.kernels.round_layout import lay_out_draft, lay_out_verify
from eyas.kernels.round_offers import place_offers
from eyas.kernels.round_outcome import settle
from eyas.kernels.round_tensors import BlockShape

SLOTS, DEPTH, BLOCKS, SIZE, SEEDS = 7, 4, 12, 4, 60
SHAPE = BlockShape(blocks=BLOCKS, block_size=SIZE, null_slot=BLOCKS * SIZE * SLOTS)
NUMBERS = ("length_S", "drafted_S", "tokens_SL", "drafts_RK", "sure_RK", "depth_R")


@pytest.fixture(params=["compiled", "plain"])
def arrays_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[RoundState], object]:
    """Exact rounds, compiled and not."""
    if request.param == "plain":
        monkeypatch.setattr(exact_rounds, "load_rounds", lambda: None)
    elif exact_rounds.load_rounds() is None:
        pytest.skip("no compiler here")
    return exact_rounds.RoundArrays


def random_state(seed: int) -> RoundState:
    """Requests in any state: some ended, some without a drafter, some with many waiting states."""
    chance = torch.Generator().manual_seed(seed)

    def some(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=chance)

    state = RoundState(
        slots=SLOTS, blocks=BLOCKS, max_depth=DEPTH, like_X=None, device=torch.device("cpu"), offers=True
    )
    state.length_S[:SLOTS] = some(1, 40, SLOTS)
    state.drafted_S[:SLOTS] = (state.length_S[:SLOTS] - some(0, 6, SLOTS)).clamp(min=0)
    state.limit_S[:SLOTS] = state.length_S[:SLOTS] + some(0, 8, SLOTS)
    state.follows_S[:SLOTS] = some(0, 2, SLOTS)
    state.tokens_SL.copy_(some(0, 3, *state.tokens_SL.shape))
    state.table_SP.copy_(some(0, BLOCKS * SLOTS, *state.table_SP.shape))
    state.row_slot.copy_(torch.randperm(SLOTS, generator=chance))
    state.row_depth.copy_(some(0, DEPTH + 1, SLOTS))
    state.row_samples.copy_(some(0, 4, SLOTS) > 0)
    state.drafts_RK.copy_(some(0, 3, SLOTS, DEPTH))
    state.sure_RK.copy_(torch.rand(SLOTS, DEPTH, generator=chance))
    state.depth_R.copy_(some(0, DEPTH + 1, SLOTS))
    state.offers_RC.copy_(some(0, 3, *state.offers_RC.shape))
    state.offers_RC[:, 0] = (state.length_S[state.row_slot] + 1 - some(0, 4, SLOTS)).clamp(min=0)
    state.offers_RC[:, 1] = some(0, state.most_expected + 1, SLOTS)
    state.offers_RC[:, 2] = some(0, 2, SLOTS)
    return state


def assert_same_state(ours: RoundState, theirs: RoundState) -> None:
    for name in NUMBERS:
        a, b = getattr(ours, name), getattr(theirs, name)
        own = slice(0, SLOTS)  # padding rows may differ
        assert torch.equal(a[own], b[own]), name


def assert_same_layout(ours: exact_rounds.ExactLayout, theirs: object, count: int) -> None:
    """`theirs` is padded to `count` tokens of a row."""
    metadata = theirs.tokens  # type: ignore[attr-defined]
    rows = [
        (row, int(end), int(base))
        for row, (end, base) in enumerate(zip(metadata.tables.seq_lens_R, metadata.tables.context_lens_R, strict=True))
        if end
    ]
    assert ours.row_R == [row for row, _, _ in rows]
    assert [(row.base, row.end) for row in ours.tokens.rows] == [(base, end) for _, end, base in rows]
    live = [row * count + at for row, end, base in rows for at in range(end - base)]
    assert torch.equal(ours.ids_N, theirs.ids_N[live])  # type: ignore[attr-defined]
    assert torch.equal(ours.place_N, theirs.place_N[live])  # type: ignore[attr-defined]
    assert torch.equal(ours.tokens.slot_mapping_N, metadata.slot_mapping_N[live])
    assert torch.equal(ours.tokens.position_N, metadata.position_N[live])


def test_layouts_of_verification(arrays_of: Callable[[RoundState], exact_rounds.RoundArrays]) -> None:
    for seed in range(SEEDS):
        state, rows, depth = random_state(seed), 1 + seed % SLOTS, seed % (DEPTH + 1)
        state.depth_R.clamp_(max=depth)
        ours = arrays_of(state).lay_out_verify(SIZE, rows=rows, depth=depth)
        assert_same_layout(ours, lay_out_verify(state, SHAPE, rows=rows, depth=depth), 1 + depth)


def test_layouts_of_drafts(arrays_of: Callable[[RoundState], exact_rounds.RoundArrays]) -> None:
    for seed in range(SEEDS):
        state, other, rows = random_state(seed), random_state(seed), 1 + seed % SLOTS
        depth, kept = (seed % (DEPTH + 1), 0) if seed % 3 else (0, 1)
        ours = arrays_of(state).lay_out_draft(SIZE, rows=rows, depth=depth, kept=kept)
        theirs = lay_out_draft(other, SHAPE, rows=rows, reads=6, depth=depth, kept=kept)
        assert_same_layout(ours, theirs, 6)
        assert_same_state(state, other)


def test_layouts_of_next_drafts_reach_as_far_ahead_as_told(
    arrays_of: Callable[[RoundState], exact_rounds.RoundArrays],
) -> None:
    for seed in range(SEEDS):
        state, made, ahead = random_state(seed), 1 + seed % 3, seed % 4
        row_R = list(range(seed % 2, SLOTS, 2))
        layout = arrays_of(state).next_tokens(SIZE, row_R, made, ahead)
        slots = state.row_slot[row_R].tolist()
        base_R = [int(state.length_S[slot]) + made - 1 for slot in slots]
        assert [(row.base, row.count) for row in layout.rows] == [(base, 1) for base in base_R]
        tables = [state.table_SP[slot].tolist() for slot in slots]
        for row, table, base in zip(layout.rows, tables, base_R, strict=True):
            reached = (base + ahead) // SIZE + 1
            assert list(row.blocks[:reached]) == table[:reached]
        placed = [table[base // SIZE] * SIZE + base % SIZE for table, base in zip(tables, base_R, strict=True)]
        assert layout.slot_mapping_N.tolist() == placed
        assert layout.position_N.tolist() == base_R


def test_outcomes(arrays_of: Callable[[RoundState], exact_rounds.RoundArrays]) -> None:
    for seed in range(SEEDS):
        state, other, rows, depth = random_state(seed), random_state(seed), 1 + seed % SLOTS, seed % (DEPTH + 1)
        for one in (state, other):
            one.depth_R.clamp_(max=depth)
        token_RQ = torch.randint(0, 3, (rows, 1 + depth), generator=torch.Generator().manual_seed(seed))
        arrays, packed = arrays_of(state), bool(seed % 2)
        live_RQ = torch.arange(1 + depth) < torch.from_numpy(arrays.live(rows, depth))[:, None]
        assert arrays.live_tokens(rows, depth) == int(live_RQ.sum())
        token_N = token_RQ[live_RQ] if packed else token_RQ.flatten()
        ours = arrays.settle(rows=rows, depth=depth, token_N=token_N, packed=packed)
        theirs = settle(other, rows=rows, depth=depth, token_RQ=token_RQ)
        assert_same_state(state, other)
        told = torch.cat([torch.ones(rows, 1, dtype=torch.bool), live_RQ[:, :1], live_RQ], dim=1)
        assert torch.equal(ours[:, : 3 + depth][told], theirs[:, : 3 + depth][told]), "but for rows that have ended"
        assert torch.equal(ours[:, 3 + depth :], theirs[:, 3 + depth :])


def test_offers(arrays_of: Callable[[RoundState], exact_rounds.RoundArrays]) -> None:
    stood = 0
    for seed in range(SEEDS):
        state, other, rows, depth = random_state(seed), random_state(seed), 1 + seed % SLOTS, 1 + seed % DEPTH
        for one in (state, other):
            one.row_depth.clamp_(max=depth)
        own_depth = seed % (depth + 1)
        arrays_of(state).place_offers(rows=rows, depth=depth, own_depth=own_depth)
        stood += int(place_offers(other, rows=rows, depth=depth, own_depth=own_depth).sum())
        assert_same_state(state, other)
    assert stood > SEEDS // 4
