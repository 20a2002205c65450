"""The fastest way through an answer is never slower than another, and uses no wrong draft."""

import json
from pathlib import Path

import pytest
from suffix_ceiling import KINDS, MOST_TOKENS, Replayed, Times, ceilings, read_times

FLAT = Times(verify=[1.0] * 32, verify_followed=[1.0] * 32, first=0.5, further=0.5, rest=0.0)
DEAR = Times(
    verify=[1.0 + n for n in range(32)], verify_followed=[1.0 + n for n in range(32)], first=1, further=1, rest=0
)


def replayed(suffix: list[int], drafter: list[int]) -> Replayed:
    return Replayed(answer=tuple(range(1 + len(suffix))), loops=False, suffix=suffix, drafter=drafter)


def test_correct_drafts_save_a_pass_each_if_passes_cost_the_same() -> None:
    found = ceilings([replayed([3, 2, 1, 0], [0, 0, 0, 0])], FLAT)
    assert found["plain"] == pytest.approx(1.0)
    assert [found[kind] for kind in KINDS] == pytest.approx([4.0, 4.0, 1.0, 4.0, 4.0])


def test_suffix_drafts_follow_the_drafter_only_if_both_are_correct() -> None:
    found = ceilings([replayed([0, 0, 1, 0], [2, 1, 0, 0])], FLAT)
    assert found["suffix"] == pytest.approx(4 / 3)
    assert found["drafter"] == pytest.approx(4 / (1 + 0.5 + 0.5 + 1))
    assert found["behind"] == pytest.approx(4 / (1 + 0.5 + 0.5)), "two of the drafter, one of the text behind them"
    assert found["both"] == pytest.approx(4 / (1 + 0.5 + 1)), "one of the drafter, then one of the text"


def test_nothing_is_gained_if_every_token_costs_a_pass() -> None:
    found = ceilings([replayed([3, 2, 1, 0], [1, 1, 1, 0])], DEAR)
    assert [found[kind] for kind in KINDS] == pytest.approx([1.0] * 5)


def test_times_of_another_machine_are_interpolated(tmp_path: Path) -> None:
    told = {"verify": {"1": 4.0, "3": 6.0, "32": 6.0}, "first": 0.5, "further": 0.25, "rest": 0.0}
    (tmp_path / "times.json").write_text(json.dumps(told))
    times = read_times(tmp_path / "times.json")
    assert times.verify == pytest.approx([4e-3, 5e-3] + [6e-3] * (MOST_TOKENS - 2))
    assert (times.first, times.further, times.rest) == pytest.approx((5e-4, 2.5e-4, 0.0))
    (tmp_path / "times.json").write_text(json.dumps(told | {"verify": {"1": 4.0, "8": 6.0}}))
    with pytest.raises(SystemExit, match=r"passes of \[1, 8\] tokens; give those of 1 and 32 at least"):
        read_times(tmp_path / "times.json")
