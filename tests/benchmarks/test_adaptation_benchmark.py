"""Adaptation benchmark: distinct tickets, and changes by category."""

import json
from pathlib import Path
from typing import Any

from adaptation import changes_of
from adaptation_traffic import SYSTEM, make_requests

from eyas.data.files import read_conversations


def test_two_thousand_tickets_differ_and_share_their_system_prompt(tmp_path: Path) -> None:
    made = make_requests(2200, seed=0)
    assert len({json.dumps(request) for request in made}) == 2200
    assert made == make_requests(2200, seed=0) != make_requests(2200, seed=1)
    file = tmp_path / "traffic.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in made[:5]))
    assert all(one.messages[0]["content"] == SYSTEM for one in read_conversations(file))


def test_changes_are_counted_by_category_with_and_without_loops() -> None:
    asked = [{"key": 0, "category": "tickets"}, {"key": 1, "category": "math"}, {"key": 2, "category": "tickets"}]

    def cell(name: str, *accepted: list[int]) -> dict[str, Any]:
        rows = [{"key": key, "accepted": own, "looping": key == 2} for key, own in enumerate(accepted)]
        return {"drafter": name, "depth": 2, "by_answer": rows}

    measured = [cell("old", [0, 1, 1], [2, 0], [2, 2]), cell("new", [2, 1], [1, 1], [2, 2])]
    record = {"groups": [{"asked": asked, "measured": measured}], "drafters": {"old": "a/old", "new": "b/new"}}
    found = changes_of(record, "a/old", "b/new", 2)
    assert {kind: change.conversations for kind, change in found.items()} == {
        "general": 1,
        "general, no loops": 1,
        "traffic": 2,
        "traffic, no loops": 1,
    }
    alone = found["traffic, no loops"]
    assert (alone.before.rounds, alone.before.accepted_at) == (3, (2, 0))
    assert (alone.after.rounds, alone.after.accepted_at) == (2, (2, 1))
    assert alone.gain.value == (1 + 3 / 2) / (1 + 2 / 3) - 1
    assert found["general"].gain.value == 0
