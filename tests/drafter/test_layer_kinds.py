"""Drafters with layers of Qwen3 and DeepSeek: what is read, written and refused."""

from pathlib import Path
from typing import Any

import pytest

from drafter_folders import config_of, contents, edit
from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import checkpoint_of, read_checkpoint, write_checkpoint
from eyas.drafter.quantise import quantised
from eyas.errors import UserError
from tiny import drafter_config, latent_drafter_config, random_drafter

V31 = {"fc_norm": True, "norm_output": True}


def save(folder: Path, layout: str = "vllm", **changes: Any) -> Path:
    write_checkpoint(checkpoint_of(random_drafter(drafter_config(**changes))), folder, layout=layout)
    return folder


@each("layers", [1, 2])
def test_qwen3_layers_survive_speculators(tmp_path: Path, layers: int) -> None:
    first = save(tmp_path / "first", qk_norm=True, num_hidden_layers=layers, **V31)
    write_checkpoint(read_checkpoint(str(first)), tmp_path / "there", layout="speculators")
    write_checkpoint(read_checkpoint(str(tmp_path / "there")), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(first)
    assert config_of(first)["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert config_of(first)["model_type"] == "qwen3"
    assert config_of(tmp_path / "there")["transformer_layer_config"]["model_type"] == "qwen3"
    report = check(str(first))
    assert (report.ok, report.layers, report.findings) == (True, "qwen3", ())


def test_qwen3_layers_are_not_written_for_sglang(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has qwen3 layers, and SGLang's .* use --to vllm"):
        save(tmp_path / "drafter", "sglang", qk_norm=True)
    assert not (tmp_path / "drafter").exists()


def test_norms_beside_llamas_architecture_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", qk_norm=True)
    edit(folder, architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    with pytest.raises(UserError, match=r"_norm.weight \[32\] is not part of this drafter; .*Eagle3Qwen3ForCausalLM"):
        read_checkpoint(str(folder))


def test_norms_that_are_missing_are_an_error(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter")
    edit(folder, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    with pytest.raises(UserError, match=r"_norm.weight is missing"):
        read_checkpoint(str(folder))


def test_an_absent_head_dim_has_transformers_default(tmp_path: Path) -> None:
    folder = edit(save(tmp_path / "drafter", qk_norm=True, head_dim=128), drop=("head_dim",))
    assert read_checkpoint(str(folder)).config.head_dim == 128


def test_an_architecture_beside_layers_of_another_type_is_refused(tmp_path: Path) -> None:
    folder = edit(save(tmp_path / "drafter", qk_norm=True), model_type="llama")
    with pytest.raises(UserError, match=r"model_type 'llama' beside architectures .* layers are of qwen3"):
        read_checkpoint(str(folder))


@each("bias", ["attention_bias", "mlp_bias"])
def test_qwen3_layers_with_biases_are_refused(bias: str) -> None:
    with pytest.raises(UserError, match=f"{bias} .* beside qk_norm"):
        drafter_config(qk_norm=True, **{bias: True})


# --- latent attention --------------------------------------------------------------------------------------------

SMALL = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def save_latent(folder: Path, layout: str = "vllm", *, mla: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = latent_drafter_config(mla={**SMALL, **(mla or {})}, **changes)
    write_checkpoint(checkpoint_of(random_drafter(config)), folder, layout=layout)
    return folder


@each(
    "changes",
    [V31, {"num_hidden_layers": 2}, {"mla": {"q_lora_rank": None}}, {"rope_parameters": YARN, "draft_vocab_size": 32}],
)
def test_latent_drafters_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = save_latent(tmp_path / "first", **changes)
    read = read_checkpoint(str(first))
    write_checkpoint(read, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(first)
    assert read.config == latent_drafter_config(**{**changes, "mla": {**SMALL, **changes.get("mla", {})}})
    assert config_of(first)["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config_of(first)["model_type"] == "deepseek_v2"
    report = check(str(first))
    warned = ["q_lora_rank is null"] if "mla" in changes else []
    assert (report.ok, report.layers) == (True, "deepseek_v2")
    assert [one.message[:19] for one in report.findings] == warned
    # Latent and rotated key as the key, and the latent as the value, in float32.
    layers = changes.get("num_hidden_layers", 1)
    assert report.kv_bytes_per_token == layers * (24 + 8 + 24) * 4


def test_latent_drafters_survive_sglang(tmp_path: Path) -> None:
    first = save_latent(tmp_path / "first", **V31)
    write_checkpoint(read_checkpoint(str(first)), tmp_path / "there", layout="sglang")
    write_checkpoint(read_checkpoint(str(tmp_path / "there")), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(first)


@each(
    ("layout", "changes", "message"),
    [
        ("speculators", {}, "has deepseek_v2 layers, and speculators' .* use --to vllm"),
        ("sglang", {"num_hidden_layers": 2}, "has 2 layers, and SGLang's latent-attention drafters have one"),
        ("sglang", {"mla": {"q_lora_rank": None}}, "q_lora_rank is null"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual is true and SGLang cannot"),
    ],
)
def test_formats_refuse_what_their_servers_do_not_run(
    tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        save_latent(tmp_path / "drafter", layout, **changes)


def test_published_configs_of_large_targets_are_read(tmp_path: Path) -> None:
    folder = save_latent(tmp_path / "drafter", **V31)
    experts = {"n_routed_experts": 384, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    edit(folder, architectures=["Eagle3DeepseekV3ForCausalLM"], model_type="kimi_k2", qk_head_dim=20, **experts)
    read = read_checkpoint(str(folder))
    assert read.config == latent_drafter_config(mla=SMALL, **V31)
    assert experts.items() <= read.extras.items()


@each(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"index_topk": 2048}, "attends to chosen tokens only, as DeepSeek V3.2 does"),
        ({"rope_interleave": False}, "turn neighbours as a pair"),
        ({"head_dim": 21}, "head_dim is 21 beside qk_nope_head_dim 12"),
        ({"norm_before_fc": True}, "norm_before_fc is true beside latent attention"),
        ({"attention_bias": True}, "attention_bias is true beside latent attention"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1 beside latent attention"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"v_head_dim": 0}, "v_head_dim is 0; it must be a whole number"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "takes every scaling for yarn",
        ),
        ({"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale"}}, "one of mscale and mscale_all_dim"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "has attention_factor beside latent attention"),
    ],
)
def test_what_servers_do_not_compute_alike_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = edit(save_latent(tmp_path / "drafter"), **changes)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(str(folder))
    assert "\n" not in str(caught.value)


def test_latent_tensors_beside_another_architecture_are_an_error(tmp_path: Path) -> None:
    folder = save_latent(tmp_path / "drafter")
    llama: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    edit(folder, drop=(*SMALL, "rope_interleave", "head_dim"), **llama)
    report = check(str(folder))
    assert not report.ok
    assert any("latent attention is DeepSeek's" in one.message for one in report.findings)


def test_a_model_type_that_vllm_misreads_is_a_warning(tmp_path: Path) -> None:
    report = check(str(edit(save_latent(tmp_path / "drafter"), model_type="deepseek_v3")))
    assert report.ok
    assert [one.severity for one in report.findings] == ["warning"]
    assert "vLLM 0.32 takes the drafter for multi-token prediction" in report.findings[0].message


def test_a_latent_drafter_is_not_quantised(tmp_path: Path) -> None:
    read = read_checkpoint(str(save_latent(tmp_path / "drafter")))
    with pytest.raises(UserError, match="no server was tried with such a drafter in 8 bits"):
        quantised(read, "int8", "it")
