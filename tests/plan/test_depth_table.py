"""Depths by batch size, as vLLM takes them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.errors import UserError
from eyas.plan.depth_table import checked_table, read_depths

if TYPE_CHECKING:
    from pathlib import Path


def table_of(*arguments: str, out: Path) -> list[list[int]]:
    done = CliRunner().invoke(app, ["plan", "smollm2", *arguments, "--out", str(out)])
    assert done.exit_code in (0, 1), done.output
    assert read_depths(out) == tuple(map(tuple, json.loads(out.read_text())["depths"]))
    return json.loads(out.read_text())["depths"]


def test_it_covers_every_batch_size_once(tmp_path: Path) -> None:
    table = table_of("--gpu", "rtx4090", "--users", "300", out=tmp_path / "plan.json")
    assert table[0][0] == 1
    assert table[-1][1] == 300
    assert all(one[1] + 1 == other[0] and one[2] != other[2] for one, other in pairwise(table))


def test_a_drafter_that_is_never_right_is_not_asked(tmp_path: Path) -> None:
    table = table_of("--gpu", "rtx4090", "--users", "8", "--acceptance", "0.01", out=tmp_path / "plan.json")
    assert table == [[1, 8, 0]]


def test_full_batches_are_drafted_less_deep_than_single_requests(tmp_path: Path) -> None:
    device = ("--gpu", "mine", "--memory", "80", "--bandwidth", "3000", "--tflops", "20")
    table = table_of(*device, "--users", "512", "--context", "512", out=tmp_path / "plan.json")
    assert table[0][2] > table[-1][2]


@each("table", [[], [[2, 4, 1]], [[1, 4, 1], [6, 8, 1]], [[1, 0, 1]], [[1, 4, -1]], [[1, 4]], "x"])
def test_a_table_with_gaps_or_other_things_is_refused(table: Any) -> None:
    with pytest.raises(UserError, match="--depths"):
        checked_table(table, "--depths")


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "no JSON"), ("c", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="eyas plan --out"):
            read_depths(tmp_path / name)
