"""Experts of a GGUF file: one tensor per layer and projection; checkpoints have one per expert.

transformers has two tensors per layer, with gate and up in one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from eyas.kernels.linear.packed_linear import LinearKernel
from eyas.kernels.linear.quantised_linear import QuantisedKernel, QuantisedLinear
from eyas.kernels.llama.packed_experts import PackedExperts
from eyas.target.gguf_blocks import blocks_of, is_packable
from eyas.target.gguf_file import GgufFile

_WIDTH = "expert_feed_forward_length"
EXPERT_KEYS = frozenset({_WIDTH})
_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def expert_settings(source: GgufFile, rope: dict[str, object]) -> dict[str, object]:
    """The settings of `Qwen3MoeConfig` that no other architecture has.

    GGUF does not say whether the chosen experts' weights are normalised: in llama.cpp they always are.
    """
    return {
        "rope_parameters": rope,
        "num_experts": source.required("qwen3moe.expert_count", int),
        "num_experts_per_tok": source.required("qwen3moe.expert_used_count", int),
        "moe_intermediate_size": source.required(f"qwen3moe.{_WIDTH}", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def published_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors as in published checkpoints: expert by expert."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        if not owner.endswith(".experts"):
            shapes[name] = tuple(tensor.shape)
            continue
        count, outputs, inputs = tensor.shape
        parts = _JOINED[last]
        for expert in range(count):
            shapes |= {f"{owner}.{expert}.{part}.weight": (outputs // len(parts), inputs) for part in parts}
    return shapes


def stay_packed(source: GgufFile, tensors: Mapping[str, str]) -> bool:
    """Whether the experts of a layer, with these tensors in the file, have integer products."""
    return all(is_packable(source.kind(tensor)) for tensor in tensors.values())


def quantised_experts(
    experts: Any, source: GgufFile, tensors: Mapping[str, str], kernel: QuantisedKernel, router: LinearKernel | None
) -> PackedExperts:
    """The experts of a layer over the file's own weights; `router` multiplies the router."""

    def product(expert: int, parts: tuple[str, ...]) -> QuantisedLinear:
        matrices = [(source.packed(tensors[part])[expert], tensors[part]) for part in parts]
        return QuantisedLinear.join(
            [
                QuantisedLinear.of(kernel, blocks_of(rows, source.kind(name), source.shapes[name][-1]))
                for rows, name in matrices
            ]
        )

    count = source.shapes[tensors["down_proj"]][0]
    gate_up, down = ([product(expert, parts) for expert in range(count)] for parts in _JOINED.values())
    return PackedExperts(experts, gate_up, down, router)


def dense_experts(source: GgufFile, tensors: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The experts dequantised as transformers keeps them: rounded to bfloat16, in float32."""
    return {
        joined: torch.cat([torch.from_numpy(source.tensor(tensors[part])) for part in parts], dim=1).bfloat16().float()
        for joined, parts in _JOINED.items()
    }
