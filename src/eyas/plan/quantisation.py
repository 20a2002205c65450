"""How many bits a weight takes, and at which speed it is multiplied.

Formats for serving make the layers' matrices smaller and leave embedding, head, norms and biases in 16 bits. A group of
weights shares a scale (16 bits) and, with 4 bits, a zero point of as many bits as a weight.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError
from eyas.target.quantization_config import weight_scheme

GROUP = 128
"""Weights that share a scale, unless a format says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How weights are kept."""

    name: str
    bits: float
    """Of a weight in a matrix of the layers, its share of scales included."""
    other_bytes: int = 2
    """Of every other weight, and of keys and values."""
    arithmetic: str = "bf16"
    """What the matrices are multiplied in."""

    @property
    def plain(self) -> bool:
        """Whether nothing is quantised: a server can do it with any checkpoint, by converting."""
        return self.bits == 8 * self.other_bytes

    @property
    def dtype(self) -> str:
        """Of what is not quantised, in torch's words."""
        return self.name if self.plain else "bfloat16"


def _grouped(bits: int, group: int) -> float:
    return bits + (16 + (bits if bits == 4 else 0)) / group


PLAIN = {
    "float32": Quantisation(name="float32", bits=32, other_bytes=4, arithmetic="fp32"),
    "bfloat16": Quantisation(name="bfloat16", bits=16),
    "float16": Quantisation(name="float16", bits=16),
}
LADDER = ("bfloat16", "fp8", "int4")
"""From fine to coarse: what `--fit` tries."""
KINDS = (*PLAIN, "fp8", "int8", "int4")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_quantisation(name: str) -> Quantisation:
    """By name; int8 and int4 may end in the size of their groups, as in int4-g64."""
    name = _SHORT.get(name, name)
    if name in PLAIN:
        return PLAIN[name]
    if name == "fp8":
        return Quantisation(name=name, bits=8 + 32 / GROUP**2, arithmetic="fp8")
    made = re.fullmatch(r"int([48])(?:-g(\d+))?", name)
    group = int(made[2] or GROUP) if made else 0
    if made is None or group < 1:
        raise UserError(f"quantisation {name!r} is not one of {', '.join(KINDS)}; groups are told as in int4-g64")
    # Both are computed in 16 bits: kernels for few rows unpack weights on the way.
    return Quantisation(name=name, bits=_grouped(int(made[1]), group))


def stored_quantisation(config: Mapping[str, Any], source: str) -> Quantisation:
    """What config.json says that the checkpoint is."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        text = config.get("text_config") or config
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32"
        if dtype not in PLAIN:
            raise UserError(f"{source} is stored as {dtype!r}, not one of {', '.join(PLAIN)}; say --quantisation")
        return PLAIN[str(dtype)]
    try:
        scheme = weight_scheme(config, source)
    except UserError as error:
        raise UserError(
            f"{source} is quantised by {said.get('quant_method')!r} in a way that is not known here ({error}); say "
            f"what comes nearest with --quantisation ({', '.join(KINDS)})"
        ) from error
    assert scheme is not None
    if scheme.kind == "fp8":
        return parse_quantisation("fp8")
    # A group that is a whole row has a scale that weighs nothing.
    return parse_quantisation(f"{scheme.kind}-g{scheme.group_size or 2**20}")
