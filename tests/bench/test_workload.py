"""Workloads: every format, categories, a seeded sample, and files with bad records."""

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from eyas.bench.workload import Task, read_workload, sample_tasks, synthetic_workload
from eyas.errors import UserError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> Any:
    return read_workload([path], **({"limit": None, "turns": None, "seed": 0} | options))


SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}
EAGLE = {"question_id": 1, "category": "math", "turns": ["One and one?"], "reference": ["2"]}
SPEED_BENCH = {
    "question_id": "a",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Sort."],
    "source": "s",
    "src_id": "7",
    "difficulty": "easy",
    "multiturn": False,
}

SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = {"from": "human", "value": "A"}


@each(
    ("row", "category", "context", "turns"),
    [
        (SPEC_BENCH, "writing", 0, ("Write.", "Again.")),
        (EAGLE, "math", 0, ("One and one?",)),
        (SPEED_BENCH, "coding", 0, ("Sort.",)),
        ({"prompt": "Hi"}, "file", 0, ("Hi",)),
        ({"messages": [SYSTEM, {"role": "user", "content": "Hi"}]}, "file", 1, ("Hi",)),
        (
            {"conversations": [SHAREGPT, {"from": "gpt", "value": "B"}, {"from": "human", "value": "C"}]},
            "file",
            2,
            ("C",),
        ),
    ],
)
def test_every_format_is_read_with_its_category(
    tmp_path: Path, row: Any, category: str, context: int, turns: tuple[str, ...]
) -> None:
    (task,) = read(write(tmp_path / "file.jsonl", row)).tasks
    assert (task.category, len(task.context), task.turns) == (category, context, turns)


def test_parquet_is_read_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([SPEED_BENCH]), tmp_path / "speed.parquet")
    (task,) = read(tmp_path / "speed.parquet").tasks
    assert (task.category, task.turns) == ("coding", ("Sort.",))


def test_bad_records_are_left_out_with_their_lines(tmp_path: Path) -> None:
    file = write(
        tmp_path / "half.jsonl",
        SPEC_BENCH,
        '{"prompt": "cut',
        {"prompts": 3},
        {"messages": [{"role": "system", "content": "alone"}]},
        {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]},
    )
    found = read(file)
    assert len(found.tasks) == 1
    (source,) = found.sources
    assert source.read == 1
    words = source.left_out
    assert [word.split(" ")[0].rstrip(":") for word in words] == [f"half.jsonl:{line}" for line in (2, 3, 4, 5)]
    for word, part in zip(words, ["JSON", "known kinds", "no user's", "placeholder"], strict=True):
        assert part in word


def test_lines_that_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n{"prompt": "good"}\n')
    found = read(tmp_path / "odd.jsonl")
    assert len(found.tasks) == 1
    assert "odd.jsonl:1" in found.sources[0].left_out[0]


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of its 1 records.*bad.jsonl:1"):
        read(write(tmp_path / "bad.jsonl", "{"))
    with pytest.raises(UserError, match="is empty"):
        read(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / "missing.jsonl")


def test_the_choice_is_even_over_categories_and_fixed_by_the_seed() -> None:
    tasks = [Task(key=str(i), category="rare" if i < 5 else "common", turns=("x",)) for i in range(100)]
    chosen = sample_tasks(tasks, limit=10, seed=1)
    assert sum(task.category == "rare" for task in chosen) == 5
    assert chosen == sample_tasks(tasks, limit=10, seed=1) != sample_tasks(tasks, limit=10, seed=2)
    assert sorted(task.key for task in sample_tasks(tasks, limit=None, seed=1)) == sorted(task.key for task in tasks)


def test_the_digest_depends_on_tasks_and_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}"} for i in range(8)]
    one = read(write(tmp_path / "a.jsonl", *rows))
    moved = read(write(tmp_path / "b.jsonl", *rows))
    assert one.categories == {"a": 8}
    other = read(write(tmp_path / "a.jsonl", *rows), seed=1)
    assert one.sha256 == read(write(tmp_path / "a.jsonl", *rows)).sha256
    assert len({one.sha256, moved.sha256, other.sha256}) == 3  # another category, another order


def test_synthetic_prompts_have_their_length_and_ids_within_the_vocabulary() -> None:
    found = synthetic_workload(17, tasks=5, vocabulary=90, seed=0)
    assert [len(task.ids) for task in found.tasks] == [17] * 5
    ids = {token for task in found.tasks for token in task.ids}
    assert min(ids) >= 45
    assert max(ids) < 90
    assert found == synthetic_workload(17, tasks=5, vocabulary=90, seed=0)


def test_turns_can_be_limited(tmp_path: Path) -> None:
    (task,) = read(write(tmp_path / "a.jsonl", SPEC_BENCH), turns=1).tasks
    assert task.turns == ("Write.",)
    assert task.requests == 1
