"""Bytes and FLOPs of a drafter equal those of the built module and a count by hand."""

from dataclasses import replace
from math import prod

from each import each
from eyas.drafter.config import DrafterConfig, LatentSizes
from eyas.drafter.cost import flops_per_token, kv_bytes_per_token
from eyas.drafter.eagle1_model import new_drafter
from eyas.drafter.tensors import WEIGHT_DTYPES, expected_tensors
from tiny import drafter_config

LATENT = LatentSizes(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=16)
CONFIGS: list[dict[str, object]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"num_hidden_layers": 3},
    {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    {"draft_vocab_size": 32},
    {"hidden_size": 32, "head_dim": 8},
    {"num_aux_hidden_states": 5, "aux_layer_ids": None, "fc_norm": True},
    {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
    {"qk_norm": True, "num_hidden_layers": 2},
    {"mla": LATENT, "num_key_value_heads": 2, "head_dim": 20},
    {"mla": replace(LATENT, q_lora_rank=None), "num_key_value_heads": 2, "head_dim": 20, "num_hidden_layers": 2},
]


def parameter_count(config: DrafterConfig, *, own_embedding: bool = False, own_head: bool = True) -> int:
    """By the table of tensors: weights the drafter holds itself."""
    lent = (set() if own_embedding else {"embed_tokens.weight"}) | (set() if own_head else {"lm_head.weight"})
    tensors = expected_tensors(config).items()
    return sum(prod(spec.shape) for name, spec in tensors if spec.dtypes == WEIGHT_DTYPES and name not in lent)


@each("own_embedding", [False, True])
@each("own_head", [False, True])
@each("changes", CONFIGS)
def test_the_parameter_count_equals_the_modules(
    changes: dict[str, object], own_embedding: bool, own_head: bool
) -> None:
    config = drafter_config(**changes)
    built = new_drafter(config, own_embedding=own_embedding, own_head=own_head)
    counted = parameter_count(config, own_embedding=own_embedding, own_head=own_head)
    assert counted == sum(parameter.numel() for parameter in built.parameters())


def test_parameters_by_hand() -> None:
    # H = 64, 2 heads and 1 key head of 32, feed-forward 128, three states of 64, 96 tokens
    attention = 64 * 128 + 32 * 128 + 32 * 128 + 64 * 64
    by_hand = 64 * 192 + attention + 3 * 64 * 128 + 3 * 64 + 64 + 96 * 64
    assert parameter_count(drafter_config()) == by_hand


@each(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@each("layers", [1, 2])
def test_a_token_keeps_keys_and_values_in_every_layer(dtype: str, size: int, layers: int) -> None:
    assert kv_bytes_per_token(drafter_config(num_hidden_layers=layers), dtype) == 2 * layers * 32 * size


def test_a_token_keeps_one_latent_for_all_heads() -> None:
    config = drafter_config(mla=LATENT, num_key_value_heads=2, head_dim=20)
    assert kv_bytes_per_token(config, "bfloat16") == 2 * (24 + 8 + 24)
    # Two heads, each of which compares with 32 numbers of a token and mixes 24.
    seen = flops_per_token(config, context=1, with_fusion=False) - flops_per_token(config, context=0, with_fusion=False)
    assert seen == 2 * 2 * (32 + 24)


def test_flops_by_hand() -> None:
    config = drafter_config()
    # multiply-adds: q, k, v read 128 wide, o writes 64; feed-forward thrice 64 x 128; head 96 x 64
    matrices = 2 * ((64 + 32 + 32) * 128 + 64 * 64 + 3 * 64 * 128 + 96 * 64)
    assert flops_per_token(config, context=0, with_fusion=False) == matrices
    # scores and the weighted sum: 2 heads of 32, two operations each, over 10 keys
    assert flops_per_token(config, context=10, with_fusion=False) == matrices + 10 * 2 * 2 * (2 * 32)
    assert flops_per_token(config, context=0, with_fusion=True) == matrices + 2 * 64 * 192


def test_flops_of_a_second_layer_by_hand() -> None:
    one, two = (flops_per_token(drafter_config(num_hidden_layers=n), context=5, with_fusion=True) for n in (1, 2))
    assert two - one == 2 * ((64 + 32 + 32) * 64 + 64 * 64 + 3 * 64 * 128) + 5 * 2 * 2 * (2 * 32)


def test_neither_embeddings_nor_norms_nor_tables_count_as_flops() -> None:
    plain = flops_per_token(drafter_config(), context=3, with_fusion=True)
    normed = flops_per_token(drafter_config(fc_norm=True, norm_before_fc=True), context=3, with_fusion=True)
    assert plain == normed
    pruned = flops_per_token(drafter_config(draft_vocab_size=32), context=3, with_fusion=True)
    assert plain - pruned == 2 * (96 - 32) * 64
