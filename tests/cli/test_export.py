"""`eyas export vllm-command`, and what `eyas serve --engine vllm` refuses before anything is started."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.drafter.checkpoint import read_checkpoint, write_checkpoint
from eyas.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = "smollm2-eagle3.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration of the default target's shape, without weights."""
    from eyas.plan.resolve import DEFAULT_CONFIG

    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(DEFAULT_CONFIG)))
    return folder


def line(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, ["export", "vllm-command", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return shlex.split(done.stdout)


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(error.value)


def config_of(words: list[str]) -> Any:
    return json.loads(words[words.index("--speculative-config") + 1])


def test_the_line_names_target_drafter_and_depth(folder: Path) -> None:
    config = json.dumps({"model": SHIPPED, "num_speculative_tokens": 2})
    words = line(str(folder), "--speculative-config", config, "--", "--tensor-parallel-size", "4")
    assert words[:3] == ["vllm", "serve", str(folder)]
    assert words[-2:] == ["--tensor-parallel-size", "4"]
    told = config_of(words)
    assert told | {"method": "eagle3", "num_speculative_tokens": 2} == told
    assert told["model"] == str(read_checkpoint(SHIPPED).folder)


def test_a_plan_gives_depths_by_batch_size(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"depths": [[1, 4, 5], [5, 64, 2]]}))
    config = json.dumps({"model": SHIPPED})
    told = config_of(line(str(folder), "--speculative-config", config, "--depths", str(tmp_path / "plan.json")))
    assert told["num_speculative_tokens"] == 5
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 64, 2]]


def test_a_plan_that_never_drafts_gives_no_drafter(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"depths": [[1, 64, 0]]}))
    config = json.dumps({"model": SHIPPED})
    words = line(str(folder), "--speculative-config", config, "--depths", str(tmp_path / "plan.json"))
    assert "--speculative-config" not in words


def test_without_a_drafter_the_line_has_none(folder: Path) -> None:
    assert "--speculative-config" not in line(str(folder), "--speculative-config", "none")


def test_a_drafter_that_vllm_would_load_silently_wrong_is_refused(folder: Path, tmp_path: Path) -> None:
    """vLLM does not miss a norm of EAGLE-3.1 that the checkpoint lacks; it drafts garbage."""
    from safetensors.torch import load_file, save_file

    write_checkpoint(read_checkpoint(SHIPPED), tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    del tensors["fc_norm.1.weight"]
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    config = json.dumps({"model": str(tmp_path / "broken"), "num_speculative_tokens": 3})
    assert "fc_norm.1.weight" in refused("export", "vllm-command", str(folder), "--speculative-config", config)


def test_a_drafter_of_another_target_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 1152}
    (folder / "config.json").write_text(json.dumps(config))
    told = json.dumps({"model": SHIPPED, "num_speculative_tokens": 3})
    assert "target_hidden_size 576" in refused("export", "vllm-command", str(folder), "--speculative-config", told)


@each(
    ("arguments", "said"),
    [
        (["--engine", "vllm"], "needs --vllm-python"),
        (["--", "--tensor-parallel-size", "2"], "is for --engine vllm"),
        (["smollm2", "second"], "behind the target"),
        (["--depths", "plan.json"], "is for --engine vllm"),
        (
            ["--speculative-config", '{"num_speculative_tokens_per_batch_size": [[1, 2, 3]]}'],
            "it goes with --engine vllm",
        ),
    ],
)
def test_what_does_not_fit_the_engine_is_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EYAS_VLLM_PYTHON", raising=False)
    assert said in refused("serve", *arguments)
