"""The workload of repeating text is made from this repository, reproducibly."""

import json
from pathlib import Path

import pytest
from repeating_workloads import make_records

from eyas.bench.workload import read_workload


@pytest.mark.slow
def test_every_category_is_there_and_can_be_read_by_the_bench(tmp_path: Path) -> None:
    records = make_records(5, seed=0)
    file = tmp_path / "repeating.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    workload = read_workload([file], limit=None, turns=None, seed=0)
    assert workload.categories == {"cite": 5, "extract": 5, "quote": 5, "rewrite": 5}
    assert {task.requests for task in workload.tasks} == {1, 3}


def test_the_same_seed_makes_the_same_questions() -> None:
    assert make_records(3, seed=4) == make_records(3, seed=4) != make_records(3, seed=5)
