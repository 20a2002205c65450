"""Shipped drafters are sound checkpoints, and a record of acceptance is read beside the weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import find_folder, load_drafter
from eyas.drafter.recorded_acceptance import FILE, RecordedAcceptance, read_acceptance
from eyas.drafter.shipped import DEFAULT_DRAFTER, SHIPPED, shipped_folder
from eyas.engine.speculation.acceptance import Acceptance
from eyas.errors import UserError
from eyas.target.facts import read_facts


@each("name", SHIPPED)
def test_a_shipped_drafter_is_small_enough_for_the_package(name: str) -> None:
    folder = shipped_folder(name)
    assert folder is not None
    assert find_folder(name) == folder
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 32_000_000


def test_other_names_are_not_ours() -> None:
    assert shipped_folder("org/name") is None


def test_the_default_drafter_is_eagle_31() -> None:
    drafter = load_drafter(DEFAULT_DRAFTER["smollm2"])
    assert drafter.config.family == "EAGLE-3.1"
    assert drafter.config.dtype == "bfloat16"


@pytest.mark.default
def test_shipped_drafters_pass_the_check_against_their_target() -> None:
    for target, name in DEFAULT_DRAFTER.items():
        report = check(name, target=read_facts(target))
        assert report.ok
        assert not report.findings


def test_shipped_drafters_record_their_acceptance() -> None:
    for name in SHIPPED:
        folder = shipped_folder(name)
        assert folder is not None
        recorded = read_acceptance(folder)
        assert recorded is not None
        assert len(recorded.by_depth()) == 7


GOOD = {"version": 1, "source": "measured", "rounds": 100, "accepted_at": [80, 60, 30]}


def test_a_written_record_is_read_back(tmp_path: Path) -> None:
    assert read_acceptance(tmp_path) is None, "no drafter needs one"
    recorded = RecordedAcceptance(rounds=100, accepted_at=(80, 60, 30), source="measured")
    (tmp_path / FILE).write_text(recorded.to_json(), encoding="utf-8")
    assert read_acceptance(tmp_path) == recorded
    assert recorded.by_depth() == pytest.approx([0.8, 0.75, 0.5])


def test_depths_that_no_round_reached_have_no_acceptance() -> None:
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
def test_an_inconsistent_record_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(GOOD | change), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_acceptance(tmp_path)


@each("text", ["{", "[]"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="delete it or write it again"):
        read_acceptance(tmp_path)


def test_estimates_start_from_the_record_and_follow_measurements() -> None:
    acceptance = Acceptance(5, [0.8, 0.75, 0.5])
    assert acceptance.by_depth[:3] == pytest.approx([0.8, 0.75, 0.5], abs=0.1), (
        "each drawn a little towards the one before"
    )
    assert acceptance.by_depth[3] < acceptance.by_depth[2], "deeper than recorded: a little less than the depth before"
    for _ in range(16):
        acceptance.observe([(3, 0)])
    assert acceptance.by_depth[0] < 0.3
