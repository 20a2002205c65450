"""`eyas data check` prints tables or JSON, writes a picture, and fails where training would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.default

Run = Callable[..., Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"instruction": f"Say {i}", "input": "", "output": f"{i}"} for i in range(9)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{")
    return path


def test_tables_json_and_a_picture(file: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "Say 3"}\n')
    shown = run("data", "check", file, "--eval", tmp_path / "eval.jsonl", "--out", tmp_path / "out")
    assert shown.code == 0, shown.err
    for words in ("not JSON", "trained on", "draft vocabulary", "word for word", "data.jsonl:10"):
        assert words in shown.out, words
    record = json.loads((tmp_path / "out" / "check.json").read_text())
    assert (record["kept"], record["overlap"]["files"][0]["exact"]) == (9, 1)
    assert (tmp_path / "out" / "check.png").exists()


def test_a_recipe_says_what_to_check_and_code_1_that_training_would_refuse_it(
    file: Path, run: Run, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[data]\nfiles = ["{file}"]\nmax_bad_share = 0\nmax_length = 99\n[output]\nfolder = "{tmp_path}/run"\n'
    )
    shown = run("data", "check", "--recipe", recipe, "--json")
    assert shown.code == 1
    assert "training would refuse this: 1 of 10 records are bad" in shown.err
    record = json.loads(shown.out)
    assert (record["kept"], record["max_length"]) == (9, 99)
    run("data", "check").assert_refused("give files of conversations or --recipe")
    run("data", "check", file, "--recipe", recipe).assert_refused("one of the two")
