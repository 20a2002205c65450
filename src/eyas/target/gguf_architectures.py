"""Architectures that are read from GGUF: their keys, and settings in transformers' words.

Invariant: a key or scaling that is not recognised is an error. Wrong rotary settings give a model that reads fluently
and forgets the start of long prompts, which no later check would notice.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.errors import UserError
from eyas.target.gguf_experts import EXPERT_KEYS, expert_settings
from eyas.target.gguf_file import GgufFile

Settings = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF, in transformers' words."""

    permuted: frozenset[str] = frozenset()
    """Tensors of a layer, by their transformers name, whose rows GGUF keeps in interleaved rotary order."""
    model_type: str | None = None
    """transformers' name of the configuration, if it differs from GGUF's."""
    norms_add_one: bool = False
    """Whether norms of transformers multiply by 1 + weight; GGUF stores the sum."""
    keys: frozenset[str] = frozenset()
    """Metadata keys of this architecture only."""
    has_experts: bool = False
    settings: Callable[[GgufFile, Settings], Settings] = lambda source, rope: {"rope_parameters": rope}
    """Configuration values beside those of all architectures, given the file's `rope_parameters`."""


ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({ROPE_FREQS, _LONG, _SHORT})

_TYPE = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_ATTENTION = "rope.scaling.attn_factor"
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# `finetuned` says whether the model was trained with the scaling; it changes nothing in the mathematics.
ROPE_KEYS = frozenset(
    {"rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned", _TYPE, _FACTOR, _ORIGINAL, _ATTENTION, *_YARN}
)

# GGUF keeps the resulting factors of Llama 3's scaling and not its parameters; these are the published ones.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(source: GgufFile, architecture: str, head_dim: int) -> Settings:
    """Return `rope_parameters` as transformers 5 writes them in config.json."""
    theta = source.optional(f"{architecture}.rope.freq_base", float, 10000.0)
    base: Settings = {"rope_theta": theta, **_partial_rotation(source, architecture, head_dim)}
    scaling = source.optional(f"{architecture}.{_TYPE}", str, "none")
    factor = source.optional(f"{architecture}.{_FACTOR}", float, 1.0)
    if _LONG in source.shapes or _SHORT in source.shapes:
        if scaling not in ("none", "longrope") or architecture != "phi3" or ROPE_FREQS in source.shapes:
            raise source.unsupported(
                f"has {_LONG} or {_SHORT} beside {scaling} scaling in a {architecture} model, which eyas does not "
                "understand;"
            )
        return {**base, **_longrope(source, architecture)}
    if f"{architecture}.{_ATTENTION}" in source.keys:
        raise source.unsupported(f"sets {architecture}.{_ATTENTION} without {_LONG}, which eyas does not understand;")
    if ROPE_FREQS in source.shapes:
        if scaling != "none" or architecture != "llama":
            raise source.unsupported(
                f"has both {ROPE_FREQS} and {scaling} scaling in a {architecture} model, which eyas does not "
                "understand;"
            )
        return {**base, **_llama3(source, theta, head_dim)}
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return {**base, "rope_type": "default"}
    if scaling == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        original = source.required(f"{architecture}.{_ORIGINAL}", int)
        yarn = {**base, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        given = {name: f"{architecture}.{key}" for key, name in _YARN.items() if f"{architecture}.{key}" in source.keys}
        return yarn | {name: source.required(key, float) for name, key in given.items()}
    raise source.unsupported(
        f"has rotary scaling {scaling!r}; supported are none, linear, yarn, Llama 3's and Phi-3's,"
    )


def _partial_rotation(source: GgufFile, architecture: str, head_dim: int) -> Settings:
    """Some Phi-3 models rotate a part of each head."""
    rotated = source.optional(f"{architecture}.rope.dimension_count", int, head_dim)
    if rotated == head_dim:
        return {}
    if architecture != "phi3" or not 0 < rotated < head_dim or rotated % 2:
        raise source.unsupported(
            f"rotates {rotated} of {head_dim} dimensions of a head; of a {architecture} model in GGUF only full "
            "rotation is supported,"
        )
    return {"partial_rotary_factor": rotated / head_dim}


def _longrope(source: GgufFile, architecture: str) -> Settings:
    """Phi-3's factors for short and for long sequences."""
    missing = [name for name in (_LONG, _SHORT) if name not in source.shapes]
    if missing:
        raise UserError(f"{source.path} has no tensor {missing[0]}; download or convert it again")
    original = source.required(f"{architecture}.{_ORIGINAL}", int)
    return {
        "rope_type": "longrope",
        "long_factor": [float(str(x)) for x in source.tensor(_LONG)],
        "short_factor": [float(str(x)) for x in source.tensor(_SHORT)],
        "factor": source.required(f"{architecture}.context_length", int) / original,
        "attention_factor": source.required(f"{architecture}.{_ATTENTION}", float),
        "original_max_position_embeddings": original,
    }


def _llama3(source: GgufFile, theta: float, head_dim: int) -> Settings:
    stored = source.tensor(ROPE_FREQS)
    factor = round(float(stored.max()), 4)
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, llama3_factors(factor, theta, head_dim), rtol=1e-3):
        raise UserError(
            f"{ROPE_FREQS} of {source.path} is not Llama 3's scaling with the published parameters {_LLAMA3}; "
            "use the model's safetensors folder instead"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Return the divisor of each rotary frequency in Llama 3's scaling, as llama.cpp stores it."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return factors


# GGUF stores the window and the rotation of layers without a window. llama.cpp hard-codes the rest, which is equal in
# all published models: five layers with a window to one without, and base 10000 without scaling where there is one.
# Newer files may say it by these two keys.
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE = "rope.freq_base_swa"
# Of the published models only the 27B divides the hidden size by its heads; it is known by its number of layers.
_LAYERS_OF_27B = 62


def _gemma3_settings(source: GgufFile, rope: Settings) -> Settings:
    layers = source.required("gemma3.block_count", int)
    heads = source.required("gemma3.attention.head_count", int)
    hidden = source.required("gemma3.embedding_length", int)
    head_dim = source.optional("gemma3.attention.key_length", int, hidden // max(heads, 1))
    local_base = source.optional(f"gemma3.{_LOCAL_BASE}", float, 10000.0)
    slides = _gemma3_pattern(source, layers)
    return {
        "sliding_window": source.required(f"gemma3.{_WINDOW}", int),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
            "full_attention": rope,
        },
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else head_dim,
    }


def _gemma3_pattern(source: GgufFile, layers: int) -> list[bool]:
    """Return which layers have a window; the key is absent, a number or a list."""
    key = f"gemma3.{_PATTERN}"
    said = source.required(key, object) if key in source.keys else 6
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        return [(layer + 1) % said != 0 for layer in range(layers)]
    if isinstance(said, list) and len(said) == layers and all(isinstance(slides, bool) for slides in said):
        return said
    raise UserError(
        f"key {key} of {source.path} is neither a number above 0 nor {layers} truth values; "
        "use the model's safetensors folder instead"
    )


def _phi3_settings(source: GgufFile, rope: Settings) -> Settings:
    settings: Settings = {
        "rope_parameters": rope,
        "sliding_window": source.optional(f"phi3.{_WINDOW}", int, 0) or None,
        # The default of transformers is a token that smaller vocabularies do not have.
        "pad_token_id": source.optional("tokenizer.ggml.padding_token_id", int, None),
    }
    if "original_max_position_embeddings" in rope:
        settings["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return settings


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(permuted=frozenset({"self_attn.q_proj.weight", "self_attn.k_proj.weight"})),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma3": Architecture(
        model_type="gemma3_text",
        norms_add_one=True,
        keys=frozenset({_WINDOW, _PATTERN, _LOCAL_BASE}),
        settings=_gemma3_settings,
    ),
    "phi3": Architecture(keys=frozenset({_WINDOW}), settings=_phi3_settings),
    "qwen3moe": Architecture(model_type="qwen3_moe", keys=EXPERT_KEYS, has_experts=True, settings=expert_settings),
}
