"""Helpers that read the tensors of a quantised linear: unpack integers, check shapes, make a `QuantisedWeight`.

Shapes: E outputs, K inputs, G groups of inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from eyas.errors import UserError
from eyas.kernels.linear.quantised_weight import FLOAT8, QuantisedWeight
from eyas.quantization.weight_format import WeightScheme


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [..., W] into integers [..., W * 32 / bits], lowest bits first; uint8."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    whole: Tensor = (packed[..., None] >> shift) & (2**bits - 1)
    return whole.to(torch.uint8).flatten(-2)


def checked_weight(
    scheme: WeightScheme,
    name: str,
    q_EK: Tensor,
    scale_EG: Tensor,
    zero_EG: Tensor | None = None,
    group_of_K: Tensor | None = None,
) -> QuantisedWeight:
    """Check shapes, and sort inputs by group where a group's inputs are not neighbours."""
    outputs, inputs = q_EK.shape
    group = scheme.group_size or inputs
    expected = (outputs, -(-inputs // group))
    for what, found in (("scales", scale_EG), ("zero points", zero_EG)):
        if found is not None and tuple(found.shape) != expected:
            raise UserError(
                f"{name} has {what} of shape {tuple(found.shape)}, and {scheme.words} with {outputs} outputs and "
                f"{inputs} inputs needs {expected}; config.json and weights do not belong together"
            )
    order_K = None
    if group_of_K is not None:
        group_of_K = group_of_K.long().flatten()
        in_order = torch.arange(inputs, device=group_of_K.device) // group
        if len(group_of_K) != inputs or not torch.equal(group_of_K.sort().values, in_order):
            raise UserError(f"g_idx of {name} does not give every group {group} inputs; use another checkpoint")
        if not torch.equal(group_of_K, in_order):
            order_K = group_of_K.argsort(stable=True)
            q_EK = q_EK[:, order_K]
    scale_EG = scale_EG.float()
    if not bool(torch.isfinite(scale_EG).all()):
        raise UserError(f"{name} has scales that are not finite; the checkpoint is damaged, use another one")
    return QuantisedWeight(
        q_EK=q_EK.contiguous(),
        scale_EG=scale_EG.contiguous(),
        bits=scheme.bits,
        group=group,
        zero_EG=None if zero_EG is None else zero_EG.to(torch.int8).contiguous(),
        order_K=order_K,
    )


def _centred(stored: Tensor, bits: int) -> Tensor:
    """Unsigned integers less half of their range, so that 8 bits fit into int8."""
    signed: Tensor = stored.to(torch.int16) - 2 ** (bits - 1)
    return signed.to(torch.int8)


def unsigned(scheme: WeightScheme, q_EK: Tensor, zero_EG: Tensor) -> tuple[Tensor, Tensor]:
    """Unsigned weights and zero points as int8; both are less 128 if they have 8 bits."""
    if scheme.bits == 8:
        return _centred(q_EK, 8), _centred(zero_EG, 8)
    return q_EK.to(torch.int8), zero_EG.to(torch.int8)


def eight_bits(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
    """Read fp8 or int8 weights that are not packed, with scales per tensor, output, group or block."""
    q_EK = tensors["weight"]
    expected = FLOAT8 if scheme.kind == "fp8" else torch.int8
    if q_EK.dtype != expected or q_EK.ndim != 2:
        raise UserError(
            f"{name} is {str(q_EK.dtype).removeprefix('torch.')} of shape {tuple(q_EK.shape)}, and {scheme.words} "
            f"needs a matrix of {str(expected).removeprefix('torch.')}; config.json and weights do not belong together"
        )
    outputs, inputs = q_EK.shape
    scale = tensors["weight_scale_inv"] if "weight_scale_inv" in tensors else tensors["weight_scale"]
    zero = tensors.get("weight_zero_point")
    if zero is not None and bool((zero == 0).all()):
        zero = None
    if scheme.block is not None:
        high, wide = scheme.block
        needs = (-(-outputs // high), -(-inputs // wide))
        if tuple(scale.shape) != needs:
            raise UserError(
                f"{name} has scales of shape {tuple(scale.shape)}, and {scheme.words} of {outputs} x {inputs} weights "
                f"needs {needs}; config.json and weights do not belong together"
            )
        scale_EG = scale.float().repeat_interleave(high, dim=0)[:outputs].contiguous()
        return QuantisedWeight(q_EK=q_EK.contiguous(), scale_EG=scale_EG, bits=8, group=wide)
    if scheme.group_size is None:
        if scale.numel() not in (1, outputs):
            raise UserError(
                f"{name} has {scale.numel()} scales, and {scheme.words} with {outputs} outputs needs 1 or {outputs}; "
                "config.json and weights do not belong together"
            )
        scale = scale.reshape(-1, 1).expand(outputs, 1)
        zero = None if zero is None else zero.reshape(-1, 1).expand(outputs, 1)
    return checked_weight(scheme, name, q_EK, scale, zero)
