"""Drafters whose layers are not Llama's are read, written and refused as their servers would."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.drafter.check import check
from eyas.drafter.checkpoint import checkpoint_of, read_checkpoint, write_checkpoint
from eyas.errors import UserError
from tiny import drafter_config, random_drafter

V31 = {"fc_norm": True, "norm_output": True}


def save(folder: Path, layout: str = "vllm", **changes: Any) -> Path:
    write_checkpoint(checkpoint_of(random_drafter(drafter_config(**changes))), folder, layout=layout)
    return folder


def said(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def edit(folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    raw = {key: value for key, value in said(folder).items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layers", [1, 2])
def test_qwen3_layers_come_back_from_speculators_as_they_were(tmp_path: Path, layers: int) -> None:
    first = save(tmp_path / "first", qk_norm=True, num_hidden_layers=layers, **V31)
    write_checkpoint(read_checkpoint(str(first)), tmp_path / "there", layout="speculators")
    write_checkpoint(read_checkpoint(str(tmp_path / "there")), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(first)
    assert said(first)["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert said(first)["model_type"] == "qwen3"
    assert said(tmp_path / "there")["transformer_layer_config"]["model_type"] == "qwen3"
    report = check(str(first))
    assert (report.ok, report.layers, report.findings) == (True, "qwen3", ())


def test_qwen3_layers_are_not_written_for_sglang(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has qwen3 layers, and SGLang's .* use --to vllm"):
        save(tmp_path / "drafter", "sglang", qk_norm=True)
    assert not (tmp_path / "drafter").exists()


def test_norms_that_the_architecture_does_not_have_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", qk_norm=True)
    edit(folder, architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    with pytest.raises(UserError, match=r"_norm.weight \[32\] is not part of this drafter; .*Eagle3Qwen3ForCausalLM"):
        read_checkpoint(str(folder))


def test_norms_that_are_missing_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter")
    edit(folder, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    with pytest.raises(UserError, match=r"_norm.weight is missing"):
        read_checkpoint(str(folder))


def test_an_absent_head_dim_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    folder = edit(save(tmp_path / "drafter", qk_norm=True, head_dim=128), drop=("head_dim",))
    assert read_checkpoint(str(folder)).config.head_dim == 128


def test_an_architecture_beside_layers_of_another_type_is_refused(tmp_path: Path) -> None:
    folder = edit(save(tmp_path / "drafter", qk_norm=True), model_type="llama")
    with pytest.raises(UserError, match=r"model_type 'llama' beside architectures .* layers are of qwen3"):
        read_checkpoint(str(folder))


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_qwen3_layers_with_biases_are_refused(bias: str) -> None:
    with pytest.raises(UserError, match=f"{bias} .* beside qk_norm"):
        drafter_config(qk_norm=True, **{bias: True})
