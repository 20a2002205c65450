"""A drafter's quantised linears, as they lie on disk.

eyas writes W8A8 of compressed-tensors: int8 or fp8, a scale per output, and inputs that are rounded when multiplied
with a scale per token. vLLM's EAGLE-3 drafter takes `quantization_config` from the drafter's own config.json for `fc`,
the projections of its layers and `lm_head`. The head is not quantised here, as in most published checkpoints: it
decides every draft. Embeddings and norms never are.

Reading supports every format of `eyas.quantization`.

Shapes: E outputs, K inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.config import DrafterConfig
from eyas.drafter.layer_json import QUANTIZATION_KEY, Json
from eyas.drafter.tensors import expected_tensors
from eyas.errors import UserError
from eyas.kernels.linear.quantised_weight import QuantisedWeight, quantise_float8, quantise_int8
from eyas.quantization.quantization_config import weight_scheme
from eyas.quantization.weight_format import WeightScheme

KINDS = ("int8", "fp8")
"""Kinds that linears can be written in."""
_LEFT_ALONE = ("embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedLinears:
    """The quantised linears of a drafter, by canonical name ("fc")."""

    said: Json
    """`quantization_config` of config.json."""
    scheme: WeightScheme
    stored: Mapping[str, Tensor]
    """Their tensors except biases, as on disk, by canonical name ("fc.weight_scale")."""
    weights: Mapping[str, QuantisedWeight]

    def dequantised(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Their weights under the names of an unquantised drafter ("fc.weight")."""
        return {f"{name}.weight": weight.dequantised().to(dtype) for name, weight in self.weights.items()}


def linear_names(config: DrafterConfig) -> list[str]:
    """The linears to quantise: all but the head."""
    return [
        name.removesuffix(".weight")
        for name, spec in expected_tensors(config).items()
        if len(spec.shape) == 2 and not name.startswith(_LEFT_ALONE)
    ]


def read_linears(
    said: Json, tensors: Mapping[str, Tensor], dtype: torch.dtype, source: str
) -> tuple[dict[str, Tensor], QuantisedLinears]:
    """Return all tensors of a drafter as if it was not quantised, and the quantised ones."""
    scheme = weight_scheme({QUANTIZATION_KEY: said}, source)
    assert scheme is not None
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        modules.setdefault(owner, {})[attribute] = tensor
    weights = {owner: scheme.read(parts, owner) for owner, parts in modules.items() if scheme.owns(parts)}
    if not weights:
        raise UserError(
            f"config.json says that {source} is {scheme.words}, and none of its tensors has scales; "
            f"fetch the drafter again, or remove {QUANTIZATION_KEY} if it is not quantised"
        )
    stored = {
        f"{owner}.{attribute}": tensor
        for owner in weights
        for attribute, tensor in modules[owner].items()
        if attribute != "bias"
    }
    found = QuantisedLinears(said=said, scheme=scheme, stored=stored, weights=weights)
    plain = {name: tensor for name, tensor in tensors.items() if name not in stored}
    return plain | found.dequantised(dtype), found


def quantise_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], kind: str) -> QuantisedLinears:
    """Round the linears of a drafter to one of `KINDS`."""
    quantise = quantise_int8 if kind == "int8" else quantise_float8
    weights = {name: quantise(tensors[f"{name}.weight"]) for name in linear_names(config)}
    stored = {f"{name}.weight": weight.q_EK for name, weight in weights.items()}
    stored |= {f"{name}.weight_scale": weight.scale_EG for name, weight in weights.items()}
    said = _w8a8("int" if kind == "int8" else "float")
    scheme = weight_scheme({QUANTIZATION_KEY: said}, "the drafter")
    assert scheme is not None
    return QuantisedLinears(said=said, scheme=scheme, stored=stored, weights=weights)


def _w8a8(number: str) -> Json:
    """`quantization_config` of weights with a scale per output and inputs with one per token; "int" or "float"."""
    eight = {"num_bits": 8, "type": number, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{number}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
