"""fp8 as DeepSeek and Qwen publish it (blocks), or with one scale per tensor or output.

    weight  [E, K]    weight_scale_inv  of blocks, or weight_scale: weights are multiplied by either

Scales of inputs (`input_scale`), where a file has them, are not used: each row finds its own, which is never coarser.

Shapes: E outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.quantization.weight_format import WeightFormat, WeightScheme, parse_block, refused

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.kernels.linear.quantised_weight import QuantisedWeight


class Fp8(WeightFormat):
    """The methods `fp8` and `fbgemm_fp8`.

    The latter has a scale per output, and a bound on the scales of inputs that only clips outliers: it is not used.
    """

    name = "fp8"
    methods = ("fp8", "fbgemm_fp8")

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        size = None
        if said["quant_method"] == "fp8":
            if said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
                raise refused(source, "fmt", said["fmt"], "e4m3")
            if said.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
                raise refused(source, "activation_scheme", said["activation_scheme"], "dynamic or static")
            size = said.get("weight_block_size")
        block = None if size is None else parse_block(size, "weight_block_size", source)
        return WeightScheme(format=self, kind="fp8", block=block, quantised_inputs=True)

    def owns(self, names: Mapping[str, object]) -> bool:
        return "weight_scale_inv" in names or "weight_scale" in names

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        from eyas.quantization.packed_integers import eight_bits

        return eight_bits(scheme, tensors, name)
