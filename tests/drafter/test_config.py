"""Inconsistent configurations of drafters are refused."""

import pytest

from each import each
from eyas.drafter.config import DrafterConfig
from eyas.drafter.layouts import LAYOUTS
from eyas.errors import UserError
from tiny import drafter_config

SIZES = (
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "num_aux_hidden_states",
    "max_position_embeddings",
)
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "attention_bias", "mlp_bias")
ROPES = (
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
)


@each("name", SIZES)
@each("value", [0, -1, 1.0, "64", None, True, [64], 2**31])
def test_a_size_is_a_whole_number_from_one(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is .*; it must be a whole number from 1"):
        drafter_config(**{name: value})


@each("name", FLAGS)
@each("value", [None, 0, 1, "true"])
def test_a_flag_is_true_or_false(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}; it must be true or false"):
        drafter_config(**{name: value})


@each("name", ["rms_norm_eps", "logit_scale"])
@each("value", [0, -1.0, float("nan"), float("inf"), "1e-5", None, True])
def test_a_scale_is_a_finite_number_above_zero(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} is .*; it must be a number above 0"):
        drafter_config(**{name: value})


@each(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 97}, "draft_vocab_size 97 exceeds vocab_size 96; .* at most that"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "heads 3 is not a multiple of num_key_value_heads 2"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of float32, bfloat16, float16"),
        ({"aux_layer_ids": (1, 2)}, r"2 auxiliary layer ids \[1, 2\] but num_aux_hidden_states is 3"),
        ({"aux_layer_ids": (3, 2, 1)}, r"\[3, 2, 1\] are not strictly ascending; .* sort the ids"),
        ({"aux_layer_ids": (1, 1, 2)}, "not strictly ascending"),
        ({"aux_layer_ids": (-1, 1, 2)}, "whole numbers from 0"),
        ({"aux_layer_ids": (False, 1, 2)}, "whole numbers from 0"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        drafter_config(**changes)


@each("rope", ROPES)
def test_known_ropes_are_taken_and_each_needs_its_keys(rope: dict[str, object]) -> None:
    drafter_config(rope_parameters=rope)
    for key in rope.keys() - {"rope_type", "truncate"}:
        without = {k: v for k, v in rope.items() if k != key}
        with pytest.raises(UserError, match=f"lacks {key}"):
            drafter_config(rope_parameters=without)
        for bad in (0, -2.0, "4", None, [4], float("inf")):
            with pytest.raises(UserError, match=f"rope_parameters.{key} is "):
                drafter_config(rope_parameters={**rope, key: bad})


@each("kind", ["dynamic", "longrope", "mrope", None])
def test_ropes_that_readers_compute_differently_are_refused(kind: object) -> None:
    with pytest.raises(UserError, match=f"rope_type '{kind}' is not one of default, linear, llama3, yarn"):
        drafter_config(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


@each(
    ("extra", "message"),
    [
        ({"factor": 2.0}, "rope_type 'default' does not take factor"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "truncate": 1}, "truncate is 1"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": "x"},
            "beta_fast is 'x'",
        ),
    ],
)
def test_rope_keys_are_known_and_numbers(extra: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        drafter_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **extra})


@each(
    ("flags", "family"),
    [
        ({}, "EAGLE-3"),
        ({"fc_norm": True, "norm_output": True}, "EAGLE-3.1"),
        ({"fc_norm": True}, "EAGLE-3 with fc_norm"),
        ({"norm_output": True}, "EAGLE-3 with norm_output"),
        ({"norm_before_fc": True}, "EAGLE-3"),
    ],
)
def test_the_two_flags_together_are_called_3_1(flags: dict[str, object], family: str) -> None:
    assert drafter_config(**flags).family == family


def written(**changes: object) -> dict[str, object]:
    return {**LAYOUTS["vllm"].write_config(drafter_config(), {}), **changes}


def read(raw: dict[str, object]) -> DrafterConfig:
    return LAYOUTS["vllm"].read_config(raw)[0]


@each(
    ("key", "nearest"),
    [
        ("norm_outputs", "norm_output"),
        ("draft_vocabulary_size", "draft_vocab_size"),
        ("target_hidden_sizes", "target_hidden_size"),
        ("fc_norms", "fc_norm"),
        ("eagle_aux_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_an_unknown_key_names_the_nearest_match(key: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}' in config.json .*did you mean '{nearest}'"):
        read(written(**{key: 7}))


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(UserError, match=r"unknown key 'zzz' in config.json \(value 7\); remove it if"):
        read(written(zzz=7))


def test_the_defaults_of_absent_keys() -> None:
    raw = written()
    for key in ("head_dim", "num_key_value_heads", "draft_vocab_size", "target_hidden_size", "fc_norm", "torch_dtype"):
        del raw[key]
    config = read(raw)
    assert (config.head_dim, config.num_key_value_heads) == (32, 2)
    assert (config.draft_vocab_size, config.target_hidden_size) == (96, 64)
    assert (config.fc_norm, config.dtype) == (False, "bfloat16")
