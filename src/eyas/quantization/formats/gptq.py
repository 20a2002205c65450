"""GPTQ: 4 or 8 bits in groups.

    qweight  int32 [K / 8, E], low bits first    qzeros  [G, E / 8]    scales  [G, E]    g_idx  [K]

Shapes: E outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.quantization.weight_format import WeightFormat, WeightScheme, parse_group, refused

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.kernels.linear.quantised_weight import QuantisedWeight


class Gptq(WeightFormat):
    """The formats `gptq`, which stores zero points less one, and `gptq_v2`."""

    name = "gptq"
    methods = ("gptq",)

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        form, bits = said.get("checkpoint_format", "gptq"), said.get("bits")
        if form not in ("gptq", "gptq_v2"):
            raise refused(source, "checkpoint_format", form, "'gptq' or 'gptq_v2'")
        if said.get("dynamic"):
            raise refused(source, "dynamic", said["dynamic"], "one kind for all layers")
        if bits not in (4, 8):
            raise refused(source, "bits", bits, "4 or 8")
        return WeightScheme(
            format=self,
            kind="int4" if bits == 4 else "int8",
            group_size=parse_group(said.get("group_size"), source),
            zero_offset=1 if form == "gptq" else 0,
        )

    def owns(self, names: Mapping[str, object]) -> bool:
        return "qweight" in names

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        from eyas.quantization.packed_integers import checked_weight, unpack, unsigned

        bits = scheme.bits
        q_EK = unpack(tensors["qweight"].t(), bits)
        zero_EG = (unpack(tensors["qzeros"], bits).t() + scheme.zero_offset) & (2**bits - 1)
        q_EK, zero_EG = unsigned(scheme, q_EK, zero_EG)
        return checked_weight(scheme, name, q_EK, tensors["scales"].t(), zero_EG, tensors.get("g_idx"))
