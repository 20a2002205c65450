"""The tensors of a layer's experts in MXFP4, as gpt-oss is published.

    gate_up_proj_blocks   uint8 [E, O, K / 32, 16], two numbers of 4 bits in a byte, the lower four bits first
    gate_up_proj_scales   uint8 [E, O, K / 32], exponents
    gate_up_proj_bias     16 bits [E, O]
    down_proj_...         the same

A module of transformers has room for the same numbers in 16 or 32 bits, in one tensor, whose last two dimensions may
be exchanged (`is_transposed`).

Shapes: E experts, O outputs, K inputs, G groups of 32 inputs, P = 16 pairs of a group.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UserError
from eyas.kernels.linear.mxfp4_weight import GROUP, NO_NUMBER, dequantised_mxfp4
from eyas.kernels.llama.packed_experts import WEIGHTS


def is_mxfp4(names: Mapping[str, object]) -> bool:
    """Whether a module that has tensors of these names has experts in MXFP4."""
    return any(f"{weight}_{part}" in names for weight in WEIGHTS for part in ("blocks", "scales"))


def read_mxfp4(tensors: Mapping[str, Tensor], experts: Any, owner: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers [E, O, G, P] and exponents [E, O, G] of both matrices of a module, by its own names for them."""
    return {weight: _read(tensors, weight, experts, f"{owner}.{weight}") for weight in WEIGHTS}


def fill_mxfp4(experts: Any, weight: str, stored: tuple[Tensor, Tensor], dtype: torch.dtype, owner: str) -> None:
    """Give a module of transformers one of its tensors, dequantised."""
    dense_EOK = dequantised_mxfp4(*stored, dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(dense_EOK).all()):
        raise UserError(
            f"{owner}.{weight} has weights above 65504, the largest number of float16; use --dtype bfloat16"
        )
    transposed = bool(getattr(experts, "is_transposed", False))
    setattr(experts, weight, nn.Parameter(dense_EOK.mT if transposed else dense_EOK, requires_grad=False))


def _read(tensors: Mapping[str, Tensor], weight: str, experts: Any, name: str) -> tuple[Tensor, Tensor]:
    place = getattr(experts, weight, None)
    if not isinstance(place, Tensor) or place.ndim != 3:
        raise UserError(f"{name} is in MXFP4, and {type(experts).__name__} has no experts of that name; use bfloat16")
    missing = [part for part in (f"{weight}_blocks", f"{weight}_scales") if part not in tensors]
    if missing:
        raise UserError(f"{name} has no {missing[0]}, which MXFP4 needs; use a complete checkpoint")
    pairs_EOGP, exponent_EOG = tensors[f"{weight}_blocks"], tensors[f"{weight}_scales"]
    count, *shape = place.shape
    inputs, outputs = shape if getattr(experts, "is_transposed", False) else reversed(shape)
    if inputs % GROUP:
        raise UserError(f"{name} has {inputs} inputs, and MXFP4 needs a multiple of {GROUP}; mend config.json")
    expected = (count, outputs, inputs // GROUP)
    for found, needs in ((pairs_EOGP, (*expected, GROUP // 2)), (exponent_EOG, expected)):
        if found.dtype != torch.uint8 or tuple(found.shape) != needs:
            raise UserError(
                f"{name} has {str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)} in the file, and "
                f"config.json makes it uint8 of shape {needs}; they do not belong together"
            )
    if bool((exponent_EOG == NO_NUMBER).any()):
        raise UserError(f"{name} has scales of 255, which is no number; the checkpoint is damaged, fetch it again")
    return pairs_EOGP, exponent_EOG
