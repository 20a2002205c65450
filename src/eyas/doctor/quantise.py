"""The target with coarser weights, for a while: what a drafter meets that was trained on the unquantised one.

Round to nearest, symmetric, one scale for every group of 128 weights along the input of a linear layer:
w' = s * clip(round(w / s), -(2^(b-1) - 1), 2^(b-1) - 1) with s = max|w| / (2^(b-1) - 1). Weights are computed with in
their own type again, so only the rounding is studied and not a kernel. Embeddings, norms and the language-model head
stay as they are, as common 4-bit formats leave them. No calibration: methods with one (AWQ, GPTQ) do less harm.
Invariant: when the block ends, however it ends, every weight is bit for bit what it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import PackedLinear, pack
from eyas.target.capture import decoder_layers
from eyas.target.model import Target

GROUP = 128


def round_weights(weight_OI: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """The weights [O, I] after a round trip through `bits`."""
    most = 2 ** (bits - 1) - 1
    outputs, inputs = weight_OI.shape
    size = group if inputs % group == 0 else inputs
    grouped = weight_OI.float().reshape(outputs, -1, size)
    scale: Tensor = (grouped.abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-12)
    rounded: Tensor = (grouped / scale).round().clamp(-most, most) * scale
    return rounded.reshape(outputs, inputs).to(weight_OI.dtype)


@contextmanager
def quantised(target: Target, bits: int) -> Iterator[int]:
    """Round every linear layer of the decoder; yields how many there were."""
    layers = decoder_layers(target.model)
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear | PackedLinear)]
    linears = [module for module in linears if module.weight.is_floating_point() and module.weight.dim() == 2]
    if not linears:
        raise UserError(
            f"{target.facts.source} has no plain linear layers to round (it may be quantised already); "
            "leave the quantised cases out"
        )
    kept = [_storage(module).clone() for module in linears]
    try:
        with torch.no_grad():
            for module in linears:
                _write(module, round_weights(module.weight, bits))
        yield len(linears)
    finally:
        with torch.no_grad():
            for module, stored in zip(linears, kept, strict=True):
                _storage(module).copy_(stored)


def _storage(module: nn.Linear | PackedLinear) -> Tensor:
    """Where the weights lie: in place, because several layers may share a block of memory."""
    return module.panels_PKC if isinstance(module, PackedLinear) else module.weight.data


def _write(module: nn.Linear | PackedLinear, weight_OI: Tensor) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.copy_(weight_OI)
        return
    plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight_OI, requires_grad=False)
    assert not module.halved, "targets are packed whole"
    module.panels_PKC.copy_(pack(module.kernel, [plain])[0].panels_PKC)
