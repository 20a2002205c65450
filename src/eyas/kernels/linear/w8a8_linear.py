"""8-bit weights times rows that are rounded to 8 bits: fp8, or int8.

    y[n, e] = sum_g scale[e, g] * (q(x)[n, g] . q(w)[e, g]) * scale(x)[n] + bias[e]

Every row is rounded with its own scale: its largest number over the largest of the type. So a row's result does not
depend on the rows beside it, as it would with one scale for all rows.

On a GPU decoding and verification run `w8a8_decode` (`w8a8_triton.py`), and prompts run `torch._scaled_mm` with a scale
of 1 and apply the scales afterwards. Elsewhere torch computes it: for tests.

Shapes: N rows, K inputs, E outputs, G groups of inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.linear.decode_tiling import decode_counts
from eyas.kernels.linear.quantised_weight import FLOAT8, FLOAT8_LARGEST, INT8_LARGEST, QuantisedWeight
from eyas.kernels.linear.served_linear import GpuLinear

BLOCK_K = 128
"""Inputs are padded to a multiple of it, and groups are multiples of it."""


class W8A8Linear(GpuLinear):
    """A linear layer of 8-bit weights and 8-bit rows."""

    rounds_inputs = True
    rounds_rows: ClassVar[bool] = True
    """Whether rows are rounded to 8 bits: not within `rows_kept`."""
    outputs_axis: ClassVar[dict[str, int]] = {"weight_EK": 0, "scale_EG": 0, "bias": 0}

    def __init__(
        self,
        weight_EK: Tensor,
        scale_EG: Tensor,
        bias_E: Tensor | None,
        *,
        in_features: int,
        group: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group, self.dtype = in_features, len(weight_EK), group, dtype
        # Not buffers: nothing may cast or move them.
        self.weight_EK, self.scale_EG, self.bias = weight_EK, scale_EG, bias_E
        self.arrived = decode_counts(weight_EK)
        self._one = torch.ones((), dtype=torch.float32, device=weight_EK.device)

    @staticmethod
    def takes(weight: QuantisedWeight) -> bool:
        whole = weight.scale_EG.shape[1] == 1
        plain = weight.bits == 8 and weight.zero_EG is None and weight.order_K is None
        return plain and (whole or weight.group % BLOCK_K == 0)

    @classmethod
    def of(cls, weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype) -> "W8A8Linear":
        assert cls.takes(weight)
        inputs = weight.q_EK.shape[1]
        padded = -(-inputs // BLOCK_K) * BLOCK_K
        q_EK = weight.q_EK
        if padded != inputs:
            q_EK = functional.pad(q_EK.view(torch.int8), (0, padded - inputs)).view(weight.q_EK.dtype)
        bias_E = None if bias_E is None else bias_E.detach().to(q_EK.device, dtype).contiguous()
        group = padded if weight.scale_EG.shape[1] == 1 else weight.group
        scale_EG = weight.scale_EG.contiguous()
        return cls(q_EK.contiguous(), scale_EG, bias_E, in_features=inputs, group=group, dtype=dtype)

    def joins(self, other: "W8A8Linear") -> bool:
        return self._kind() == other._kind()

    def _kind(self) -> tuple[object, ...]:
        return self.in_features, self.group, self.dtype, self.weight_EK.dtype, self.bias is None

    def packed(self) -> list[Tensor]:
        return [self.weight_EK, self.scale_EG]

    @property
    def weight(self) -> Tensor:
        scale_EK = self.scale_EG.repeat_interleave(self.group, dim=1)[:, : self.in_features]
        return (self.weight_EK[:, : self.in_features].float() * scale_EK).to(self.dtype)

    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        if out_NE is None:
            out_NE = x_NK.new_empty(len(x_NK), self.out_features)
        if not self.rounds_rows:
            return out_NE.copy_(functional.linear(x_NK, self.weight, self.bias))
        if x_NK.device.type != "cuda":
            return out_NE.copy_(self._by_torch(x_NK))
        from eyas.kernels.linear.w8a8_triton import quantise_rows, scale_outputs

        q_NK, scale_N = quantise_rows(x_NK, self.weight_EK.dtype, self.weight_EK.shape[1])
        if decoding or not self._has_general_product:
            return self.decode_rows(q_NK, scale_N, out_NE)
        weight_KE, one = self.weight_EK.t(), self._one
        product_NE = torch._scaled_mm(q_NK, weight_KE, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return scale_outputs(product_NE, scale_N, self.scale_EG, self.bias, out_NE)

    def decode_rows(self, q_NK: Tensor, scale_N: Tensor, out_NE: Tensor | None = None) -> Tensor:
        """`product` while decoding on a GPU, of rows that are rounded to 8 bits already (`rows_for`)."""
        from eyas.kernels.linear.w8a8_triton import w8a8_decode

        if out_NE is None:
            out_NE = torch.empty(len(q_NK), self.out_features, dtype=self.dtype, device=q_NK.device)
        weight = self.weight_EK, self.scale_EG, self.group
        return w8a8_decode(q_NK, scale_N, *weight, self.bias, out_NE, arrived=self.arrived)

    @property
    def _has_general_product(self) -> bool:
        """Whether torch has a kernel for many rows."""
        return self.weight_EK.dtype == FLOAT8 and self.scale_EG.shape[1] == 1 and self.out_features % 16 == 0

    def _by_torch(self, x_NK: Tensor) -> Tensor:
        """What the kernels compute, summed exactly in float64, so that no row depends on the others."""
        is_float = self.weight_EK.dtype == FLOAT8
        largest = FLOAT8_LARGEST if is_float else INT8_LARGEST
        x_NK = functional.pad(x_NK.float(), (0, self.weight_EK.shape[1] - self.in_features))
        most_N1 = x_NK.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
        q_NK = (x_NK * (largest / most_N1)).clamp(-largest, largest)
        q_NK = q_NK.to(FLOAT8).float() if is_float else (q_NK + 0.5).floor()
        if self.scale_EG.shape[1] == 1:
            y_NE = (q_NK.double() @ self.weight_EK.double().t()).float() * self.scale_EG[:, 0]
        else:
            parts = zip(
                *(torch.split(x, self.group, dim=1) for x in (q_NK.double(), self.weight_EK.double())), strict=True
            )
            y_NE = sum(
                ((q @ w.t()).float() * scale_E for (q, w), scale_E in zip(parts, self.scale_EG.unbind(1), strict=True)),
                torch.zeros(len(x_NK), self.out_features, device=x_NK.device),
            )
        y_NE = y_NE * (most_N1 / largest)
        return y_NE if self.bias is None else y_NE + self.bias.float()


@contextmanager
def rows_kept() -> Iterator[None]:
    """Multiply unrounded rows for a while: two computations then differ by the rounding of 16 bits, not of 8."""
    W8A8Linear.rounds_rows = False
    try:
        yield
    finally:
        W8A8Linear.rounds_rows = True
