"""The target with coarser weights, for a while: what a drafter meets that was trained on the unquantised one.

Its linear layers are replaced by those that `--quantization` would serve, with the kernels that multiply them, so that
activations are rounded as they are in service: int8 and int4 on a processor, fp8 and int4 on a GPU. Embeddings, norms
and the language-model head stay as they are. No calibration: methods with one (AWQ, GPTQ) do less harm.
Invariant: when the block ends, however it ends, the target has the very layers that it had.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from eyas.errors import UserError
from eyas.kernels.linear.packed_linear import PackedLinear
from eyas.kernels.linear.quantised_linear import Bits, QuantisedLinear, load_quantised, quantise
from eyas.kernels.linear.quantised_weight import quantise_float8, quantise_int4
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.target.capture import decoder_layers
from eyas.target.model import Target
from eyas.target.quantised_checkpoint import multiplies

Linear = nn.Linear | PackedLinear | QuantisedLinear


def kind_of(target: Target, bits: Bits) -> str:
    """What `--quantization` calls so many bits where this target is."""
    return "fp8" if bits == 8 and target.device.type == "cuda" else f"int{bits}"


@contextmanager
def quantised(target: Target, bits: Bits) -> Iterator[int]:
    """Quantise every linear layer of the decoder; yields how many there were.

    Engines made before still hold the layers of then: they have to be made anew inside, and again afterwards.
    """
    layers = decoder_layers(target.model)
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear) and child.weight.is_floating_point()
    ]
    if not found:
        raise UserError(
            f"{target.facts.source} has no plain linear layers to quantise (it may be quantised already); "
            "leave the quantised cases out"
        )
    made = _maker(target, bits)
    try:
        with torch.no_grad():
            for parent, name, child in found:
                setattr(parent, name, made(child))
        yield len(found)
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def _maker(target: Target, bits: Bits) -> Callable[[Linear], nn.Module]:
    """What quantises a layer on the target's device; refused where nothing could multiply it."""
    kind = kind_of(target, bits)
    if target.device.type == "cpu":
        kernel, words = load_quantised()
        if kernel is None:
            raise UserError(f"{kind} needs a C compiler ({words}); install one, or leave the quantised cases out")
        return lambda linear: QuantisedLinear.of(kernel, quantise(linear.weight, bits), linear.bias)
    reason = multiplies(target.device, kind, target.dtype)
    if reason is not None:
        raise UserError(f"{kind} cannot be tried on {target.device}: {reason}; leave the quantised cases out")
    if kind == "fp8":
        return lambda linear: W8A8Linear.of(quantise_float8(linear.weight), linear.bias, target.dtype)
    return lambda linear: W4A16Linear.of(quantise_int4(linear.weight), linear.bias, target.dtype)
