"""The fastest way through an answer is never slower than any other, and knows no wrong draft."""

import pytest
from suffix_ceiling import KINDS, Replayed, Times, ceilings

FLAT = Times(verify=[1.0] * 32, verify_followed=[1.0] * 32, first=0.5, further=0.5, rest=0.0)
DEAR = Times(
    verify=[1.0 + n for n in range(32)], verify_followed=[1.0 + n for n in range(32)], first=1, further=1, rest=0
)


def replayed(suffix: list[int], drafter: list[int]) -> Replayed:
    return Replayed(answer=tuple(range(1 + len(suffix))), loops=False, suffix=suffix, drafter=drafter)


def test_where_passes_are_flat_right_drafts_save_a_pass_each() -> None:
    found = ceilings([replayed([3, 2, 1, 0], [0, 0, 0, 0])], FLAT)
    assert found["plain"] == pytest.approx(1.0)
    assert [found[kind] for kind in KINDS] == pytest.approx([4.0, 4.0, 1.0, 4.0, 4.0])


def test_the_text_goes_on_behind_the_drafter_only_where_both_are_right() -> None:
    found = ceilings([replayed([0, 0, 1, 0], [2, 1, 0, 0])], FLAT)
    assert found["suffix"] == pytest.approx(4 / 3)
    assert found["drafter"] == pytest.approx(4 / (1 + 0.5 + 0.5 + 1))
    assert found["behind"] == pytest.approx(4 / (1 + 0.5 + 0.5)), "two of the drafter, one of the text behind them"
    assert found["both"] == pytest.approx(4 / (1 + 0.5 + 1)), "one of the drafter, then one of the text"


def test_where_every_token_costs_a_pass_nothing_is_gained() -> None:
    found = ceilings([replayed([3, 2, 1, 0], [1, 1, 1, 0])], DEAR)
    assert [found[kind] for kind in KINDS] == pytest.approx([1.0] * 5)
