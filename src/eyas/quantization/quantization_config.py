"""Reads `quantization_config` of a config.json.

It imports no torch: `eyas plan` reads it too.
"""

from collections.abc import Mapping
from typing import Any

from eyas.errors import UserError
from eyas.quantization.formats.awq import Awq
from eyas.quantization.formats.compressed_tensors import CompressedTensors
from eyas.quantization.formats.fp8 import Fp8
from eyas.quantization.formats.gptq import Gptq
from eyas.quantization.formats.mxfp4 import Mxfp4
from eyas.quantization.weight_format import WeightFormat, WeightScheme, refused

FORMATS: list[WeightFormat] = [CompressedTensors(), Fp8(), Awq(), Gptq(), Mxfp4()]
"""All formats that can be read; a new one is added here."""


def methods() -> list[str]:
    """All values of `quant_method` that can be read."""
    return [method for known in FORMATS for method in known.methods]


def weight_scheme(config: Mapping[str, Any], source: str) -> WeightScheme | None:
    """The scheme of a checkpoint with this config.json; None if nothing is quantised."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise UserError(f"quantization_config of {source} is {said!r}, not a table; repair its config.json")
    for known in FORMATS:
        if said.get("quant_method") in known.methods:
            return known.parse(said, source)
    raise refused(source, "quant_method", said.get("quant_method"), f"one of {', '.join(methods())}")
