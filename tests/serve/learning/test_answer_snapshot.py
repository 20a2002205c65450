"""Snapshots for adaptations: the newest answers of the served target, while others are written."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from eyas.data.files import expand_files
from eyas.serve.learning.answer_ring import LEAST_BYTES, AnswerRing
from eyas.serve.learning.answer_snapshot import RingEnd, copy_newest, count_behind, end_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def line(number: int, author: str = "ours", size: int = 100) -> bytes:
    return json.dumps({"number": number, "target_fingerprint": author, "text": "x" * size}).encode() + b"\n"


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[AnswerRing]:
    ring = AnswerRing(tmp_path / "kept", LEAST_BYTES)
    yield ring
    ring.close()


def numbers(file: Path) -> list[int]:
    return [json.loads(one)["number"] for one in file.read_text().splitlines()]


def test_the_newest_answers_of_the_target_are_copied_in_order(ring: AnswerRing, tmp_path: Path) -> None:
    for number in range(40):  # over several files of 64 KiB
        ring.append(line(number, "theirs" if number % 10 == 7 else "ours", size=8000))
    counts = copy_newest(ring.folder, tmp_path / "copy.jsonl", most=25, fingerprint="ours")
    assert numbers(tmp_path / "copy.jsonl") == [number for number in range(15, 40) if number % 10 != 7]
    assert (counts.answers, counts.others) == (22, 3)
    assert stat.S_IMODE((tmp_path / "copy.jsonl").stat().st_mode) == 0o600


def test_lines_that_are_no_records_are_left_out(ring: AnswerRing, tmp_path: Path) -> None:
    for number in range(3):
        ring.append(line(number))
    (file,) = ring.folder.glob("answers-*.jsonl")
    with file.open("ab") as held:
        held.write(b'[1]\n\x00\xff\n{"number": 9\n' + line(3) + line(4)[:-20])
    counts = copy_newest(ring.folder, tmp_path / "copy.jsonl", most=100, fingerprint="ours")
    assert (numbers(tmp_path / "copy.jsonl"), counts.others) == ([0, 1, 2, 3], 3)


def test_answers_that_came_since_are_counted_over_restarts_and_deletions(ring: AnswerRing) -> None:
    assert count_behind(ring.folder, end_of(ring.folder)) == 0
    for number in range(20):
        ring.append(line(number, size=8000))
    place = end_of(ring.folder)
    assert count_behind(ring.folder, RingEnd()) == 20
    for number in range(20, 33):
        ring.append(line(number, size=8000))
    assert count_behind(ring.folder, place) == 13
    oldest, *_ = sorted(ring.folder.glob("answers-*.jsonl"))
    oldest.unlink()
    assert count_behind(ring.folder, place) == 13
    for file in ring.folder.glob("answers-*.jsonl"):
        file.unlink()
    ring.append(line(33))
    assert count_behind(ring.folder, place) == 1, "a ring that was emptied begins anew"


def test_a_folder_of_answers_is_read_without_what_else_lies_there(ring: AnswerRing) -> None:
    """`eyas adapt DRAFTER kept` goes on to work where a server has put learnt drafters and notes."""
    ring.append(line(0))
    for name in ("learner.json", "drafters/0001/record.json", "adaptation/answers.jsonl"):
        (ring.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (ring.folder / name).write_text("{}")
    assert [file.name for file in expand_files([ring.folder])] == ["answers-00000001.jsonl"]
