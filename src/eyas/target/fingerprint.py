"""Who a target is, by its weights: the same for a folder, a hub id and a GGUF file of one model.

Names do not tell: one model has many, and a folder may hold anything. The weights of the norms do. They are small,
every format keeps them as they are when it quantises the matrices, and hardly two models that were trained apart have
the same. What leaves the norms alone cannot be told from its base: a merged LoRA of the matrices, a quantised variant.
"""

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

SMALLEST = 2.0**-12
"""Weights below it count as 0: formats that keep 1 + w, or w in float16, lose digits of them."""
DIGITS = 16


def fingerprint(model: PreTrainedModel) -> str:
    """Sizes and norms of a causal language model in 16 hexadecimal digits."""
    config = model.config.get_text_config()
    digest = hashlib.sha256(f"{config.num_hidden_layers} {config.hidden_size} {config.vocab_size}".encode())
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for _, module in sorted(decoder.named_modules(), key=lambda named: named[0]):
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, torch.Tensor) and not weight.is_meta:
            # In whatever precision it was loaded: bfloat16 is the coarsest that is common.
            rounded = weight.detach().to(device="cpu", dtype=torch.bfloat16).float()
            rounded[rounded.abs() < SMALLEST] = 0
            digest.update(rounded.numpy().tobytes())
    return digest.hexdigest()[:DIGITS]
