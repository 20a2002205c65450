"""The folder that vLLM is given."""

from __future__ import annotations

import json
from pathlib import Path

from each import each
from eyas.drafter.checkpoint import read_checkpoint, write_checkpoint
from eyas.drafter.vllm_folder import is_explicit, vllm_folder

SHIPPED = "smollm2-eagle3.1"


def test_a_drafter_that_says_everything_is_given_as_it_is(tmp_path: Path) -> None:
    assert vllm_folder(SHIPPED, tmp_path) == read_checkpoint(SHIPPED).folder
    assert not list(tmp_path.iterdir())


@each("layout", ["speculators", "sglang"])
def test_one_of_another_layout_is_copied_once_and_says_everything(tmp_path: Path, layout: str) -> None:
    original = read_checkpoint(SHIPPED)
    write_checkpoint(original, tmp_path / "other", layout=layout)
    folder = vllm_folder(str(tmp_path / "other"), tmp_path / "cache")
    again = vllm_folder(str(tmp_path / "other"), tmp_path / "cache")
    assert folder == again
    copy = read_checkpoint(str(folder))
    assert is_explicit(copy)
    assert copy.config == original.config


def test_one_that_leaves_flags_out_is_copied(tmp_path: Path) -> None:
    write_checkpoint(read_checkpoint(SHIPPED), tmp_path / "silent")
    path = tmp_path / "silent" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    folder = vllm_folder(str(tmp_path / "silent"), tmp_path / "cache")
    assert "norm_before_residual" in json.loads((folder / "config.json").read_text())


def test_it_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    assert vllm_folder(SHIPPED, tmp_path / "cache", tmp_path / "out") == tmp_path / "out"
    assert is_explicit(read_checkpoint(str(tmp_path / "out")))
