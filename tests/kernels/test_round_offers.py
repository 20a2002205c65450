"""Looked-up drafts are placed where the host's expectation came true so far, and nowhere else."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.kernels.round_offers import LOOKED_UP, place_offers

DEPTH, RING, EXPECTED = 3, 16, 7


def state_of(
    lengths: list[int], texts: list[list[int]], offers: list[tuple[int, list[int]] | None], *, confirmed: bool = False
) -> Any:
    rows = len(lengths)
    tokens = torch.full((rows + 1, RING), -5)
    for slot, text in enumerate(texts):
        for position, token in enumerate(text):
            tokens[slot, position % RING] = token
    numbers = torch.zeros(rows, 3 + EXPECTED, dtype=torch.int64)
    for row, offer in enumerate(offers):
        if offer is not None:
            numbers[row, :3] = torch.tensor([offer[0], len(offer[1]), int(confirmed)])
            numbers[row, 3 : 3 + len(offer[1])] = torch.tensor(offer[1])
    return SimpleNamespace(
        ring=RING,
        row_slot=torch.arange(rows),
        row_depth=torch.full((rows,), DEPTH),
        length_S=torch.tensor([*lengths, 0]),
        limit_S=torch.tensor([100] * rows + [0]),
        tokens_SL=tokens,
        offers_RC=numbers,
        drafts_RK=torch.full((rows, DEPTH), 77),
        sure_RK=torch.full((rows, DEPTH), 0.5),
        depth_R=torch.full((rows,), 2),
    )


@pytest.mark.parametrize("own_depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_drafts_what_was_expected_after_its_new_tokens(seed: int, own_depth: int) -> None:
    source = random.Random(seed)
    texts, lengths, offers, wanted = [], [], [], []
    for _ in range(40):
        text = [source.randrange(3) for _ in range(source.randrange(6, 30))]
        known = source.randrange(max(1, len(text) - 4), len(text) + 1)
        expected = [*text[known:], *(source.randrange(3) for _ in range(EXPECTED))][: source.randrange(1, EXPECTED + 1)]
        if source.random() < 0.4:
            expected = [source.randrange(3) for _ in expected]
        offer = None if source.random() < 0.2 else (known, expected)
        came = text[known:]
        drafts = expected[len(came) :][:DEPTH] if expected[: len(came)] == came else []
        texts.append(text)
        lengths.append(len(text) - 1)
        offers.append(offer)
        wanted.append([] if offer is None else drafts)
    state = state_of(lengths, texts, offers)
    stands = place_offers(state, rows=40, depth=DEPTH, own_depth=own_depth)
    assert stands.tolist() == [bool(drafts) for drafts in wanted]
    for row, drafts in enumerate(wanted):
        deep = int(state.depth_R[row])
        assert deep == (len(drafts) or min(2, own_depth))
        assert state.drafts_RK[row].tolist()[: len(drafts)] == drafts
        assert state.sure_RK[row].tolist() == [LOOKED_UP] * len(drafts) + [0.5] * (DEPTH - len(drafts))
        if not drafts:
            assert state.drafts_RK[row].tolist() == [77] * DEPTH
    assert 5 < sum(map(bool, wanted)) < 35, "both happen"


def test_a_row_near_its_limit_drafts_no_more_than_it_may() -> None:
    state = state_of([9, 9, 9], [list(range(10))] * 3, [(10, [1, 2, 3, 4])] * 3)
    state.limit_S = torch.tensor([13, 11, 100, 0])
    state.row_depth = torch.tensor([3, 3, 1])
    place_offers(state, rows=3, depth=DEPTH, own_depth=0)
    assert state.depth_R.tolist() == [2, 0, 1]


def test_a_confirmed_offer_continues_the_drafters_own_drafts() -> None:
    """Six equal rows: drafts as expected, the second different, no drafter, nothing after them, a limit, void."""
    expected = [4, 5, 6]
    state = state_of([9] * 6, [list(range(10))] * 6, [(10, expected)] * 6, confirmed=True)
    state.drafts_RK[:, :2] = torch.tensor([[4, 5], [4, 9], [4, 5], [4, 5], [4, 5], [4, 5]])
    state.depth_R = torch.tensor([2, 2, 0, 2, 2, 2])
    state.offers_RC[3, 1] = 2
    state.limit_S[4] = 13
    state.offers_RC[5, 0] = 9  # another token came than the first expected one
    stands = place_offers(state, rows=6, depth=DEPTH, own_depth=2)
    assert stands.tolist() == [True, False, False, False, False, False]
    assert state.depth_R.tolist() == [3, 2, 0, 2, 2, 2]
    assert state.drafts_RK[0].tolist() == expected
    assert state.sure_RK[0].tolist() == [0.5, 0.5, LOOKED_UP], "the drafter's own stay its own"
    assert state.drafts_RK[1].tolist() == [4, 9, 77]
    assert (state.sure_RK[1:] == 0.5).all()
