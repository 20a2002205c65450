"""Linears with weights of 4 bits in groups, each with a scale and a zero point, over rows of 16 bits.

On a GPU there are two kernels, chosen by what a pass is for and never by how many rows it has. Decoding and
verification take `w4a16_decode`, whose invariant is told in `w4a16_triton.py`. For prompts the weights become
16-bit numbers in memory and torch multiplies them. Elsewhere it is computed by torch in float64: for tests.

How weights and scales are packed is told in `w4a16_triton.py`.

Shapes: N rows, K inputs, E outputs, G groups of inputs, W words of four weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.decode_tiling import decode_counts
from eyas.kernels.linear.quantised_weight import QuantisedWeight

PLANES = 4
"""Weights of a word."""
LEAST_PLANE, LARGEST_PLANE = 32, 64
"""Words of a block."""


class W4A16Linear(nn.Module):
    """A linear layer for inference."""

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
        # No buffers: nothing may cast or move them.
        self.words_EW, self.scales_GE, self.scale_dtype = words_EW, scales_GE, scale_dtype
        self.bias, self.order_K = bias_E, order_K
        self.arrived = decode_counts(words_EW)

    @staticmethod
    def takes(weight: QuantisedWeight) -> bool:
        """Whether a weight can be multiplied so: planes lie in groups."""
        whole = weight.scale_EG.shape[1] == 1
        return weight.bits == 4 and not weight.is_float and (whole or weight.group % LEAST_PLANE == 0)

    @classmethod
    def of(cls, weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype) -> "W4A16Linear":
        """On the device of the weight; `dtype` is of what goes in and comes out."""
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

    def packed(self) -> list[Tensor]:
        """What its weights take memory for."""
        return [self.words_EW, self.scales_GE]

    @property
    def nbytes(self) -> int:
        """In memory."""
        return sum(x.nbytes for x in self.packed())

    @property
    def weight(self) -> Tensor:
        """The weight as nn.Linear keeps it, [E, K], dequantised: a copy made on each call."""
        weight_EK = self._dequantised()
        if self.order_K is None:
            return weight_EK
        return torch.empty_like(weight_EK).index_copy_(1, self.order_K, weight_EK)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of rows [..., K], [..., E]."""
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a quantised linear has no gradient; load the target with quantization none")
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        """The outputs [N, E] of rows; `decoding` chooses the kernel."""
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
            y_NE = x_NK.double() @ weight_KE.double()  # nearly exact: no row depends on the others
            return out_NE.copy_(y_NE if self.bias is None else y_NE + self.bias.double())
        if self.bias is None:
            return torch.mm(x_NK, weight_KE, out=out_NE)
        return torch.addmm(self.bias, x_NK, weight_KE, out=out_NE)

    def _dequantised(self) -> Tensor:
        """The weight [E, K], inputs in the order of groups."""
        inputs = self.in_features
        if self.words_EW.device.type == "cuda":
            from eyas.kernels.linear.w4a16_triton import w4a16_dequantise

            weight = self.words_EW, self.scales_GE, self.scale_dtype, self.group, self.plane
            return w4a16_dequantise(*weight, inputs, self.dtype)
        q_EK = unpack_planes(self.words_EW, self.plane)
        of_EG = _scales(self.scales_GE, self.scale_dtype, self.dtype)
        scale_EK, zero_EK = (x.repeat_interleave(self.group, dim=1)[:, : q_EK.shape[1]] for x in of_EG)
        return ((q_EK - zero_EK) * scale_EK)[:, :inputs].to(self.dtype)

    def extra_repr(self) -> str:
        """As nn.Linear prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int4, groups of {self.group}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A saved model holds the names and shapes of nn.Linear."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias


def _plane(group: int, inputs: int) -> int:
    """A plane lies in a group, and blocks of four of them do not go far beyond the last input."""
    fits = group % LARGEST_PLANE == 0 and (inputs % (PLANES * LARGEST_PLANE) == 0 or inputs >= 2048)
    return LARGEST_PLANE if fits else LEAST_PLANE


def pack_planes(q_EK: Tensor, plane: int) -> Tensor:
    """Weights 0..15 as words [E, K / 4]."""
    words = torch.zeros(len(q_EK), q_EK.shape[1] // PLANES, dtype=torch.int16, device=q_EK.device)
    q_EBJP = q_EK.view(len(q_EK), -1, PLANES, plane)
    for j in range(PLANES):  # plane by plane: all at once would take several times the memory
        words |= (q_EBJP[:, :, j].reshape(len(q_EK), -1).to(torch.int16) & 15) << 4 * j
    return words


def unpack_planes(words_EW: Tensor, plane: int) -> Tensor:
    """Weights [E, K] of words, int16."""
    shift = torch.arange(0, 4 * PLANES, 4, dtype=torch.int16, device=words_EW.device)[:, None]
    words_EB1P = words_EW.view(len(words_EW), -1, 1, plane)
    return ((words_EB1P >> shift) & 15).flatten(1)


def _narrow(scale_EG: Tensor) -> torch.dtype:
    """The type of 16 bits that loses least of scales: mostly nothing, as files have them in one of these."""
    lost = {x: (scale_EG.to(x).float() - scale_EG).abs().max().item() for x in (torch.bfloat16, torch.float16)}
    return min(lost, key=lambda x: lost[x])


def _origin(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """What zero points are kept in for rows of a type, and the number of it whose last four bits weights replace."""
    return (torch.float16, 1024) if dtype == torch.float16 else (torch.bfloat16, 128)


def _packed_scales(scale_EG: Tensor, zero_EG: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Scales and zero points as words [G, E]."""
    half, offset = _origin(dtype)
    parts = scale_EG.t().to(scale_dtype), -(zero_EG + offset).t().to(half)
    low, high = (x.contiguous().view(torch.int16).int() for x in parts)
    return high << 16 | low & 0xFFFF


def _scales(scales_GE: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points [E, G] of words, float32."""
    half, offset = _origin(dtype)
    low, high = (x.to(torch.int16).contiguous() for x in (scales_GE, scales_GE >> 16))
    return low.view(scale_dtype).float().t(), -high.view(half).float().t() - offset


def joined_w4a16(linears: Sequence[W4A16Linear]) -> W4A16Linear | None:
    """One layer with the outputs of all, in order, whose parts become views of it; None if they are not alike."""
    first = linears[0]
    if len(linears) == 1:
        return first
    if any(_kind(x) != _kind(first) for x in linears):
        return None
    orders = [x.order_K for x in linears if x.order_K is not None]
    if any(not torch.equal(one, orders[0]) for one in orders):
        return None
    whole = W4A16Linear(
        torch.cat([x.words_EW for x in linears]),
        torch.cat([x.scales_GE for x in linears], dim=1),
        first.scale_dtype,
        None if first.bias is None else torch.cat([x.bias for x in linears if x.bias is not None]),
        in_features=first.in_features,
        group=first.group,
        plane=first.plane,
        order_K=first.order_K,
        dtype=first.dtype,
    )
    begin = 0
    for part in linears:
        rows = slice(begin, begin + part.out_features)
        part.words_EW, part.scales_GE = whole.words_EW[rows], whole.scales_GE[:, rows]
        part.bias = None if whole.bias is None else whole.bias[rows]
        begin += part.out_features
    return whole


def _kind(linear: W4A16Linear) -> tuple[object, ...]:
    packing = linear.in_features, linear.group, linear.plane, linear.scale_dtype, linear.dtype
    return *packing, linear.bias is None, linear.order_K is None
