"""A quantised linear of a checkpoint, and the layer that multiplies by it.

Shapes: E outputs, K inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.kernels.linear.quantised_weight import QuantisedWeight
from eyas.kernels.linear.served_linear import GpuLinear
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear

GPU_LINEARS: list[type[GpuLinear]] = [W8A8Linear, W4A16Linear]
"""Layers that multiply by quantised weights on a GPU; a new kind is added here."""


def served_linear(
    weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype, *, quantised_inputs: bool
) -> GpuLinear | None:
    """The layer that multiplies by a weight as it is; None if there is no kernel for it."""
    for kind in GPU_LINEARS:
        if kind.rounds_inputs == quantised_inputs and kind.takes(weight):
            return kind.of(weight, bias_E, dtype)
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredLinear:
    """A quantised linear, as a file has it."""

    weight: QuantisedWeight
    bias_E: Tensor | None
    words: str
    quantised_inputs: bool

    def served(self, dtype: torch.dtype) -> nn.Module | None:
        return served_linear(self.weight, self.bias_E, dtype, quantised_inputs=self.quantised_inputs)

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": self.weight.dequantised().to(dtype)}
