"""Rounds are settled by the target's own tokens, or by a coin with the right rate."""

import torch

from eyas.engine.runner.round_state import RoundState
from eyas.kernels.round_outcome import settle

DEPTH, ROWS = 3, 200


def fresh_state() -> RoundState:
    state = RoundState(slots=ROWS, blocks=1, max_depth=DEPTH, like_X=None, device=torch.device("cpu"))
    state.row_slot.copy_(torch.arange(ROWS))
    state.row_samples.fill_(1)
    state.length_S[:ROWS] = torch.arange(ROWS)
    state.limit_S[:ROWS] = 10_000
    state.drafts_RK.fill_(5)
    state.depth_R.fill_(DEPTH)
    return state


def test_the_coin_is_tossed_in_every_round_at_the_right_rate() -> None:
    state, chance, lengths, before = fresh_state(), torch.tensor(0.7, dtype=torch.float64), [], None
    token_RQ = torch.full((ROWS, 1 + DEPTH), 8)
    for _ in range(20):
        line_RC = settle(state, rows=ROWS, depth=DEPTH, token_RQ=token_RQ, chance=chance)
        accepted_R, tokens_RQ = line_RC[:, 1], line_RC[:, 2 : 3 + DEPTH]
        assert torch.equal(line_RC[:, 0], accepted_R + 1)
        assert torch.equal(tokens_RQ == 5, torch.arange(1 + DEPTH) < accepted_R[:, None]), "drafts, then its own"
        assert before is None or not torch.equal(accepted_R, before)
        lengths.append(line_RC[:, 0].double().mean())
        before = accepted_R
    assert abs(torch.stack(lengths).mean() - sum(0.7**d for d in range(DEPTH + 1))) < 0.05


def test_a_chance_of_none_and_of_all() -> None:
    token_RQ = torch.full((ROWS, 1 + DEPTH), 8)
    for chance, accepted in ((0.0, 0), (1.0, DEPTH)):
        line_RC = settle(
            fresh_state(), rows=ROWS, depth=DEPTH, token_RQ=token_RQ, chance=torch.tensor(chance, dtype=torch.float64)
        )
        assert line_RC[:, 1].unique().tolist() == [accepted]


def test_limits_and_rows_that_do_not_sample_cut_new_tokens() -> None:
    state = fresh_state()
    state.limit_S[:ROWS] = state.length_S[:ROWS] + 1 + torch.arange(ROWS) % 6
    state.row_samples.copy_(torch.arange(ROWS) % 2)
    before_R = state.length_S[:ROWS].clone()
    line_RC = settle(state, rows=ROWS, depth=DEPTH, token_RQ=torch.full((ROWS, 1 + DEPTH), 5))
    new_R = (torch.arange(ROWS) % 6).clamp(max=1 + DEPTH) * (torch.arange(ROWS) % 2)
    assert torch.equal(line_RC[:, 0], new_R)
    assert line_RC[:, 1].unique().tolist() == [DEPTH], "also where the limit cut them off"
    assert torch.equal(state.length_S[:ROWS] - before_R, new_R)
