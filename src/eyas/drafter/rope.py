"""Rotary position embedding of the drafter.

Frequencies come from transformers, which has every scaling; angles are computed for the given positions, not looked up
in a table, so no context is too long.

Shapes: K head dim; any leading dims.
"""

from collections.abc import Callable
from math import log

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.drafter.config import DrafterConfig


class Rope(nn.Module):
    """Cosines and sines of the rotation at given positions."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        # The model may be under construction on the meta device; the frequencies must be real.
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.rotary_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope_parameters),
                )
            )
        # A clone: transformers' tensor is an nn.Buffer, which would be registered here and cast with the rest.
        self._exact = rotary.inv_freq.float().clone()
        self.register_buffer("inverse_frequencies", self._exact, persistent=False)
        self.scale = float(rotary.attention_scaling)
        """Factor of cosines and sines."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        # A cast to bfloat16 must not round the frequencies: at position 4000 every angle would be noise. Only a change
        # of device is followed.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse_frequencies = self._exact.to(self.inverse_frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, K] for positions [...]; the dim of size one spans the heads."""
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, K], pairing element i with element i + K/2."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, K] with pairs (2 i, 2 i + 1); the result has the order of `rotate`.

    Scores do not depend on the order of dimensions, as long as queries and keys agree.
    """
    return rotate(x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2), cos, sin)


def yarn_scale(config: DrafterConfig) -> float:
    """Factor of DeepSeek's attention scores with yarn, beside the scale of cosines and sines."""
    rope = config.rope_parameters
    if rope["rope_type"] != "yarn" or rope["factor"] <= 1:
        return 1.0
    return float((0.1 * rope.get("mscale_all_dim", 0.0) * log(rope["factor"]) + 1.0) ** 2)
