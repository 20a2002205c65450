"""MXFP4 experts, as gpt-oss is published.

    gate_up_proj_blocks   uint8 [E, O, K / 32, 16], two numbers of 4 bits in a byte, the lower four bits first
    gate_up_proj_scales   uint8 [E, O, K / 32], exponents
    gate_up_proj_bias     16 bits [E, O]
    down_proj_...         likewise

transformers keeps the same numbers in 16 or 32 bits, in one tensor, whose last two dimensions may be exchanged
(`is_transposed`). What stays in 16 bits (`modules_to_not_convert`) is told by the tensors.

Shapes: E experts, O outputs, K inputs, G groups of 32 inputs, P = 16 pairs of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError
from eyas.quantization.weight_format import WeightFormat, WeightScheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from eyas.kernels.linear.quantised_weight import QuantisedWeight

GROUP = 32
"""Weights that share an exponent."""
NO_NUMBER = 255
"""The exponent that stands for no number."""
WEIGHTS = ("gate_up_proj", "down_proj")


class Mxfp4(WeightFormat):
    """Experts of 4-bit floats; all other weights have 16 bits."""

    name = "mxfp4"
    methods = ("mxfp4",)

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        return WeightScheme(format=self, kind="mxfp4", group_size=GROUP)

    def owns(self, names: Mapping[str, object]) -> bool:
        return any(f"{weight}_{part}" in names for weight in WEIGHTS for part in ("blocks", "scales"))

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        raise UserError(f"{name} holds experts in MXFP4, and a linear layer was expected; use another checkpoint")

    def read_module(
        self, scheme: WeightScheme, tensors: Mapping[str, Tensor], module: nn.Module, name: str
    ) -> StoredExperts:
        stored = {weight: _read(tensors, weight, module, f"{name}.{weight}") for weight in WEIGHTS}
        return StoredExperts(module=module, name=name, stored=stored)


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredExperts:
    """The experts of a layer, as a file has them."""

    module: Any
    name: str
    stored: Mapping[str, tuple[Tensor, Tensor]]
    """Numbers [E, O, G, P] and exponents [E, O, G] of both matrices."""
    words: str = "mxfp4"

    def served(self, dtype: torch.dtype) -> nn.Module:
        from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight
        from eyas.kernels.llama.mxfp4_experts import Mxfp4Experts

        gate_up, down = (Mxfp4Weight.of(*published) for published in self.stored.values())
        return Mxfp4Experts(self.module, gate_up, down, dtype)

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        from eyas.kernels.linear.mxfp4_weight import dequantised_mxfp4

        made: dict[str, Tensor] = {}
        transposed = bool(getattr(self.module, "is_transposed", False))
        for weight, published in self.stored.items():
            dense_EOK = dequantised_mxfp4(*published, dtype)
            if dtype == torch.float16 and not bool(torch.isfinite(dense_EOK).all()):
                raise UserError(
                    f"{self.name}.{weight} has weights above 65504, the largest number of float16; use --dtype bfloat16"
                )
            made[weight] = dense_EOK.mT if transposed else dense_EOK
        return made


def _read(tensors: Mapping[str, Tensor], weight: str, experts: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    import torch

    place = getattr(experts, weight, None)
    if not isinstance(place, torch.Tensor) or place.ndim != 3:
        raise UserError(f"{name} is in MXFP4, and {type(experts).__name__} has no experts of that name; use bfloat16")
    missing = [part for part in (f"{weight}_blocks", f"{weight}_scales") if part not in tensors]
    if missing:
        raise UserError(f"{name} has no {missing[0]}, which MXFP4 needs; use a complete checkpoint")
    pairs_EOGP, exponent_EOG = tensors[f"{weight}_blocks"], tensors[f"{weight}_scales"]
    count, *shape = place.shape
    inputs, outputs = shape if getattr(experts, "is_transposed", False) else reversed(shape)
    if inputs % GROUP:
        raise UserError(f"{name} has {inputs} inputs, and MXFP4 needs a multiple of {GROUP}; repair config.json")
    expected = (count, outputs, inputs // GROUP)
    for found, needs in ((pairs_EOGP, (*expected, GROUP // 2)), (exponent_EOG, expected)):
        if found.dtype != torch.uint8 or tuple(found.shape) != needs:
            raise UserError(
                f"{name} has {str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)} in the file, and "
                f"config.json makes it uint8 of shape {needs}; they do not belong together"
            )
    if bool((exponent_EOG == NO_NUMBER).any()):
        raise UserError(f"{name} has scales of 255, which stands for NaN; the checkpoint is damaged, fetch it again")
    return pairs_EOGP, exponent_EOG
