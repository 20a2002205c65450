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
    file = out / "plan.json"
    assert read_depths(file) == tuple(map(tuple, json.loads(file.read_text())["depths"]))
    return json.loads(file.read_text())["depths"]


def test_the_table_covers_every_batch_size_once(tmp_path: Path) -> None:
    table = table_of("--gpu", "rtx4090", "--users", "300", out=tmp_path / "plan")
    assert table[0][0] == 1
    assert table[-1][1] == 300
    assert all(one[1] + 1 == other[0] and one[2] != other[2] for one, other in pairwise(table))


def test_a_useless_drafter_gets_depth_0(tmp_path: Path) -> None:
    table = table_of("--gpu", "rtx4090", "--users", "8", "--acceptance", "0.01", out=tmp_path / "plan")
    assert table == [[1, 8, 0]]


def test_full_batches_are_drafted_less_deep_than_single_requests(tmp_path: Path) -> None:
    device = ("--gpu", "mine", "--memory", "80", "--bandwidth", "3000", "--tflops", "20")
    table = table_of(*device, "--users", "512", "--context", "512", out=tmp_path / "plan")
    assert table[0][2] > table[-1][2]


@each("table", [[], [[2, 4, 1]], [[1, 4, 1], [6, 8, 1]], [[1, 0, 1]], [[1, 4, -1]], [[1, 4]], "x"])
def test_wrong_tables_are_refused(table: Any) -> None:
    with pytest.raises(UserError, match="--depths"):
        checked_table(table, "--depths")


def test_files_without_a_plan_are_refused(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "no JSON"), ("c", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match="eyas plan --out"):
            read_depths(tmp_path / name)
