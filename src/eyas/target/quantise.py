"""Quantises the linears of a loaded target on the processor, on the fly: blocks of 32 weights with a scale each.

A head always takes 8 bits, as it does in the 4-bit files that people make: it decides every token. Embeddings tied to
it are looked up in it.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from eyas.kernels.linear.quantised_linear import (
    Bits,
    QuantisedEmbedding,
    QuantisedKernel,
    QuantisedLinear,
    quantise,
)


def quantise_linears(model: PreTrainedModel, bits: Bits, kernel: QuantisedKernel) -> int:
    """Replace every nn.Linear inside `model`, in place, and return how many; the model can no longer be trained."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    tied = head is not None and type(embedding) is nn.Embedding and head.weight is embedding.weight
    count = 0
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear.weight.numel():
                blocks = quantise(linear.weight, 8 if linear is head else bits)
                packed = QuantisedLinear.of(kernel, blocks, linear.bias)
                setattr(parent, name, packed)
                count += 1
                if linear is head and tied:
                    model.set_input_embeddings(QuantisedEmbedding(packed))
    return count
