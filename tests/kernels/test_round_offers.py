"""What the host expected is drafted where it came true so far, and nowhere else."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.kernels.round_offers import place_offers

DEPTH, RING, EXPECTED = 3, 16, 7


def state_of(lengths: list[int], texts: list[list[int]], offers: list[tuple[int, list[int]] | None]) -> Any:
    rows = len(lengths)
    tokens = torch.full((rows + 1, RING), -5)
    for slot, text in enumerate(texts):
        for position, token in enumerate(text):
            tokens[slot, position % RING] = token
    numbers = torch.zeros(rows, 2 + EXPECTED, dtype=torch.int64)
    for row, offer in enumerate(offers):
        if offer is not None:
            numbers[row, 0], numbers[row, 1] = offer[0], len(offer[1])
            numbers[row, 2 : 2 + len(offer[1])] = torch.tensor(offer[1])
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


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_row_drafts_what_was_expected_behind_what_came(seed: int, keep: bool) -> None:
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
    stands = place_offers(state, rows=40, depth=DEPTH, keep=keep)
    assert stands.tolist() == [bool(drafts) for drafts in wanted]
    for row, drafts in enumerate(wanted):
        deep = int(state.depth_R[row])
        assert deep == (len(drafts) or (2 if keep else 0))
        assert state.drafts_RK[row].tolist()[: len(drafts)] == drafts
        if not drafts:
            assert state.drafts_RK[row].tolist() == [77] * DEPTH
    assert 5 < sum(map(bool, wanted)) < 35, "both happen"


def test_a_row_near_its_limit_drafts_no_more_than_it_may() -> None:
    state = state_of([9, 9, 9], [list(range(10))] * 3, [(10, [1, 2, 3, 4])] * 3)
    state.limit_S = torch.tensor([13, 11, 100, 0])
    state.row_depth = torch.tensor([3, 3, 1])
    place_offers(state, rows=3, depth=DEPTH, keep=False)
    assert state.depth_R.tolist() == [2, 0, 1]
