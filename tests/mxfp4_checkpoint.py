"""A small gpt-oss with random weights, written as it is published: experts in MXFP4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from chat_tokenizer import letter_tokenizer

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 96,  # no whole number of blocks of 128
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def random_mxfp4(
    *shape: int, generator: torch.Generator, exponents: tuple[int, int] = (119, 124)
) -> tuple[Tensor, Tensor]:
    """Published bytes and exponents of matrices [..., K]."""
    pairs = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8)
    return pairs, torch.randint(*exponents, pairs.shape[:-1], generator=generator, dtype=torch.uint8)


def write_mxfp4(folder: Path, dtype: str = "bfloat16", **changes: Any) -> dict[str, Tensor]:
    """Write a checkpoint and return its tensors; `changes` modify its config."""
    torch.manual_seed(0)
    config = GptOssConfig(**{**CONFIG, **changes})
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, weight in GptOssForCausalLM(config).state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [E, inputs, outputs]
            pairs, scales = random_mxfp4(*weight.mT.shape, generator=generator)
            tensors |= {f"{name}_blocks": pairs, f"{name}_scales": scales}
        else:
            drawn = torch.randn(weight.shape, generator=generator) * (0.1 if weight.ndim > 1 else 0.3)
            tensors[name] = (drawn + (1 if "norm" in name else 0)).to(getattr(torch, dtype))
    save_mxfp4(folder, tensors, {**config.to_dict(), "dtype": dtype})
    return tensors


def save_mxfp4(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write tensors, config and a tokenizer."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    said = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    config = {"quantization_config": said, **config, "architectures": ["GptOssForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    letter_tokenizer().save_pretrained(folder)
