"""The layers of a drafter in config.json, under the same keys in every format: kinds of layers, and known keys.

    llama         attention with one projection each for queries, keys and values
    qwen3         like llama, and each head's queries and keys are normed before rotation (`qk_norm`)
    deepseek_v2   multi-head latent attention (`mla`); the rest is Llama's, and keys about experts are ignored

Invariant: keys that change nothing are kept as extras; unknown keys are refused, for they may change the mathematics.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eyas.drafter.config import DrafterConfig, LatentSizes
from eyas.errors import UserError

Json = dict[str, Any]

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
QUANTIZATION_KEY = "quantization_config"
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")

DRAFTER_FIELDS = ("draft_vocab_size", "target_hidden_size", *NORM_FLAGS)
_SPELT_OTHERWISE = ("aux_layer_ids", "qk_norm", "mla", "eagle1", "fc_bias", "rope_parameters", "dtype")
# Config fields under their own name in config.json; speculators nests them in `transformer_layer_config`.
_LAYER_FIELDS = tuple(f.name for f in fields(DrafterConfig) if f.name not in (*DRAFTER_FIELDS, *_SPELT_OTHERWISE))
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
# Keys that change nothing: `_layer_values` checks `layer_types`, and `quantization_config` is read with the tensors.
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
        # Keys that transformers writes for a Llama.
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


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """A kind of layers: its names, and its own keys in config.json."""

    name: str
    architectures: tuple[str, ...]
    """Names of drafters with such layers; the first is written."""
    model_types: tuple[str, ...]
    """Names of the layers; the first is written."""
    transformers_config: str
    """The class of transformers whose keys may be in config.json."""
    keys: frozenset[str] = frozenset()
    """Keys that are read for this kind only."""
    ignored: frozenset[str] = frozenset()
    """Keys that change nothing in a drafter, and that the class does not have."""
    read: Callable[[Json], Json]
    write: Callable[[DrafterConfig], Json] = lambda config: {}
    """Returns the keys of this kind only."""
    not_in: Mapping[str, str]
    """Formats whose servers cannot run it, and why."""

    def require_layout(self, layout: str) -> None:
        if layout in self.not_in:
            raise UserError(
                f"the drafter has {self.name} layers, and {self.not_in[layout]}; use --to vllm, or serve it with eyas"
            )


def _read_llama(raw: Json) -> Json:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    if raw.get("head_dim") is not None:
        return {}
    # If heads or width are not numbers, DrafterConfig reports them before head_dim.
    whole = type(heads) is int and type(hidden) is int and heads > 0
    return {"head_dim": hidden // heads if whole else 0}


def _read_qwen3(raw: Json) -> Json:
    # 128 is the default of transformers' Qwen3Config, which vLLM uses.
    return {"qk_norm": True, "head_dim": 128 if raw.get("head_dim") is None else raw["head_dim"]}


_LATENT = tuple(item.name for item in fields(LatentSizes))
# Keys about experts in published configs that transformers does not know; a drafter has no experts.
_EXPERTS = frozenset({"aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux", "topk_method"})


def _read_deepseek(raw: Json) -> Json:
    missing = [key for key in _LATENT if key not in raw or (raw[key] is None and key != "q_lora_rank")]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}; add what the drafter was trained with")
    if raw.get("index_topk") is not None:
        raise UserError(
            f"index_topk is {raw['index_topk']!r}: this drafter attends to chosen tokens only, as DeepSeek V3.2 does; "
            "eyas runs drafters that attend to all: use such a one"
        )
    if raw.get("rope_interleave", True) is not True:
        raise UserError(
            f"rope_interleave is {raw['rope_interleave']!r}; vLLM and SGLang turn neighbours as a pair whatever it "
            "says: permute the rows of the turned parts and set it to true"
        )
    mla = LatentSizes(**{key: raw[key] for key in _LATENT})
    said = raw.get("head_dim")
    if said is not None and said not in (mla.qk_rope_head_dim, mla.qk_head_dim):
        raise UserError(
            f"head_dim is {said!r} beside qk_nope_head_dim {mla.qk_nope_head_dim} and qk_rope_head_dim "
            f"{mla.qk_rope_head_dim}, which say what a head is; leave it out"
        )
    return {"mla": mla, "head_dim": mla.qk_head_dim}


def _write_deepseek(config: DrafterConfig) -> Json:
    assert config.mla is not None
    # In transformers, head_dim is the part with rotation.
    return {**asdict(config.mla), "head_dim": config.mla.qk_rope_head_dim, "rope_interleave": True}


LAYER_KINDS: Mapping[str, LayerKind] = {
    "llama": LayerKind(
        name="llama",
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        model_types=("llama",),
        transformers_config="LlamaConfig",
        read=_read_llama,
        not_in={},
    ),
    "qwen3": LayerKind(
        name="qwen3",
        architectures=("Eagle3Qwen3ForCausalLM",),
        model_types=("qwen3",),
        transformers_config="Qwen3Config",
        read=_read_qwen3,
        not_in={"sglang": "SGLang's EAGLE-3 drafters have none with norms of queries and keys"},
    ),
    "deepseek_v2": LayerKind(
        name="deepseek_v2",
        architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        # vLLM 0.32 treats every drafter of type deepseek_v3 as multi-token prediction, and refuses it.
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        transformers_config="DeepseekV3Config",
        keys=frozenset({*_LATENT, "qk_head_dim", "rope_interleave", "index_topk"}),
        ignored=_EXPERTS,
        read=_read_deepseek,
        write=_write_deepseek,
        not_in={"speculators": "speculators' EAGLE-3 drafters have none with latent attention (MLA)"},
    ),
}


def kind_of(config: DrafterConfig) -> LayerKind:
    """Return the kind of a drafter's layers."""
    if config.mla is not None:
        return LAYER_KINDS["deepseek_v2"]
    return LAYER_KINDS["qwen3" if config.qk_norm else "llama"]


def build_config(layer: Json, kind: LayerKind, top: Json, **values: Any) -> DrafterConfig:
    """Build a config from keys of the layers, keys of the drafter in `top`, and `values` that override both."""
    said = {key: top[key] for key in DRAFTER_FIELDS if top.get(key) is not None}
    values = {**_layer_values(layer, kind), **said, **values}
    values.setdefault("draft_vocab_size", values["vocab_size"])
    values.setdefault("target_hidden_size", values["hidden_size"])
    if (ids := values.get("aux_layer_ids")) is not None or values.get("eagle1"):
        values.setdefault("num_aux_hidden_states", len(ids) if ids is not None else 1)
    return DrafterConfig(**values)


def _layer_values(raw: Json, kind: LayerKind) -> Json:
    """Read the values of `DrafterConfig` that belong to layers."""
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
    """Read either spelling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
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


def refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Refuse unknown keys."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it if it changes nothing the drafter computes"
            raise UserError(f"unknown key {key!r} in {where} (value {given[key]!r}); {hint}")


def known_keys(given: Mapping[str, Any], kind: LayerKind) -> frozenset[str]:
    """Return keys that are read or change nothing. transformers, slow to import, is asked about other keys only."""
    known = CONSUMED | _HARMLESS | kind.keys | kind.ignored
    if given.keys() <= known:
        return known
    import transformers

    theirs: dict[str, Any] = getattr(transformers, kind.transformers_config)().to_dict()
    return known | theirs.keys()


def layer_json(config: DrafterConfig) -> Json:
    """Return the keys of the layers, as every format has them."""
    rope = dict(config.rope_parameters)
    layer = {key: getattr(config, key) for key in _LAYER_FIELDS}
    if config.logit_scale == 1.0:
        del layer["logit_scale"]
    layer |= {"hidden_act": "silu", "rope_parameters": rope, "rope_theta": rope["rope_theta"]}
    layer |= kind_of(config).write(config)
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return layer
