"""What config.json says of a drafter's layers, under the same keys in every format, and which of its keys are known.

Invariant: keys that mean nothing here are carried along as extras, keys that nobody knows are refused, because an
unknown key may change the mathematics.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_kinds import Json, LayerKind, kind_of
from eyas.errors import UserError

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
QUANTIZATION_KEY = "quantization_config"
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")

# Config fields that stand under their own name in config.json (speculators nests those of the layer).
_LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "num_aux_hidden_states",
    "rms_norm_eps",
    "logit_scale",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
)
DRAFTER_FIELDS = ("draft_vocab_size", "target_hidden_size", *NORM_FLAGS)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")
CONSUMED = frozenset(
    {
        *_LAYER_FIELDS,
        *DRAFTER_FIELDS,
        *_ROPE_FIELDS,
        IDS_KEY,
        "eagle_config",
        "architectures",
        "model_type",
        "hidden_act",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
    }
)
# Keys that change nothing a drafter computes, beyond those every transformers config carries: `layer_types` only with
# the values that `layer_values` lets pass. What `quantization_config` says is read with the tensors.
_HARMLESS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "layer_types",
        "max_window_layers",
        "pretraining_tp",
        QUANTIZATION_KEY,
        "sliding_window",
        "use_sliding_window",
        "eyas_source",
        # What transformers writes beside a Llama's sizes.
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)


def layer_values(raw: Json, kind: LayerKind) -> Json:
    """Values of a `DrafterConfig` that are said of layers."""
    missing = [key for key in _REQUIRED if raw.get(key) is None]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}; add what the drafter was trained with")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"hidden_act is {raw['hidden_act']!r}; vLLM and eyas run drafters with 'silu' only: use such a one"
        )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"layer_types is {kinds!r}; eyas runs drafters with 'full_attention' layers: use such a one")
    values = {key: raw[key] for key in _LAYER_FIELDS if raw.get(key) is not None}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values |= kind.read(raw)
    values["rope_parameters"] = _read_rope(raw)
    values["dtype"] = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    return values


def _read_rope(raw: Json) -> Json:
    """One dict from either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_parameters is {rope!r}; it must be an object such as {{'rope_type': 'default'}}")
    rope = dict(rope)
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
        del rope["type"]
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    return rope


def build_config(values: Json) -> DrafterConfig:
    """The config of these values."""
    values.setdefault("draft_vocab_size", values["vocab_size"])
    values.setdefault("target_hidden_size", values["hidden_size"])
    known = {f.name for f in fields(DrafterConfig)}
    return DrafterConfig(**{key: value for key, value in values.items() if key in known})


def refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Refuse keys that nobody knows."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it if it changes nothing the drafter computes"
            raise UserError(f"unknown key {key!r} in {where} (value {given[key]!r}); {hint}")


def known_keys(given: Mapping[str, Any], kind: LayerKind) -> frozenset[str]:
    """Keys that are read or mean nothing. Importing transformers takes seconds: it is asked about strange keys only."""
    known = CONSUMED | _HARMLESS | kind.keys | kind.ignored
    if given.keys() <= known:
        return known
    import transformers

    theirs: dict[str, Any] = getattr(transformers, kind.transformers_config)().to_dict()
    return known | theirs.keys()


def layer_json(config: DrafterConfig) -> Json:
    """What `layer_values` reads."""
    rope = dict(config.rope_parameters)
    layer = {key: getattr(config, key) for key in _LAYER_FIELDS}
    if config.logit_scale == 1.0:
        del layer["logit_scale"]
    layer |= {"hidden_act": "silu", "rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    layer |= kind_of(config).write(config)
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return layer
