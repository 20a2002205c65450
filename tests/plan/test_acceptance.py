"""Acceptance profiles: shares by position, a length at a depth, measured lengths."""

import pytest

from each import each
from eyas.errors import UserError
from eyas.plan.acceptance import SHIPPED, read_acceptance, read_length, usual_profile


def test_shares_by_position_are_kept() -> None:
    profile = read_acceptance("0.73,0.52,0.35")
    assert profile.survivals(3) == pytest.approx([0.73, 0.52, 0.35])
    assert profile.length(3) == pytest.approx(2.60)
    deeper = profile.survivals(7)
    assert deeper == sorted(deeper, reverse=True), "beyond what was told, positions are ever less likely"
    assert usual_profile().length(3) == pytest.approx(2.605)


@each(("length", "depth"), [(2.7, 3), (1.01, 1), (4.0, 3), (3.54, 7)])
def test_a_length_comes_true_at_its_depth(length: float, depth: int) -> None:
    profile = read_length(f"{length}@{depth}")
    assert profile.length(depth) == pytest.approx(length)
    assert all(0 <= share <= 1 for share in profile.survivals(depth))


def test_the_shipped_drafter_has_its_measured_lengths() -> None:
    profile = SHIPPED["smollm2-eagle3.1"]
    assert [profile.length(depth) for depth in (3, 5, 7)] == pytest.approx([2.71, 3.23, 3.54])
    lengths = [profile.length(depth) for depth in range(1, 17)]
    assert lengths == sorted(lengths)
    assert 1.68 < lengths[0] < 1.80, "short rounds leave more of easy stretches to the next one"


@each("text", ["", "a", "0.5,", "1.2", "0.5,0", "-0.1", "0.5,0.6", "nan", ",".join(["0.5"] * 17)])
def test_shares_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--acceptance"):
        read_acceptance(text)


@each("text", ["", "2.7", "2.7@", "@3", "1@3", "4.1@3", "2.7@0", "2@99", "-2@3", "2.7@3@3"])
def test_lengths_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--length"):
        read_length(text)
