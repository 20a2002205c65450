"""Random targets and drafters, made on the device; speed does not depend on the weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layouts import LAYOUTS
from eyas.drafter.model import Drafter
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.quantise import quantise_on_gpu

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny-experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
"""Shapes, Llamas unless said otherwise."""
LONGEST = 8192
"""Default context length, for which rotary embeddings need no scaling."""


def rope_parameters(longest: int) -> dict[str, Any]:
    """Rotary parameters; longer contexts are scaled as in Llama 3.1."""
    if longest <= LONGEST:
        return {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LONGEST,
    }


def target_config(shape: str, longest: int = LONGEST) -> Any:
    """Configuration of this shape for contexts of this length."""
    sizes = {"model_type": "llama", **SHAPES[shape]}
    config = AutoConfig.for_model(
        **sizes,
        max_position_embeddings=longest,
        rope_parameters=rope_parameters(longest),
        tie_word_embeddings=shape not in ("8b", "30b-a3b"),
        bos_token_id=0,
        eos_token_id=1,
    )
    config.architectures = ["Qwen3MoeForCausalLM" if sizes["model_type"] == "qwen3_moe" else "LlamaForCausalLM"]
    return config


def random_target(
    shape: str, dtype: torch.dtype, device: torch.device, longest: int = LONGEST, *, quantization: str = "none"
) -> Target:
    """A random model of this shape, optionally quantised as by `--quantization` on a GPU."""
    with device:
        model: Any = AutoModelForCausalLM.from_config(target_config(shape, longest), dtype=dtype)
    model = model.eval().requires_grad_(False)
    if quantization != "none":
        quantise_on_gpu(model, quantization, shape)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "x" * len(ids))
    return Target(facts=facts_of(model.config, shape), model=model, tokenizer=tokenizer, quantization=quantization)


def drafter_config(shape: str, aux_layer_ids: tuple[int, ...], longest: int = LONGEST) -> DrafterConfig:
    """One layer of the target's shape, with its rotary embedding."""
    sizes = SHAPES[shape]
    return DrafterConfig(
        vocab_size=sizes["vocab_size"],
        draft_vocab_size=min(32000, sizes["vocab_size"]),
        hidden_size=sizes["hidden_size"],
        target_hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        aux_layer_ids=aux_layer_ids,
        max_position_embeddings=longest,
        rope_parameters=rope_parameters(longest),
        fc_norm=True,
        norm_output=True,
    )


def random_drafter(shape: str, target: Target) -> Drafter:
    """An EAGLE-3.1 drafter for a random target."""
    longest = target.facts.max_position_embeddings or LONGEST
    config = drafter_config(shape, target.facts.default_aux_layer_ids(), longest)
    with target.device:
        drafter = Drafter(config, own_head=True).to(target.device, target.dtype).eval().requires_grad_(False)
    return drafter.share_target(target.embedding(), target.head())


def write_configs(
    shape: str, aux_layer_ids: tuple[int, ...], dtype: str, folder: Path, longest: int = LONGEST
) -> tuple[Path, Path]:
    """Folders of target and drafter for vLLM, which makes random weights itself: config.json only."""
    target, drafter = folder / f"{shape}-target", folder / f"{shape}-drafter"
    own = target_config(shape, longest).to_dict() | {"dtype": dtype, "torch_dtype": dtype}
    small = LAYOUTS["vllm"].write_config(drafter_config(shape, aux_layer_ids, longest), {})
    for place, config in ((target, own), (drafter, {**small, "dtype": dtype, "torch_dtype": dtype})):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(config))
    return target, drafter
