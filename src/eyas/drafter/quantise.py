"""Quantises a drafter's checkpoint to 8 bits, and back."""

from dataclasses import replace

import torch

from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.quantised_linears import quantise_tensors
from eyas.errors import UserError


def quantised(checkpoint: Checkpoint, kind: str, source: str) -> Checkpoint:
    """A copy with all linears but the head in `kind`; refuses to round twice."""
    if checkpoint.quantised is not None:
        raise UserError(
            f"{source} is quantised already ({checkpoint.quantised.scheme.words}), and rounding it again would lose "
            "more; quantise the drafter that it was made of, or leave --quantize out"
        )
    if checkpoint.config.mla is not None:
        raise UserError(
            f"{source} has latent attention (MLA), and no server was tried with such a drafter in 8 bits; leave "
            "--quantize out"
        )
    if checkpoint.config.eagle1:
        raise UserError(
            f"{source} is an EAGLE-1 drafter, and no server was tried with such a one in 8 bits; leave --quantize out"
        )
    made = quantise_tensors(checkpoint.config, checkpoint.tensors, kind)
    dtype = getattr(torch, checkpoint.config.dtype)
    return replace(checkpoint, tensors={**checkpoint.tensors, **made.dequantised(dtype)}, quantised=made)


def dequantised(checkpoint: Checkpoint, source: str) -> Checkpoint:
    """A copy with all linears in the dtype of its other weights."""
    if checkpoint.quantised is None:
        raise UserError(f"{source} is not quantised; leave --quantize none out")
    return replace(checkpoint, quantised=None)
