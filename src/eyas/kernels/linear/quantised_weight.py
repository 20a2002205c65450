"""8- and 4-bit weights of a linear, in one form for all checkpoint formats.

    weight[e, order[k]] = (q[e, k] - zero[e, k // group]) * scale[e, k // group]

Shapes: E outputs, K inputs, G groups of inputs that share a scale.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
FLOAT8_LARGEST = 448.0
INT8_LARGEST = 127.0
GROUP = 128
"""Inputs that share a scale, where weights are quantised here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedWeight:
    """A weight and its scales."""

    q_EK: Tensor
    """Stored numbers, float8_e4m3fn or int8."""
    scale_EG: Tensor
    """Scales, float32."""
    bits: int
    group: int
    """Inputs that share a scale; the last group may have fewer."""
    zero_EG: Tensor | None = None
    """Zero points, int8; None means 0."""
    order_K: Tensor | None = None
    """The input of each column, where groups are not made of neighbours (int64)."""

    def __post_init__(self) -> None:
        outputs, inputs = self.q_EK.shape
        groups = -(-inputs // self.group)
        assert self.scale_EG.shape == (outputs, groups), f"{tuple(self.scale_EG.shape)} scales, {outputs} x {groups}"
        assert self.zero_EG is None or self.zero_EG.shape == self.scale_EG.shape

    @property
    def is_float(self) -> bool:
        return self.q_EK.dtype == FLOAT8

    def to(self, device: torch.device) -> "QuantisedWeight":
        return replace(
            self,
            q_EK=self.q_EK.to(device),
            scale_EG=self.scale_EG.to(device),
            zero_EG=None if self.zero_EG is None else self.zero_EG.to(device),
            order_K=None if self.order_K is None else self.order_K.to(device),
        )

    def dequantised(self) -> Tensor:
        """The weight [E, K], float32, inputs in their original order."""
        inputs = self.q_EK.shape[1]
        value_EK = self.q_EK.float()
        if self.zero_EG is not None:
            value_EK = value_EK - _per_input(self.zero_EG.float(), self.group, inputs)
        value_EK = value_EK * _per_input(self.scale_EG, self.group, inputs)
        if self.order_K is None:
            return value_EK
        return torch.empty_like(value_EK).index_copy_(1, self.order_K, value_EK)


def _per_input(of_EG: Tensor, group: int, inputs: int) -> Tensor:
    return of_EG.repeat_interleave(group, dim=1)[:, :inputs]


def quantise_float8(weight_EK: Tensor) -> QuantisedWeight:
    """Round to fp8 with a scale per output, so that its largest weight becomes the largest fp8 number."""
    weight_EK = weight_EK.detach().float()
    scale_E1 = weight_EK.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FLOAT8_LARGEST
    q_EK = (weight_EK / scale_E1).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(FLOAT8)
    return QuantisedWeight(q_EK=q_EK, scale_EG=scale_E1, bits=8, group=weight_EK.shape[1])


def quantise_int8(weight_EK: Tensor) -> QuantisedWeight:
    """Round to integers from -127 to 127 with a scale per output."""
    weight_EK = weight_EK.detach().float()
    scale_E1 = weight_EK.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / INT8_LARGEST
    q_EK = (weight_EK / scale_E1).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
    return QuantisedWeight(q_EK=q_EK, scale_EG=scale_E1, bits=8, group=weight_EK.shape[1])


def quantise_int4(weight_EK: Tensor, group: int = GROUP) -> QuantisedWeight:
    """Round to the nearest of 16 levels between the smallest and the largest weight of a group; 0 is one of them.

    Groups have a zero point, as in AWQ: a symmetric range would leave a level unused. The last group is padded with
    zeros.
    """
    outputs, inputs = weight_EK.shape
    groups = -(-inputs // group)
    padded = torch.nn.functional.pad(weight_EK.detach().float(), (0, groups * group - inputs))
    weight_EGK = padded.view(outputs, groups, group)
    least, largest = weight_EGK.amin(dim=2).clamp(max=0), weight_EGK.amax(dim=2).clamp(min=0)
    scale_EG = ((largest - least) / 15).clamp(min=1e-12)
    # Kernels keep scales in 16 bits, so they are rounded before the weights are fitted to them.
    scale_EG = scale_EG.bfloat16().float()
    zero_EG = (-least / scale_EG).round().clamp(0, 15)
    q_EGK = ((weight_EGK / scale_EG[..., None]).round() + zero_EG[..., None]).clamp(0, 15)
    return QuantisedWeight(
        q_EK=q_EGK.view(outputs, -1)[:, :inputs].to(torch.int8).contiguous(),
        scale_EG=scale_EG,
        zero_EG=zero_EG.to(torch.int8),
        bits=4,
        group=group,
    )
