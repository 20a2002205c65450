"""Bytes and floating-point operations of a drafter, from its shape. Imports no torch."""

from dataclasses import dataclass
from math import prod

from eyas.drafter.config import DrafterConfig
from eyas.drafter.tensors import expected_tensors

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def kv_bytes_per_token(config: DrafterConfig, dtype: str) -> int:
    """Bytes of keys and values of one token over all layers."""
    return config.num_hidden_layers * config.cached.numbers * BYTES_PER_ELEMENT[dtype]


@dataclass(frozen=True, kw_only=True)
class MatrixSizes:
    """Number of weights that one token is multiplied by, the drafter's or the target's."""

    fusion: int
    """At depth 0 only; 0 for EAGLE-1, which runs fc at every depth."""
    every_depth: int
    head: int


def matrix_sizes(config: DrafterConfig) -> MatrixSizes:
    """Return the sizes of a drafter of this shape."""
    sizes = {name: prod(spec.shape) for name, spec in expected_tensors(config).items() if len(spec.shape) == 2}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        sizes.pop(name, None)
    fusion = 0 if config.eagle1 else sizes.pop("fc.weight")
    head = config.draft_vocab_size * config.hidden_size
    return MatrixSizes(fusion=fusion, every_depth=sum(sizes.values()), head=head)


def flops_per_token(config: DrafterConfig, *, context: int, with_fusion: bool) -> int:
    """Return the FLOPs of one token; a multiply-add counts two. `with_fusion` is depth 0."""
    sizes = matrix_sizes(config)
    multiplied = sizes.every_depth + sizes.head + (sizes.fusion if with_fusion else 0)
    return 2 * multiplied + context * attention_flops(config)


def attention_flops(config: DrafterConfig) -> int:
    """Return the FLOPs of scores and values for each token that one token sees, over all layers."""
    size = config.cached.key_dim + config.cached.value_dim
    return 2 * config.num_attention_heads * size * config.num_hidden_layers


def remembering_weights(config: DrafterConfig) -> int:
    """Number of weights, after fusion, that compute keys and values of a token."""
    made = config.cached.key_dim if config.mla is not None else config.cached.numbers
    both = 2 * config.hidden_size
    return both * config.hidden_size + config.hidden_size * made if config.eagle1 else both * made
