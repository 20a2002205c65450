"""EAGLE-1 drafters as published: a config.json of a one-layer Llama, and a pytorch_model.bin."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import checkpoint_of
from eyas.drafter.model import Drafter


def published_config(drafter: Drafter, **changes: Any) -> dict[str, Any]:
    """config.json with the keys of published drafters, which omit head_dim where it follows."""
    config = drafter.config
    shared = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "vocab_size")
    shared += ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, key) for key in shared},
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
        "transformers_version": "4.28.1",
        "use_cache": True,
        **changes,
    }


def published_tensors(drafter: Drafter, embedding_VD: Tensor) -> dict[str, Tensor]:
    """Published tensors include a copy of the target's embeddings."""
    return {**checkpoint_of(drafter).tensors, "embed_tokens.weight": embedding_VD.detach().clone()}


def publish(drafter: Drafter, embedding_VD: Tensor, folder: Path, **changes: Any) -> Path:
    """Write both files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published_config(drafter, **changes)))
    torch.save(published_tensors(drafter, embedding_VD), folder / "pytorch_model.bin")
    return folder
