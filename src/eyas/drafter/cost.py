"""What a drafter costs, from its shape alone: bytes and floating-point operations. No torch."""

from math import prod

from eyas.drafter.config import DrafterConfig
from eyas.drafter.tensors import expected_tensors

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def kv_bytes_per_token(config: DrafterConfig, dtype: str) -> int:
    """Keys and values of one token over all layers."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * BYTES_PER_ELEMENT[dtype]


def flops_per_token(config: DrafterConfig, *, context: int, with_fusion: bool) -> int:
    """Multiply-adds count two. `with_fusion` is depth 0, the only depth that runs fc."""
    left_out = {"embed_tokens.weight"} | (set() if with_fusion else {"fc.weight"})
    matrices = sum(
        2 * prod(spec.shape)
        for name, spec in expected_tensors(config).items()
        if len(spec.shape) == 2 and name not in left_out
    )
    attention = 4 * context * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return matrices + attention
