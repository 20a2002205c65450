"""The tensors of one quantised linear, as checkpoints publish them, as a `QuantisedWeight`.

    compressed-tensors   weight_packed int32 [E, K / 8], low bits first, or weight (8 bits) [E, K]; weight_scale;
                         weight_zero_point, packed along E if the weight is; weight_g_idx. Packed integers are signed
                         and stored with half of their range added.
    fp8                  weight [E, K]; weight_scale_inv of blocks, or weight_scale; what it is multiplied by, both
    awq                  qweight int32 [K, E / 8]; qzeros [G, E / 8]; scales [G, E]. An int32 has outputs 0, 2, 4, 6, 1,
                         3, 5, 7 of eight, low bits first
    gptq                 qweight int32 [K / 8, E], low bits first; qzeros [G, E / 8]; scales [G, E]; g_idx [K]

Scales of inputs (`input_scale`), where a file has them, are not used: rows find their own, which is never coarser.

Shapes: E outputs, K inputs, G groups of inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from eyas.errors import UserError
from eyas.kernels.linear.quantised_weight import FLOAT8, QuantisedWeight
from eyas.quantization.quantization_config import WeightScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of an int32 belong to, from the lowest."""
_MARKS = {
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "mxfp4": (),  # of experts alone (`mxfp4_tensors.py`)
}


def is_quantised(scheme: WeightScheme, names: Mapping[str, object]) -> bool:
    """Whether a layer that has tensors of these names is one of those that are quantised."""
    return any(mark in names for mark in _MARKS[scheme.layout])


def read_quantised(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
    """The weight of the linear `name`, whose tensors these are, by their names within the layer."""
    try:
        if scheme.layout == "awq":
            return _awq(scheme, tensors, name)
        if scheme.layout == "gptq":
            return _gptq(scheme, tensors, name)
        if "weight_packed" in tensors:
            return _packed(scheme, tensors, name)
        return _eight_bits(scheme, tensors, name)
    except KeyError as error:
        raise UserError(
            f"{name} has {', '.join(sorted(tensors))} and no {error.args[0]}, which {scheme.words} needs; "
            "use a complete checkpoint"
        ) from error


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The integers of int32 words [..., W] as [..., W * 32 / bits], from the lowest bits on; uint8."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    whole: Tensor = (packed[..., None] >> shift) & (2**bits - 1)
    return whole.to(torch.uint8).flatten(-2)


def _weight(
    scheme: WeightScheme,
    name: str,
    q_EK: Tensor,
    scale_EG: Tensor,
    zero_EG: Tensor | None = None,
    group_of_K: Tensor | None = None,
) -> QuantisedWeight:
    """Check shapes, and sort inputs by their groups where these are not neighbours."""
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
    """Unsigned integers as int8, so that 8 bits fit: half of the range is taken away."""
    signed: Tensor = stored.to(torch.int16) - 2 ** (bits - 1)
    return signed.to(torch.int8)


def _unsigned(scheme: WeightScheme, q_EK: Tensor, zero_EG: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and zero points from 0 on; those of 8 bits less 128, both."""
    if scheme.bits == 8:
        return _centred(q_EK, 8), _centred(zero_EG, 8)
    return q_EK.to(torch.int8), zero_EG.to(torch.int8)


def _awq(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
    place = torch.tensor(AWQ_ORDER, device=tensors["qweight"].device).argsort()

    def in_order(packed: Tensor) -> Tensor:
        """[..., E] outputs in their order."""
        stored = unpack(packed, 4)
        return stored.view(*stored.shape[:-1], -1, 8)[..., place].flatten(-2)

    q_EK, zero_EG = _unsigned(scheme, in_order(tensors["qweight"]).t(), in_order(tensors["qzeros"]).t())
    return _weight(scheme, name, q_EK, tensors["scales"].t(), zero_EG)


def _gptq(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
    bits = scheme.bits
    q_EK = unpack(tensors["qweight"].t(), bits)
    zero_EG = (unpack(tensors["qzeros"], bits).t() + scheme.zero_offset) & (2**bits - 1)
    q_EK, zero_EG = _unsigned(scheme, q_EK, zero_EG)
    return _weight(scheme, name, q_EK, tensors["scales"].t(), zero_EG, tensors.get("g_idx"))


def _packed(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
    bits = scheme.bits
    outputs, inputs = (int(x) for x in tensors["weight_shape"].tolist())
    q_EK = unpack(tensors["weight_packed"], bits)[:, :inputs]
    zero_EG = tensors.get("weight_zero_point")
    if zero_EG is not None and zero_EG.dtype == torch.int32:
        zero_EG = unpack(zero_EG.t(), bits).t()[:outputs]
    elif zero_EG is not None:
        zero_EG = zero_EG.to(torch.int16) + 2 ** (bits - 1)
    else:
        zero_EG = torch.full_like(tensors["weight_scale"], 2 ** (bits - 1), dtype=torch.int16)
    if q_EK.shape != (outputs, inputs):
        raise UserError(
            f"weight_packed of {name} has room for {tuple(q_EK.shape)} weights, and weight_shape says "
            f"{(outputs, inputs)}; the checkpoint is damaged, use another one"
        )
    q_EK, zero_EG = _unsigned(scheme, q_EK, zero_EG)
    return _weight(scheme, name, q_EK, tensors["weight_scale"], zero_EG, tensors.get("weight_g_idx"))


def _eight_bits(scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
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
    return _weight(scheme, name, q_EK, scale, zero)
