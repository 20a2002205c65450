"""What a drafter costs, from its shape alone: bytes and floating-point operations. No torch."""

from math import prod

from eyas.drafter.config import DrafterConfig
from eyas.drafter.tensors import expected_tensors

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def kv_bytes_per_token(config: DrafterConfig, dtype: str) -> int:
    """Keys and values of one token over all layers."""
    return config.num_hidden_layers * config.cached.numbers * BYTES_PER_ELEMENT[dtype]


def flops_per_token(config: DrafterConfig, *, context: int, with_fusion: bool) -> int:
    """Multiply-adds count two. `with_fusion` is depth 0, the only depth that runs fc."""
    left_out = {"embed_tokens.weight"} | (set() if with_fusion else {"fc.weight"})
    matrices = sum(
        2 * prod(spec.shape)
        for name, spec in expected_tensors(config).items()
        if len(spec.shape) == 2 and name not in left_out
    )
    return matrices + context * attention_flops(config)


def attention_flops(config: DrafterConfig) -> int:
    """Of one token that sees one other: its scores and mixed values over all layers."""
    size = config.cached.key_dim + config.cached.value_dim
    return 2 * config.num_attention_heads * size * config.num_hidden_layers


def remembering_weights(config: DrafterConfig) -> int:
    """Weights of the first layer that make what later tokens see of a token."""
    made = config.cached.key_dim if config.mla is not None else config.cached.numbers
    return 2 * config.hidden_size * made
