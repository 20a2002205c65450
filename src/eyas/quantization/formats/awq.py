"""AWQ: 4 bits in groups.

    qweight  int32 [K, E / 8]    qzeros  [G, E / 8]    scales  [G, E]

An int32 holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, low bits first.

Shapes: E outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.quantization.weight_format import WeightFormat, WeightScheme, parse_group, refused

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.kernels.linear.quantised_weight import QuantisedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each four bits of an int32 belong to, from the lowest."""


class Awq(WeightFormat):
    """The layout `gemm` of AutoAWQ."""

    name = "awq"
    methods = ("awq",)

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        version = str(said.get("version", "gemm")).lower()
        if version != "gemm":
            raise refused(source, "version", said["version"], "the layout 'gemm'")
        if said.get("bits", said.get("w_bit")) != 4:
            raise refused(source, "bits", said.get("bits", said.get("w_bit")), "4")
        group = parse_group(said.get("group_size", said.get("q_group_size")), source)
        return WeightScheme(format=self, kind="int4", group_size=group)

    def owns(self, names: Mapping[str, object]) -> bool:
        return "qweight" in names

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        import torch

        from eyas.quantization.packed_integers import checked_weight, unpack, unsigned

        place = torch.tensor(ORDER, device=tensors["qweight"].device).argsort()

        def in_order(packed: Tensor) -> Tensor:
            """Unpack outputs [..., E] into their order."""
            stored = unpack(packed, 4)
            return stored.view(*stored.shape[:-1], -1, 8)[..., place].flatten(-2)

        q_EK, zero_EG = unsigned(scheme, in_order(tensors["qweight"]).t(), in_order(tensors["qzeros"]).t())
        return checked_weight(scheme, name, q_EK, tensors["scales"].t(), zero_EG)
