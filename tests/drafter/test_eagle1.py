"""EAGLE-1 and EAGLE-2 drafters: read as published, written for servers, equal to Llama's layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafter_folders import config_of
from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import (
    build_drafter,
    checkpoint_of,
    is_explicit,
    read_checkpoint,
    vllm_folder,
    write_checkpoint,
)
from eyas.drafter.config import DrafterConfig
from eyas.drafter.cost import flops_per_token, matrix_sizes, remembering_weights
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.layouts import LAYOUTS
from eyas.drafter.model import Drafter
from eyas.drafter.quantise import quantised
from eyas.errors import UserError
from eyas.plan.resolve import drafter_shape
from eyas.target.facts import facts_of
from oracle.dense import DenseAttention
from published_eagle1 import publish, published_config
from tiny import HIDDEN, LAYERS, VOCAB, drafter_config, eagle1_config, random_drafter, target_config

EMBEDDING_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


def drafter_of(**changes: Any) -> Drafter:
    return random_drafter(eagle1_config(**changes), own_embedding=False)


def save(folder: Path, layout: str = "vllm", **changes: Any) -> Path:
    write_checkpoint(checkpoint_of(drafter_of(**changes)), folder, layout=layout)
    return folder


def store(folder: Path, changes: dict[str, Any], tensors: dict[str, Tensor | None]) -> Path:
    """Write a published drafter with changed keys of config.json, and tensors replaced or (None) left out."""
    drafter = drafter_of()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config(drafter, **changes)))
    stored = {**checkpoint_of(drafter).tensors, **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / "model.safetensors")
    return folder


# --- what it computes ---


@each("changes", [{}, {"fc_bias": True}, {"num_hidden_layers": 2, "attention_bias": True}])
@torch.no_grad()
def test_a_depth_equals_fc_and_llamas_layers_without_the_first_norm(changes: dict[str, Any]) -> None:
    drafter = drafter_of(**changes)
    llama = target_config(attention_bias=drafter.config.attention_bias)
    llama._attn_implementation = "eager"
    norm = LlamaRMSNorm(HIDDEN, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    head_VD = torch.randn(VOCAB, HIDDEN)
    drafter.share_target(EMBEDDING_VD, head_VD, norm)
    state_TD, token_T, position_T = torch.randn(7, HIDDEN), torch.randint(VOCAB, (7,)), torch.arange(7)

    weights, hidden = drafter.state_dict(), norm(state_TD)
    x = torch.cat([EMBEDDING_VD[token_T], hidden], dim=-1) @ weights["fc.weight"].T
    x = (x + weights["fc.bias"] if drafter.config.fc_bias else x)[None]
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    for index in range(drafter.config.num_hidden_layers):
        layer = LlamaDecoderLayer(llama, index)
        if index == 0:
            layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        own = {name: t for name, t in weights.items() if name.startswith(f"layers.{index}.")}
        layer.load_state_dict({name.removeprefix(f"layers.{index}."): t for name, t in own.items()})
        turns = LlamaRotaryEmbedding(llama)(x, position_T[None])
        x = layer(x, attention_mask=causal, position_embeddings=turns)

    output = drafter.step(drafter.fuse(state_TD), token_T, position_T, DenseAttention())
    torch.testing.assert_close(output.feedback, x[0], rtol=1e-5, atol=1e-5)
    assert output.normed is output.feedback
    torch.testing.assert_close(drafter.logits(output.normed), x[0] @ head_VD.T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_remember_returns_the_keys_and_values_of_step() -> None:
    drafter = drafter_of(fc_bias=True).share_target(EMBEDDING_VD, EMBEDDING_VD, nn.Identity())
    hidden_TD, token_T, position_T, attend = torch.randn(5, HIDDEN), torch.arange(5), torch.arange(5), DenseAttention()
    drafter.step(hidden_TD, token_T, position_T, attend)
    for remembered, left in zip(drafter.remember(hidden_TD, token_T, position_T), attend.present[0], strict=True):
        torch.testing.assert_close(remembered, left)


def test_the_targets_norm_is_a_copy_that_follows_the_drafter_and_is_never_saved(tmp_path: Path) -> None:
    norm = LlamaRMSNorm(HIDDEN)
    drafter = drafter_of().share_target(EMBEDDING_VD, EMBEDDING_VD, norm).bfloat16()
    assert norm.weight.dtype == torch.float32
    assert drafter.fuse(torch.randn(2, HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not [name for name in checkpoint_of(drafter).tensors if "target_norm" in name]


def test_eagle1_does_not_run_without_the_targets_norm() -> None:
    with pytest.raises(UserError, match="load it together with its target"):
        drafter_of().fuse(torch.zeros(1, HIDDEN))
    with pytest.raises(UserError, match="after the target's last norm, and that norm was not found"):
        drafter_of().share_target(EMBEDDING_VD, EMBEDDING_VD)


def test_eagle1_reads_the_targets_last_state() -> None:
    assert eagle1_config().layers_read(facts_of(target_config(), "tiny")) == (LAYERS,)


# --- reading and writing ---


def test_a_published_drafter_is_read_and_written_as_vllm_loads_it(tmp_path: Path) -> None:
    drafter = drafter_of()
    folder = publish(drafter, EMBEDDING_VD, tmp_path / "published")
    read = read_checkpoint(str(folder))
    assert read.config == drafter.config
    write_checkpoint(read, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    written = config_of(tmp_path / "out")
    assert written["architectures"] == ["EagleLlamaForCausalLM"]
    assert written["model_type"] == "llama"
    assert written["bias"] is False
    assert not {"fc_norm", "norm_output", "num_aux_hidden_states", "draft_vocab_size"} & written.keys()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = {**checkpoint_of(drafter).tensors, "embed_tokens.weight": EMBEDDING_VD}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert {
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    } <= stored.keys()
    report = check(str(tmp_path / "out"), target=facts_of(target_config(), "tiny"))
    assert (report.ok, report.family, report.findings) == (True, "EAGLE-1/2", ())


@each("bias", [False, True])
@each("layout", ["vllm", "sglang"])
def test_eagle1_round_trips_are_exact(tmp_path: Path, layout: str, bias: bool) -> None:
    if bias and layout == "vllm":
        with pytest.raises(UserError, match="has a bias, and vLLM's has none"):
            save(tmp_path / "first", layout, fc_bias=True)
        return
    first = save(tmp_path / "first", layout, fc_bias=bias, num_hidden_layers=2)
    read = read_checkpoint(str(first))
    assert read.config == eagle1_config(fc_bias=bias, num_hidden_layers=2)
    assert read.layout == layout
    assert read.tensors.keys() == checkpoint_of(drafter_of(fc_bias=bias, num_hidden_layers=2)).tensors.keys()
    write_checkpoint(read, tmp_path / "again", layout=layout)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (first / name).read_bytes()


def test_sglang_gets_a_bias_tensor_and_no_bias_key(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", "sglang")
    assert config_of(folder)["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in config_of(folder)
    assert not load_file(folder / "model.safetensors")["fc.bias"].any()


def test_speculators_format_refuses_eagle1(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is EAGLE-1, which vLLM does not read .* use --to vllm"):
        save(tmp_path / "drafter", "speculators")
    with pytest.raises(
        UserError, match=r"'eagle'; eyas and vLLM read 'eagle3' .* EAGLE-1 drafter that it was converted"
    ):
        LAYOUTS["speculators"].read_config({"speculators_model_type": "eagle"})


def test_tensors_decide_about_the_fc_bias_if_the_config_does_not(tmp_path: Path) -> None:
    drafter = drafter_of(fc_bias=True)
    assert read_checkpoint(str(publish(drafter, EMBEDDING_VD, tmp_path / "with"))).config.fc_bias
    drafter.fc.bias.zero_()
    zeros = read_checkpoint(str(publish(drafter, EMBEDDING_VD, tmp_path / "zeros", bias=True)))
    assert not zeros.config.fc_bias
    assert "fc.bias" not in zeros.tensors


def test_the_drafter_of_mixtral_has_layers_of_llama(tmp_path: Path) -> None:
    folder = publish(drafter_of(), EMBEDDING_VD, tmp_path / "drafter", model_type="mixtral", max_sequence_length=2048)
    read = read_checkpoint(str(folder))
    assert read.config == eagle1_config()
    write_checkpoint(read, tmp_path / "out")
    assert config_of(tmp_path / "out")["model_type"] == "llama"


def test_vllm_is_given_a_copy_in_safetensors(tmp_path: Path) -> None:
    source = str(publish(drafter_of(), EMBEDDING_VD, tmp_path / "published"))
    folder = vllm_folder(source, tmp_path / "cache")
    assert folder == vllm_folder(source, tmp_path / "cache")
    assert is_explicit(read_checkpoint(str(folder)))
    assert vllm_folder(str(folder), tmp_path / "cache") == folder


# --- what is found and refused ---


@each(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "EAGLE-1 drafter with layers of Qwen2, whose queries, keys and values have biases",
        ),
        ({"architectures": ["EagleMiniCPMForCausalLM"]}, "with layers of MiniCPM; eyas runs EAGLE-1 drafters with"),
        ({"architectures": ["EagleNewForCausalLM"]}, "EAGLE-1 drafter with layers of another model"),
        ({"architectures": ["MixtralForCausalLM"]}, "EAGLE-1 drafter with a mixture of experts"),
        ({"model_type": "qwen2"}, "model_type 'qwen2'; eyas runs EAGLE-1 drafters with layers of Llama"),
        ({"model_type": "eagle"}, "vLLM's old wrapping of an EAGLE-1 drafter"),
        ({"qkv_bias": True}, "qkv_bias is true: queries, keys and values have biases, as Qwen2's have"),
        ({"num_local_experts": 8}, "num_local_experts is 8: an EAGLE-1 drafter with a mixture of experts"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "EAGLE-1 drafters that are not quantised"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "is it an EAGLE-3 drafter"),
        ({"norm_output": True}, "norm_output is true, and an EAGLE-1 drafter has no such norm"),
        ({"fc_norm": True}, "fc_norm is true, and an EAGLE-1 drafter has no such norm"),
        ({"draft_vocab_size": 32}, "an EAGLE-1 drafter uses the target's whole head"),
        ({"target_hidden_size": 128}, "is as wide as its target"),
        ({"bias": "yes"}, "bias is 'yes'; it must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_norm": True}, "unknown key 'layer_norm'"),
    ],
)
def test_drafters_of_another_kind_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = store(tmp_path / "drafter", changes, {})
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(str(folder))
    assert "\n" not in str(caught.value)


@each(
    ("changes", "tensors", "message"),
    [
        ({}, {"fc.weight": None}, r"fc.weight is missing \(expected \[64, 128\]\); .* is this path the target"),
        ({}, {"fc.weight": torch.zeros(64, 192)}, r"fc.weight is \[64, 192\], expected \[64, 128\]"),
        ({"bias": True}, {}, "fc.bias is missing .* config.json says bias is true"),
        ({"bias": False}, {"fc.bias": torch.ones(64)}, "fc.bias .* config.json says bias is false"),
        ({"bias": True}, {"fc.bias": torch.ones(32)}, r"fc.bias is \[32\], expected \[64\]"),
        ({}, {"lm_head.weight": torch.zeros(VOCAB, 64)}, "lm_head.weight .* uses the target's head"),
        ({}, {"norm.weight": torch.ones(64)}, "an EAGLE-1 drafter has no norm there"),
        ({}, {"layers.0.input_layernorm.weight": torch.ones(64)}, "an EAGLE-1 drafter has no norm there"),
        ({}, {"layers.0.self_attn.q_proj.bias": torch.ones(64)}, "as Qwen2's have, eyas and vLLM do not run it"),
        ({}, {"layers.0.mlp.up_proj.bias": torch.ones(128)}, "vLLM would leave it out without a word"),
        ({}, {"layers.0.mlp.down_proj.weight": None}, "down_proj.weight is missing"),
        ({}, {"layers.0.block_sparse_moe.gate.weight": torch.ones(8, 64)}, "not with experts"),
        ({}, {"model.norm.weight": torch.ones(64)}, "is this path the target instead of its drafter"),
        ({}, {"layers.0.self_attn.q_proj.weight": torch.ones(64, 128)}, r"is \[64, 128\], expected \[64, 64\]"),
    ],
)
def test_broken_eagle1_tensors_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Tensor | None], message: str
) -> None:
    report = check(str(store(tmp_path / "drafter", changes, tensors)))
    assert not report.ok
    with pytest.raises(UserError, match=message):
        read_checkpoint(str(tmp_path / "drafter"))


@each("name", ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_a_drafter_of_another_target_is_found(tmp_path: Path, name: str) -> None:
    folder = store(tmp_path / "drafter", {"architectures": [name]}, {})
    report = check(str(folder), target=facts_of(target_config(hidden_size=128), "wide"))
    assert [one.message[:25] for one in report.findings if one.severity == "error"] == ["target_hidden_size 64 is "]


def test_check_reports_what_servers_misread(tmp_path: Path) -> None:
    biased = publish(drafter_of(fc_bias=True), EMBEDDING_VD, tmp_path / "biased", bias=True)
    (finding,) = check(str(biased)).findings
    assert finding.severity == "warning"
    assert "vLLM 0.32 leaves it out without a word" in finding.message
    (finding,) = check(str(publish(drafter_of(), EMBEDDING_VD, tmp_path / "plain"))).findings
    assert finding.severity == "note"
    assert "as of a target" in finding.message


@each(
    "changes",
    [{"qk_norm": True}, {"num_aux_hidden_states": 3}, {"aux_layer_ids": (4,)}, {"norm_before_fc": True}],
)
def test_eagle3_features_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="EAGLE-1 drafter"):
        eagle1_config(**changes)
    with pytest.raises(UserError, match="which EAGLE-3 drafters have not"):
        drafter_config(fc_bias=True)


def test_eagle1_is_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no server was tried with such a one in 8 bits"):
        quantised(read_checkpoint(str(save(tmp_path / "drafter"))), "int8", "it")


# --- what it costs ---


@each("changes", [{}, {"fc_bias": True, "num_hidden_layers": 2}])
def test_the_table_of_tensors_is_what_the_module_has(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = eagle1_config(**changes)
    built = new_drafter(config, own_embedding=True, own_head=False)
    checkpoint = replace(checkpoint_of(random_drafter(config)), config=config)
    assert build_drafter(checkpoint).state_dict().keys() == built.state_dict().keys()


def test_fc_counts_at_every_depth() -> None:
    config = eagle1_config()
    layer = (64 + 32 + 32) * 64 + 64 * 64 + 3 * 64 * 128
    sizes = matrix_sizes(config)
    assert (sizes.fusion, sizes.every_depth, sizes.head) == (0, 64 * 128 + layer, 96 * 64)
    by_hand = 2 * (64 * 128 + layer + 96 * 64)
    assert {flops_per_token(config, context=0, with_fusion=fused) for fused in (False, True)} == {by_hand}
    assert remembering_weights(config) == 64 * 128 + (32 + 32) * 64


def test_planning_needs_the_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config(drafter_of())))
    shape = drafter_shape(str(tmp_path / "config.json"))
    assert shape.config == eagle1_config()
    assert (shape.own_embedding, shape.own_head) == (True, False)
    stored = drafter_shape(str(save(tmp_path / "stored")))
    assert (stored.own_embedding, stored.own_head) == (False, False)


def test_family_and_method_of_eagle1() -> None:
    config: DrafterConfig = eagle1_config()
    assert (config.family, config.method) == ("EAGLE-1/2", "eagle")
    assert (drafter_config().family, drafter_config().method) == ("EAGLE-3", "eagle3")
