"""What a drafter costs, from its shape alone: bytes and floating-point operations. No torch."""

from dataclasses import dataclass
from math import prod

from eyas.drafter.config import DrafterConfig
from eyas.drafter.tensors import expected_tensors

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def kv_bytes_per_token(config: DrafterConfig, dtype: str) -> int:
    """Keys and values of one token over all layers."""
    return config.num_hidden_layers * config.cached.numbers * BYTES_PER_ELEMENT[dtype]


@dataclass(frozen=True, kw_only=True)
class MatrixSizes:
    """Weights that a token is multiplied by, wherever they come from."""

    fusion: int
    """At depth 0 only; EAGLE-1 runs fc at every depth, and fuses nothing."""
    every_depth: int
    head: int


def matrix_sizes(config: DrafterConfig) -> MatrixSizes:
    """Of a drafter of this shape."""
    sizes = {name: prod(spec.shape) for name, spec in expected_tensors(config).items() if len(spec.shape) == 2}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        sizes.pop(name, None)
    fusion = 0 if config.eagle1 else sizes.pop("fc.weight")
    head = config.draft_vocab_size * config.hidden_size
    return MatrixSizes(fusion=fusion, every_depth=sum(sizes.values()), head=head)


def flops_per_token(config: DrafterConfig, *, context: int, with_fusion: bool) -> int:
    """Multiply-adds count two. `with_fusion` is depth 0, the only depth at which states are fused."""
    sizes = matrix_sizes(config)
    multiplied = sizes.every_depth + sizes.head + (sizes.fusion if with_fusion else 0)
    return 2 * multiplied + context * attention_flops(config)


def attention_flops(config: DrafterConfig) -> int:
    """Of one token that sees one other: its scores and mixed values over all layers."""
    size = config.cached.key_dim + config.cached.value_dim
    return 2 * config.num_attention_heads * size * config.num_hidden_layers


def remembering_weights(config: DrafterConfig) -> int:
    """Weights, behind the fusion of states, that make what later tokens see of a token."""
    made = config.cached.key_dim if config.mla is not None else config.cached.numbers
    both = 2 * config.hidden_size
    return both * config.hidden_size + config.hidden_size * made if config.eagle1 else both * made
