"""Formats of a drafter on disk: tensor names and config.json of vLLM, SGLang and speculators.

- `vllm`: `LlamaForCausalLMEagle3`, or the architecture of other layers (`layer_json.py`), with `midlayer.`; SafeAILab,
  SpecForge and vLLM write and read it. `layers.0.` is read too, and written if there are several layers. `eagle1.py`
  has EAGLE-1 drafters.
- `sglang`: like `vllm`, but SGLang counts auxiliary layers differently (see `_read_aux_ids`).
- `speculators`: nested config, `layers.N.`.

Invariant: reading what a layout wrote gives back the same config and extras.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from eyas.drafter.config import DrafterConfig
from eyas.drafter.eagle1 import is_eagle1, is_sglangs, read_eagle1, write_eagle1
from eyas.drafter.layer_json import (
    CONSUMED,
    DRAFTER_FIELDS,
    IDS_KEY,
    LAYER_KINDS,
    Json,
    LayerKind,
    build_config,
    kind_of,
    known_keys,
    layer_json,
    refuse_unknown,
)
from eyas.errors import UserError

_SPECULATORS_TOP = frozenset(
    {
        *DRAFTER_FIELDS,
        IDS_KEY,
        "architectures",
        "auto_map",
        "dtype",
        "embed_requires_grad",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
        "transformer_layer_config",
        "transformers_version",
    }
)
_EAGLE_CONFIG_KEYS = frozenset({IDS_KEY, "norm_before_fc", "use_aux_hidden_state"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A format: its tensor names, and how its config.json is read and written."""

    name: str
    midlayer: bool = True
    """Whether the first layer is stored as `midlayer` if there is only one."""
    later_hidden_norm: bool = False
    """Whether the input norm of later layers is stored as `hidden_norm` too, for SGLang."""
    read_config: Callable[[Json], tuple[DrafterConfig, Json]]
    write_config: Callable[[DrafterConfig, Json], Json]
    not_quantised: str = ""
    """Why its servers cannot run a quantised drafter; empty if they can."""

    def canonical_name(self, stored: str) -> str:
        name = re.sub(r"^midlayer\.", "layers.0.", stored)
        # SGLang stores the input norm of later layers as `hidden_norm`, vLLM as `input_layernorm`; both load either.
        return re.sub(r"^(layers\.[1-9]\d*\.)hidden_norm\.", r"\1input_layernorm.", name) if self.midlayer else name

    def stored_names(self, canonical: str, config: DrafterConfig) -> set[str]:
        name = canonical
        if self.midlayer and config.num_hidden_layers == 1 and not config.eagle1:
            name = re.sub(r"^layers\.0\.", "midlayer.", name)
        twin = re.sub(r"^(layers\.[1-9]\d*\.)input_layernorm\.", r"\1hidden_norm.", name)
        return {name, twin} if self.later_hidden_norm else {name}


def detect(raw: Json) -> Layout:
    """Return the format of a config.json."""
    if "speculators_model_type" in raw or "speculators_config" in raw:
        return LAYOUTS["speculators"]
    if is_sglangs(raw):
        return LAYOUTS["sglang"]
    top, eagle = raw.get(IDS_KEY), raw.get("eagle_config")
    nested = eagle.get(IDS_KEY) if isinstance(eagle, dict) else None
    if _whole_numbers(top) and _whole_numbers(nested) and [i - 1 for i in top] == nested:
        return LAYOUTS["sglang"]
    return LAYOUTS["vllm"]


def _whole_numbers(ids: object) -> TypeGuard[list[int]]:
    """Whether `ids` is a list of one or more whole numbers; bool is none."""
    return isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)


def _read_eagle3(raw: Json, *, sglang: bool) -> tuple[DrafterConfig, Json]:
    if is_eagle1(raw):
        return read_eagle1(raw)
    kind = _kind_named(raw)
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise UserError(f"eagle_config is {eagle!r}; it must be an object or absent: correct it")
    refuse_unknown(eagle, _EAGLE_CONFIG_KEYS, "eagle_config")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UserError(
            f"eagle_config.use_aux_hidden_state is {eagle['use_aux_hidden_state']!r}: this drafter has EAGLE-3's layer "
            "behind the target's last state; eyas runs EAGLE-3 drafters that fuse auxiliary states: use one"
        )
    refuse_unknown(raw, known_keys(raw, kind), "config.json")
    source = raw.get("eyas_source", {})
    if not isinstance(source, dict):
        raise UserError(f"eyas_source is {source!r}; it must be an object as `eyas convert` writes it: remove it")
    refuse_unknown(source, frozenset(_SPECULATORS_SOURCE), "eyas_source")
    said = {"norm_before_fc": eagle["norm_before_fc"]} if "norm_before_fc" in eagle else {}
    ids = _read_aux_ids(raw.get(IDS_KEY), eagle.get(IDS_KEY), sglang=sglang)
    config = build_config(raw, kind, raw, aux_layer_ids=ids, **said)
    return config, {key: value for key, value in raw.items() if key not in CONSUMED | kind.keys}


def _read_aux_ids(top: object, nested: object, *, sglang: bool) -> tuple[int, ...] | None:
    """Read auxiliary layer ids as numbers of finished layers.

    vLLM reads the top-level list so, and its older runners the nested one. SGLang reads the nested list only, as
    indices of the layer whose OUTPUT is taken: one less. In a file with both lists, they show which is meant.
    """
    for where, ids in (("", top), ("eagle_config.", nested)):
        if ids not in (None, []) and not _whole_numbers(ids):
            raise UserError(f"{where}{IDS_KEY} is {ids!r}; it must be a list of whole numbers: correct it")
    if _whole_numbers(top):
        if _whole_numbers(nested) and nested not in (top, [i - 1 for i in top]):
            raise UserError(
                f"{IDS_KEY} is {top} at top level but {nested} in eagle_config; servers read one or the other, "
                "so write the ids the drafter was trained with in both"
            )
        return tuple(top)
    if _whole_numbers(nested):
        return tuple(i + 1 for i in nested) if sglang else tuple(nested)
    return None


def _read_speculators(raw: Json) -> tuple[DrafterConfig, Json]:
    model_type = raw.get("speculators_model_type")
    if model_type != "eagle3":
        hint = "; read the EAGLE-1 drafter that it was converted from" if model_type == "eagle" else ": use such a one"
        raise UserError(f"speculators_model_type is {model_type!r}; eyas and vLLM read 'eagle3' drafters{hint}")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(
            f"transformer_layer_config is {layer!r}; a speculators config.json needs it as an object: export it again"
        )
    layer_type = layer.get("model_type", "llama")
    layer_kind = next((kind for kind in LAYER_KINDS.values() if layer_type in kind.model_types), None)
    if layer_kind is None or "speculators" in layer_kind.not_in:
        known = [name for name, one in LAYER_KINDS.items() if "speculators" not in one.not_in]
        raise UserError(
            f"transformer_layer_config.model_type is {layer_type!r}; eyas runs speculators drafters with layers of "
            f"{' or '.join(known)}: use such a one"
        )
    if raw.get("norm_before_residual") is None:
        raise UserError(
            "norm_before_residual is missing: vLLM would assume true and speculators false; "
            "write the value the drafter was trained with into config.json"
        )
    refuse_unknown(raw, _SPECULATORS_TOP, "config.json")
    refuse_unknown(layer, known_keys(layer, layer_kind), "transformer_layer_config")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    ids = _read_aux_ids(raw.get(IDS_KEY), None, sglang=False)
    config = build_config(layer, layer_kind, raw, aux_layer_ids=ids, **({"dtype": dtype} if dtype else {}))
    extras = {key: value for key, value in layer.items() if key not in CONSUMED | layer_kind.keys}
    source = {key: value for key, value in raw.items() if key in _SPECULATORS_SOURCE}
    if source != _speculators_source({}):
        extras["eyas_source"] = source
    return config, extras


def _kind_named(raw: Json) -> LayerKind:
    architectures = raw.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    kind = next((kind for kind in LAYER_KINDS.values() if any(name in kind.architectures for name in named)), None)
    if kind is None:
        known = [one.architectures[0] for one in LAYER_KINDS.values()]
        raise UserError(
            f"config.json says architectures {architectures!r}; an EAGLE-3 drafter says one of {', '.join(known)}. "
            "Is this path the target instead of its drafter?"
        )
    if raw.get("model_type", kind.model_types[0]) not in kind.model_types:
        raise UserError(
            f"config.json says model_type {raw['model_type']!r} beside architectures {architectures!r}, whose layers "
            f"are of {' or '.join(kind.model_types)}; write what the drafter was trained as"
        )
    return kind


def _write_eagle3(config: DrafterConfig, extras: Json, *, sglang: bool) -> Json:
    """Write every flag and id in every place where a server reads it."""
    if config.eagle1:
        return write_eagle1(config, extras, sglang=sglang)
    kind = kind_of(config)
    written = {
        **extras,
        "architectures": [kind.architectures[0]],
        "model_type": kind.model_types[0],
        **layer_json(config),
        **{key: getattr(config, key) for key in DRAFTER_FIELDS},
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        ids = list(config.aux_layer_ids)
        written[IDS_KEY] = ids
        written["eagle_config"] = {
            "use_aux_hidden_state": True,
            IDS_KEY: [i - 1 for i in ids] if sglang else ids,
        }
    return written


def _write_sglang(config: DrafterConfig, extras: Json) -> Json:
    kind_of(config).require_layout("sglang")
    if config.mla is not None and config.num_hidden_layers > 1:
        raise UserError(
            f"the drafter has {config.num_hidden_layers} layers, and SGLang's latent-attention drafters have one; "
            "use --to vllm"
        )
    if config.mla is not None and config.mla.q_lora_rank is None:
        raise UserError("q_lora_rank is null, and SGLang's latent-attention drafters need one; use --to vllm")
    for flag, reason in (
        ("norm_before_residual", "SGLang always adds the residual before the norm"),
        ("attention_bias", "SGLang's drafter has no attention bias"),
        ("mlp_bias", "SGLang's drafter has no feed-forward bias"),
    ):
        if getattr(config, flag):
            raise UserError(f"{flag} is true and SGLang cannot serve that: {reason}; serve it with vLLM or eyas")
    if config.logit_scale != 1.0:
        raise UserError(f"logit_scale is {config.logit_scale} and SGLang ignores it; serve with vLLM or eyas")
    return _write_eagle3(config, extras, sglang=True)


_SPECULATORS_SOURCE = ("speculators_config", "speculators_version", "embed_requires_grad")


def _speculators_source(extras: Json) -> Json:
    """Return the keys that only speculators knows: as they were read, or their defaults."""
    if "eyas_source" in extras:
        return dict(extras["eyas_source"])
    return {
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        }
    }


def name_verifier(extras: Json, target: str) -> Json:
    """Return extras that name the target in a speculators export; the speculators library loads none without."""
    source = _speculators_source(extras)
    source["speculators_config"] = {
        **source["speculators_config"],
        "verifier": {**source["speculators_config"]["verifier"], "name_or_path": target},
    }
    return {**extras, "eyas_source": source}


def names_verifier(extras: Json) -> bool:
    """Whether a speculators export with these extras would name its target."""
    return _speculators_source(extras)["speculators_config"]["verifier"]["name_or_path"] is not None


def _write_speculators(config: DrafterConfig, extras: Json) -> Json:
    kind = kind_of(config)
    kind.require_layout("speculators")
    if config.eagle1:
        raise UserError("the drafter is EAGLE-1, which vLLM does not read as speculators writes it; use --to vllm")
    if config.fc_norm and config.norm_before_fc:
        raise UserError("fc_norm and norm_before_fc are both true; speculators allows one of them: use --to vllm")
    if config.hidden_size != config.target_hidden_size:
        raise UserError(
            f"hidden_size {config.hidden_size} differs from target_hidden_size {config.target_hidden_size}; "
            "speculators needs them equal: use --to vllm"
        )
    layer_extras = {key: value for key, value in extras.items() if key != "eyas_source"}
    written: Json = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **_speculators_source(extras),
        # vLLM starts from this object: it reads num_aux_hidden_states here and nowhere else.
        "transformer_layer_config": {**layer_extras, "model_type": kind.model_types[0], **layer_json(config)},
        **{key: getattr(config, key) for key in DRAFTER_FIELDS},
        "tie_word_embeddings": False,
        "torch_dtype": config.dtype,
    }
    if config.aux_layer_ids is not None:
        written[IDS_KEY] = list(config.aux_layer_ids)
    return written


LAYOUTS: Mapping[str, Layout] = {
    "vllm": Layout(
        name="vllm",
        read_config=lambda raw: _read_eagle3(raw, sglang=False),
        write_config=lambda config, extras: _write_eagle3(config, extras, sglang=False),
    ),
    "sglang": Layout(
        name="sglang",
        later_hidden_norm=True,
        read_config=lambda raw: _read_eagle3(raw, sglang=True),
        write_config=_write_sglang,
        not_quantised="SGLang's fc is a plain linear, which would take 8-bit weights for the weights themselves",
    ),
    "speculators": Layout(
        name="speculators", midlayer=False, read_config=_read_speculators, write_config=_write_speculators
    ),
}
