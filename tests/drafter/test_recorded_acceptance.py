"""How often drafts were accepted is recorded beside the weights, and is where an engine starts from."""

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.drafter.recorded_acceptance import FILE, RecordedAcceptance, read_acceptance
from eyas.engine.speculation.acceptance import Acceptance
from eyas.errors import UserError

GOOD = {"version": 1, "source": "measured", "rounds": 100, "accepted_at": [80, 60, 30]}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_acceptance(tmp_path) is None, "no drafter needs one"
    recorded = RecordedAcceptance(rounds=100, accepted_at=(80, 60, 30), source="measured")
    (tmp_path / FILE).write_text(recorded.to_json(), encoding="utf-8")
    assert read_acceptance(tmp_path) == recorded
    assert recorded.by_depth() == pytest.approx([0.8, 0.75, 0.5])


def test_depths_that_no_round_reached_are_left_open() -> None:
    assert RecordedAcceptance(rounds=9, accepted_at=(3, 0, 0), source="measured").by_depth() == pytest.approx(
        [1 / 3, 0]
    )


@each(
    ("change", "said"),
    [
        ({"version": 2}, "version is 2"),
        ({"source": None}, "source is None"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": True}, "rounds is True"),
        ({"rounds": 70}, "must fall from at most 70"),
        ({"accepted_at": []}, "counts by depth"),
        ({"accepted_at": [80, 0.5]}, "counts by depth"),
        ({"accepted_at": [60, 80]}, "must fall"),
        ({"accepted_at": [60, -1]}, "no less than 0"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(GOOD | change), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_acceptance(tmp_path)


@each("text", ["{", "[]"])
def test_so_is_one_that_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="delete it or write it again"):
        read_acceptance(tmp_path)


def test_estimates_start_from_the_record_and_soon_leave_it() -> None:
    acceptance = Acceptance(5, [0.8, 0.75, 0.5])
    assert acceptance.by_depth[:3] == pytest.approx([0.8, 0.75, 0.5], abs=0.1), (
        "each drawn a little towards the one before"
    )
    assert acceptance.by_depth[3] < acceptance.by_depth[2], "deeper than recorded: a little less than the depth before"
    for _ in range(16):
        acceptance.observe([(3, 0)])
    assert acceptance.by_depth[0] < 0.3
