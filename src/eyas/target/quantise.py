"""Quantises the linears of a loaded target on the fly.

on a CPU   int8, int4   blocks of 32 weights with a scale each. A head always takes 8 bits, as in common 4-bit files: it
                        decides every token. Embeddings tied to it are looked up in it.
on a GPU   fp8          a scale per output; rows are rounded to fp8, too, each by its own scale
           int4         groups of 128 weights with a scale and a zero point, rounded to the nearest
                        Embedding, head, norms and experts keep their dtype, as in published checkpoints.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.quantised_linear import (
    Bits,
    QuantisedKernel,
    QuantisedLinear,
    quantise,
    replace_by_blocks,
)
from eyas.kernels.linear.quantised_weight import quantise_float8, quantise_int4
from eyas.kernels.linear.served_linear import GpuLinear
from eyas.quantization.stored_linear import served_linear
from eyas.target.quantised_checkpoint import multiplies

logger = logging.getLogger(__name__)

ON_THE_FLY = {"fp8": quantise_float8, "int4": quantise_int4}
"""Kinds that a GPU can quantise a target to, and how weights are rounded."""


def quantise_linears(model: PreTrainedModel, bits: Bits, kernel: QuantisedKernel) -> int:
    """Replace every nn.Linear inside `model`, in place, and return how many; the model can no longer be trained."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    tied = head is not None and type(embedding) is nn.Embedding and head.weight is embedding.weight
    count = replace_by_blocks(model, kernel, lambda linear: quantise(linear.weight, 8 if linear is head else bits))
    packed = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if tied and isinstance(packed, QuantisedLinear):
        model.set_input_embeddings(QuantisedEmbedding(packed))
    return count


def quantise_on_gpu(model: PreTrainedModel, kind: str, source: str) -> int:
    """Replace every nn.Linear but the head, in place, one by one, and return how many."""
    reason = multiplies(model.device, kind, model.dtype)
    if reason is not None:
        raise UserError(
            f"--quantization {kind} cannot be used for {source}: {reason}; leave it out, or choose --device and --dtype"
        )
    count = replace_linears(model, kind)
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        logger.info("experts are not quantised: there is no kernel for that yet")
    return count


@torch.no_grad()
def replace_linears(model: PreTrainedModel, kind: str) -> int:
    """`quantise_on_gpu` for any device: elsewhere torch computes the products, for tests."""
    head, count = model.get_output_embeddings(), 0  # type: ignore[no-untyped-call]
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or linear is head:
                continue
            setattr(parent, name, quantised_on_gpu(linear, kind, linear.weight.dtype))
            count += 1
    return count


def quantised_on_gpu(linear: Any, kind: str, dtype: torch.dtype) -> GpuLinear:
    """Quantise a linear layer to one of `ON_THE_FLY`; `dtype` is that of its inputs and outputs."""
    weight = ON_THE_FLY[kind](linear.weight)
    packed = served_linear(weight, linear.bias, dtype, quantised_inputs=kind == "fp8")
    assert packed is not None
    return packed
