"""Who a target is, by its weights: the same for a folder, a hub id and a GGUF file of one model.

Names do not tell: one model has many, and a folder may hold anything. The weights of the norms do. They are small,
every format keeps them as they are when it quantises the matrices, and hardly two models that were trained apart have
the same. What leaves the norms alone cannot be told from its base: a merged LoRA of the matrices, a quantised variant.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

SMALLEST = 2.0**-12
"""Weights below it count as 0: formats that keep 1 + w, or w in float16, lose digits of them."""
DIGITS = 16


def fingerprint(model: PreTrainedModel) -> str:
    """Sizes and norms of a causal language model in 16 hexadecimal digits."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    weights = [weight for _, weight in norms_of(decoder) if not weight.is_meta]
    return fingerprint_norms(model.config.get_text_config(), weights)


def norms_of(decoder: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The names within a decoder of its norms, in order, and their weights."""
    return [
        (name, module.weight)
        for name, module in sorted(decoder.named_modules(), key=lambda named: named[0])
        if "norm" in type(module).__name__.lower() and isinstance(getattr(module, "weight", None), torch.Tensor)
    ]


def fingerprint_norms(config: PretrainedConfig, weights: Sequence[torch.Tensor]) -> str:
    """The same from a text model's configuration and the weights of its norms, in the order of their names."""
    digest = hashlib.sha256(f"{config.num_hidden_layers} {config.hidden_size} {config.vocab_size}".encode())
    for weight in weights:
        # In whatever precision it was loaded: bfloat16 is the coarsest that is common.
        rounded = weight.detach().to(device="cpu", dtype=torch.bfloat16).float()
        rounded[rounded.abs() < SMALLEST] = 0
        digest.update(rounded.numpy().tobytes())
    return digest.hexdigest()[:DIGITS]
