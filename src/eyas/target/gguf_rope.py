"""Rotary position settings of a GGUF file in transformers' words.

Invariant: a scaling that is not recognised is an error. Wrong rotary settings give a model that reads fluently
and forgets the start of long prompts, which no later check would catch.
"""

import math

import numpy as np
import numpy.typing as npt

from eyas.errors import UserError
from eyas.target.gguf_file import GgufFile

ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({ROPE_FREQS, _LONG, _SHORT})

_TYPE = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_ATTENTION = "rope.scaling.attn_factor"
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# `finetuned` tells whether the model was trained with the scaling; it changes nothing in the mathematics.
ROPE_KEYS = frozenset(
    {"rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned", _TYPE, _FACTOR, _ORIGINAL, _ATTENTION, *_YARN}
)

# GGUF keeps the resulting factors of Llama 3's scaling and not its parameters; these are the published ones.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(source: GgufFile, architecture: str, head_dim: int) -> dict[str, object]:
    """Return `rope_parameters` as transformers 5 writes them in config.json."""
    theta = source.optional(f"{architecture}.rope.freq_base", float, 10000.0)
    base: dict[str, object] = {"rope_theta": theta, **_partial(source, architecture, head_dim)}
    scaling = source.optional(f"{architecture}.{_TYPE}", str, "none")
    factor = source.optional(f"{architecture}.{_FACTOR}", float, 1.0)
    if _LONG in source.shapes or _SHORT in source.shapes:
        if scaling not in ("none", "longrope") or architecture != "phi3" or ROPE_FREQS in source.shapes:
            raise UserError(
                f"{source.path} has {_LONG} or {_SHORT} beside {scaling} scaling in a {architecture} model, which eyas "
                "does not understand; use the model's safetensors folder instead"
            )
        return {**base, **_longrope(source, architecture)}
    if f"{architecture}.{_ATTENTION}" in source.keys:
        raise UserError(
            f"{source.path} sets {architecture}.{_ATTENTION} without {_LONG}, which eyas does not understand; "
            "use the model's safetensors folder instead"
        )
    if ROPE_FREQS in source.shapes:
        if scaling != "none" or architecture != "llama":
            raise UserError(
                f"{source.path} has both {ROPE_FREQS} and {scaling} scaling in a {architecture} model, "
                "which eyas does not understand; use the model's safetensors folder instead"
            )
        return {**base, **_llama3(source, theta, head_dim)}
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return {**base, "rope_type": "default"}
    if scaling == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        betas = {
            name: source.required(f"{architecture}.{key}", float)
            for key, name in _YARN.items()
            if f"{architecture}.{key}" in source.keys
        }
        original = source.required(f"{architecture}.{_ORIGINAL}", int)
        return {
            **base,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **betas,
        }
    raise UserError(
        f"{source.path} has rotary scaling {scaling!r}; supported are none, linear, yarn, Llama 3's and Phi-3's, "
        "use the model's safetensors folder instead"
    )


def _partial(source: GgufFile, architecture: str, head_dim: int) -> dict[str, object]:
    """How much of a head is rotated, where it is not all of it: some of Phi-3's models do so."""
    rotated = source.optional(f"{architecture}.rope.dimension_count", int, head_dim)
    if rotated == head_dim:
        return {}
    if architecture != "phi3" or not 0 < rotated < head_dim or rotated % 2:
        raise UserError(
            f"{source.path} rotates {rotated} of {head_dim} dimensions of a head; of a {architecture} model in GGUF "
            "only full rotation is supported, use the model's safetensors folder instead"
        )
    return {"partial_rotary_factor": rotated / head_dim}


def _longrope(source: GgufFile, architecture: str) -> dict[str, object]:
    """Factors for short and for long sequences, and what both multiply attention by."""
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


def _llama3(source: GgufFile, theta: float, head_dim: int) -> dict[str, object]:
    stored = source.tensor(ROPE_FREQS)
    factor = round(float(stored.max()), 4)
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, llama3_factors(factor, theta, head_dim), rtol=1e-3):
        raise UserError(
            f"{ROPE_FREQS} of {source.path} is not Llama 3's scaling with the published parameters {_LLAMA3}; "
            "use the model's safetensors folder instead"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Return by what Llama 3's scaling divides each rotary frequency, as llama.cpp stores it."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return factors
