"""Weights counted from config.json are those that transformers builds, for every architecture."""

from __future__ import annotations

import pytest

from each import each
from eyas.errors import UserError
from eyas.plan.decoder import read_decoder
from eyas.plan.families import FAMILIES
from known_configs import LLAMA_8B, QWEN3_30B_A3B

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "pad_token_id": 0,
}
LATENT = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SPARSE = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    | {"use_qk_norm": True, "attention_bias": True},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1}
    | {"intermediate_size_mlp": 160, "interleave_moe_layer_step": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
}
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Names of which transformers knows the model by another."""


def small(kind: str, **changes: object) -> dict[str, object]:
    experts = {**EXPERTS, **SPARSE[kind]} if kind in SPARSE else {}
    return {"model_type": kind, **SMALL, **experts, **changes}


def test_llama_3_1_8b_by_hand() -> None:
    decoder = read_decoder(LLAMA_8B, "llama")
    assert decoder.parameters == decoder.active_parameters == 8_030_261_248
    assert decoder.kv_width_on(1) * len(decoder.layers) * 2 == 131_072, "128 KiB a token in 16 bits"


def test_qwen3_30b_a3b_by_hand() -> None:
    decoder = read_decoder(QWEN3_30B_A3B, "qwen")
    assert decoder.parameters == 30_532_122_624
    assert decoder.active_parameters == 3_353_032_704
    assert decoder.kv_width_on(1) * len(decoder.layers) * 2 == 98_304


@each("kind", FAMILIES)
@each("tied", [True, False])
def test_every_architecture_counts_as_transformers_builds_it(kind: str, tied: bool) -> None:
    config = small(kind, tie_word_embeddings=tied)
    assert read_decoder(config, kind).parameters == built_parameters(config)


@each("kind", ["llama", "qwen3", "qwen3_moe", "gemma", "deepseek_v3", "glm4_moe"])
def test_biases_are_counted(kind: str) -> None:
    config = small(kind, attention_bias=True, mlp_bias=True)
    assert read_decoder(config, kind).parameters == built_parameters(config)


def test_latents_without_query_compression_and_glm_without_norms_are_counted() -> None:
    for config in (
        small("deepseek_v2", q_lora_rank=None),
        small("deepseek_v3", q_lora_rank=None),
        small("glm4_moe", use_qk_norm=False, attention_bias=False),
    ):
        assert read_decoder(config, "c").parameters == built_parameters(config)


def built_parameters(config: dict[str, object]) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(config["model_type"])
    made = AutoConfig.for_model(**{**config, "model_type": SAME_AS.get(kind, kind)})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def test_read_experts_grow_with_tokens_up_to_all() -> None:
    layer = read_decoder(QWEN3_30B_A3B, "qwen").layers[0]
    reads = [layer.read(tokens) for tokens in (1, 2, 8, 64, 4096)]
    assert reads[0] == pytest.approx(layer.used)
    assert reads == sorted(reads)
    assert reads[-1] == pytest.approx(layer.matrices)


def test_windows() -> None:
    sliding = {"sliding_window": 8}
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    slides = {**sliding, "use_sliding_window": True, "max_window_layers": 3}
    for kind, changes, expected in (
        ("mistral", sliding, [8] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("gemma2", sliding, [8, None, 8, None]),
        ("gpt_oss", sliding, [8, None, 8, None]),
        ("gemma3_text", {**sliding, "num_hidden_layers": 7}, [8, 8, 8, 8, 8, None, 8]),
        ("gemma3_text", {**sliding, "layer_types": kinds}, [None, 8, None, None]),
        ("qwen2", slides, [None, None, None, 8]),
        ("qwen2", sliding, [None] * 4),
    ):
        decoder = read_decoder(small(kind, **changes), kind)
        assert [layer.window for layer in decoder.layers] == expected, (kind, changes)


def test_only_the_text_model_is_counted() -> None:
    decoder = read_decoder({"model_type": "gemma3", "text_config": small("gemma3_text")}, "gemma")
    assert decoder.parameters == read_decoder(small("gemma3_text"), "gemma").parameters
    assert "only the text model" in decoder.note


@each(
    ("config", "said"),
    [
        ({"model_type": "mamba2"}, "mamba2.*known are llama"),
        ({}, "None.*known are llama"),
        (small("llama", hidden_size=None), "hidden_size.*None.*whole number"),
        (small("llama", vocab_size="many"), "vocab_size.*'many'"),
        (small("qwen3_moe", num_experts=0), "num_experts.*0"),
        (small("llama", num_hidden_layers=True), "num_hidden_layers.*True"),
    ],
)
def test_unknown_architectures_and_bad_sizes_are_refused(config: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_decoder(config, "some/model")
