"""4-bit weights in groups, each with a scale and a zero point, times rows of 16 bits.

On a GPU decoding and verification run `w4a16_decode` (`w4a16_triton.py`, which says how weights and scales are packed).
For prompts the weights are dequantised to 16 bits and torch multiplies. Elsewhere torch computes it in float64: for
tests.

Shapes: N rows, K inputs, E outputs, G groups of inputs, W words of four weights.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.linear.decode_tiling import decode_counts
from eyas.kernels.linear.planes import PLANES, pack_planes, unpack_planes
from eyas.kernels.linear.quantised_weight import QuantisedWeight
from eyas.kernels.linear.served_linear import GpuLinear

LEAST_PLANE, LARGEST_PLANE = 32, 64
"""Words per block."""


class W4A16Linear(GpuLinear):
    """A linear layer of 4-bit weights and 16-bit rows."""

    outputs_axis: ClassVar[dict[str, int]] = {"words_EW": 0, "scales_GE": 1, "bias": 0}

    def __init__(
        self,
        words_EW: Tensor,
        scales_GE: Tensor,
        scale_dtype: torch.dtype,
        bias_E: Tensor | None,
        *,
        in_features: int,
        group: int,
        plane: int,
        order_K: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group, self.plane = in_features, len(words_EW), group, plane
        self.dtype = dtype
        # Not buffers: nothing may cast or move them.
        self.words_EW, self.scales_GE, self.scale_dtype = words_EW, scales_GE, scale_dtype
        self.bias, self.order_K = bias_E, order_K
        self.arrived = decode_counts(words_EW)

    @staticmethod
    def takes(weight: QuantisedWeight) -> bool:
        """Whether a plane fits into a group."""
        whole = weight.scale_EG.shape[1] == 1
        return weight.bits == 4 and not weight.is_float and (whole or weight.group % LEAST_PLANE == 0)

    @classmethod
    def of(cls, weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype) -> "W4A16Linear":
        assert cls.takes(weight)
        inputs = weight.q_EK.shape[1]
        whole = weight.scale_EG.shape[1] == 1
        plane = _plane(inputs if whole else weight.group, inputs)
        padded = -(-inputs // (PLANES * plane)) * PLANES * plane
        group = padded if whole else weight.group
        zero_EG = torch.zeros_like(weight.scale_EG) if weight.zero_EG is None else weight.zero_EG
        extra = -(-padded // group) - weight.scale_EG.shape[1]
        scale_EG, zero_EG = (functional.pad(x.float(), (0, extra)) for x in (weight.scale_EG, zero_EG))
        scale_dtype = _narrow(scale_EG)
        return cls(
            pack_planes(functional.pad(weight.q_EK, (0, padded - inputs)), plane),
            _packed_scales(scale_EG, zero_EG, scale_dtype, dtype),
            scale_dtype,
            None if bias_E is None else bias_E.detach().to(weight.q_EK.device, dtype).contiguous(),
            in_features=inputs,
            group=group,
            plane=plane,
            order_K=weight.order_K,
            dtype=dtype,
        )

    def joins(self, other: "W4A16Linear") -> bool:
        same_order = self.order_K is None or other.order_K is None or torch.equal(self.order_K, other.order_K)
        return self._kind() == other._kind() and same_order

    def _kind(self) -> tuple[object, ...]:
        packing = self.in_features, self.group, self.plane, self.scale_dtype, self.dtype
        return *packing, self.bias is None, self.order_K is None

    def packed(self) -> list[Tensor]:
        return [self.words_EW, self.scales_GE]

    @property
    def weight(self) -> Tensor:
        weight_EK = self._dequantised()
        if self.order_K is None:
            return weight_EK
        return torch.empty_like(weight_EK).index_copy_(1, self.order_K, weight_EK)

    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        if self.order_K is not None:
            x_NK = x_NK.index_select(1, self.order_K)
        if out_NE is None:
            out_NE = x_NK.new_empty(len(x_NK), self.out_features)
        if decoding and x_NK.device.type == "cuda":
            from eyas.kernels.linear.w4a16_triton import w4a16_decode

            weight = self.words_EW, self.scales_GE, self.scale_dtype, self.group, self.plane
            return w4a16_decode(x_NK, *weight, self.bias, out_NE, arrived=self.arrived)
        weight_KE = self._dequantised().t()
        if x_NK.device.type != "cuda":
            y_NE = x_NK.double() @ weight_KE.double()  # nearly exact, so that no row depends on the others
            return out_NE.copy_(y_NE if self.bias is None else y_NE + self.bias.double())
        if self.bias is None:
            return torch.mm(x_NK, weight_KE, out=out_NE)
        return torch.addmm(self.bias, x_NK, weight_KE, out=out_NE)

    def _dequantised(self) -> Tensor:
        """Dequantise the weight [E, K], inputs in the order of groups."""
        inputs = self.in_features
        if self.words_EW.device.type == "cuda":
            from eyas.kernels.linear.w4a16_triton import w4a16_dequantise

            weight = self.words_EW, self.scales_GE, self.scale_dtype, self.group, self.plane
            return w4a16_dequantise(*weight, inputs, self.dtype)
        q_EK = unpack_planes(self.words_EW, self.plane)
        of_EG = _scales(self.scales_GE, self.scale_dtype, self.dtype)
        scale_EK, zero_EK = (x.repeat_interleave(self.group, dim=1)[:, : q_EK.shape[1]] for x in of_EG)
        return ((q_EK - zero_EK) * scale_EK)[:, :inputs].to(self.dtype)


def _plane(group: int, inputs: int) -> int:
    """A plane lies within a group, and padding to blocks of four planes stays small."""
    fits = group % LARGEST_PLANE == 0 and (inputs % (PLANES * LARGEST_PLANE) == 0 or inputs >= 2048)
    return LARGEST_PLANE if fits else LEAST_PLANE


def _narrow(scale_EG: Tensor) -> torch.dtype:
    """The 16-bit dtype that loses least of the scales: mostly nothing, as files store them in one of these."""
    lost = {x: (scale_EG.to(x).float() - scale_EG).abs().max().item() for x in (torch.bfloat16, torch.float16)}
    return min(lost, key=lambda x: lost[x])


def _origin(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The dtype of zero points for rows of a dtype, and the number whose last four bits are replaced by weights."""
    return (torch.float16, 1024) if dtype == torch.float16 else (torch.bfloat16, 128)


def _packed_scales(scale_EG: Tensor, zero_EG: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Pack scales and zero points into words [G, E]."""
    half, offset = _origin(dtype)
    parts = scale_EG.t().to(scale_dtype), -(zero_EG + offset).t().to(half)
    low, high = (x.contiguous().view(torch.int16).int() for x in parts)
    return high << 16 | low & 0xFFFF


def _scales(scales_GE: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unpack words into scales and zero points [E, G], float32."""
    half, offset = _origin(dtype)
    low, high = (x.to(torch.int16).contiguous() for x in (scales_GE, scales_GE >> 16))
    return low.view(scale_dtype).float().t(), -high.view(half).float().t() - offset
