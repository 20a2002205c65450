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

_TYPE = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
# `finetuned` tells whether the model was trained with the scaling; it changes nothing in the mathematics.
ROPE_KEYS = frozenset(
    {"rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned", _TYPE, _FACTOR, _ORIGINAL, *_YARN}
)

# GGUF keeps the resulting factors of Llama 3's scaling and not its parameters; these are the published ones.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(source: GgufFile, architecture: str, head_dim: int) -> dict[str, object]:
    """Return `rope_parameters` as transformers 5 writes them in config.json."""
    theta = source.optional(f"{architecture}.rope.freq_base", float, 10000.0)
    rotated = source.optional(f"{architecture}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise UserError(
            f"{source.path} rotates {rotated} of {head_dim} dimensions of a head; from GGUF only full rotation "
            "is supported, use the model's safetensors folder instead"
        )
    scaling = source.optional(f"{architecture}.{_TYPE}", str, "none")
    factor = source.optional(f"{architecture}.{_FACTOR}", float, 1.0)
    if ROPE_FREQS in source.shapes:
        if scaling != "none" or architecture != "llama":
            raise UserError(
                f"{source.path} has both {ROPE_FREQS} and {scaling} scaling in a {architecture} model, "
                "which eyas does not understand; use the model's safetensors folder instead"
            )
        return {"rope_theta": theta, **_llama3(source, theta, head_dim)}
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling == "yarn":
        betas = {
            name: source.required(f"{architecture}.{key}", float)
            for key, name in _YARN.items()
            if f"{architecture}.{key}" in source.keys
        }
        original = source.required(f"{architecture}.{_ORIGINAL}", int)
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            **betas,
        }
    raise UserError(
        f"{source.path} has rotary scaling {scaling!r}; supported are none, linear, yarn and Llama 3's, "
        "use the model's safetensors folder instead"
    )


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
