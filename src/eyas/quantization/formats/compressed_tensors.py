"""compressed-tensors: fp8, int8 and int4 as llm-compressor writes them.

    weight_packed int32 [E, K / 8], low bits first, or weight (8 bits) [E, K]
    weight_scale; weight_zero_point, packed along E if the weight is; weight_g_idx

Packed integers are signed and stored with half of their range added.

Shapes: E outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError
from eyas.quantization.weight_format import WeightFormat, WeightScheme, parse_block, parse_group, refused

if TYPE_CHECKING:
    from torch import Tensor

    from eyas.kernels.linear.quantised_weight import QuantisedWeight

FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


class CompressedTensors(WeightFormat):
    """One kind of weights for all layers; sparse checkpoints are refused."""

    name = "compressed-tensors"
    methods = ("compressed-tensors",)

    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        if said.get("quantization_status", "compressed") not in ("compressed", "frozen"):
            raise refused(source, "quantization_status", said["quantization_status"], "'compressed'")
        sparsity = said.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise refused(source, "sparsity_config.format", sparsity["format"], "'dense'")
        groups = said.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise refused(source, "config_groups", groups, "a group of layers")
        schemes = {self._scheme_of_group(group, said, source) for group in groups.values()}
        if len(schemes) > 1:
            kinds = ", ".join(sorted(scheme.words for scheme in schemes))
            raise refused(source, "config_groups", kinds, "one kind for all layers")
        return schemes.pop()

    def _scheme_of_group(self, group: Any, said: Mapping[str, Any], source: str) -> WeightScheme:
        weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
        form = group.get("format") or said.get("format") if isinstance(group, Mapping) else None
        if form is not None and form not in FORMATS:
            raise refused(source, "format", form, f"one of {', '.join(FORMATS)}")
        kind = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}.get(
            (str(weights.get("type", "int")), int(weights.get("num_bits") or 0))
        )
        if kind is None:
            words = f"{weights.get('num_bits')} bits of type {weights.get('type')}"
            raise refused(source, "weights", words, "float of 8 bits or int of 4 or 8 bits")
        strategy = weights.get("strategy")
        if strategy is None:
            strategy = "group" if (weights.get("group_size") or -1) > 0 else "channel"
        if strategy not in ("tensor", "channel", "group", "block"):
            raise refused(source, "weights.strategy", strategy, "tensor, channel, group or block")
        block = parse_block(weights.get("block_structure"), "block_structure", source) if strategy == "block" else None
        if form == "pack-quantized" and kind == "fp8":
            raise refused(source, "format", form, "'float-quantized' for fp8")
        return WeightScheme(
            format=self,
            kind=kind,  # type: ignore[arg-type]
            group_size=parse_group(weights.get("group_size"), source) if strategy == "group" else None,
            block=block,
            quantised_inputs=bool(group.get("input_activations")),
        )

    def owns(self, names: Mapping[str, object]) -> bool:
        return "weight_packed" in names or "weight_scale" in names

    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        import torch

        from eyas.quantization.packed_integers import checked_weight, eight_bits, unpack, unsigned

        if "weight_packed" not in tensors:
            return eight_bits(scheme, tensors, name)
        bits = scheme.bits
        outputs, inputs = (int(x) for x in tensors["weight_shape"].tolist())
        q_EK = unpack(tensors["weight_packed"], bits)[:, :inputs]
        zero_EG = tensors.get("weight_zero_point")
        if zero_EG is not None and zero_EG.dtype == torch.int32:
            zero_EG = unpack(zero_EG.t(), bits).t()[:outputs]
        elif zero_EG is not None:
            zero_EG = zero_EG.to(torch.int16) + 2 ** (bits - 1)
        else:
            zero_EG = torch.full_like(tensors["weight_scale"], 2 ** (bits - 1), dtype=torch.int16)
        if q_EK.shape != (outputs, inputs):
            raise UserError(
                f"weight_packed of {name} has room for {tuple(q_EK.shape)} weights, and weight_shape says "
                f"{(outputs, inputs)}; the checkpoint is damaged, use another one"
            )
        q_EK, zero_EG = unsigned(scheme, q_EK, zero_EG)
        return checked_weight(scheme, name, q_EK, tensors["weight_scale"], zero_EG, tensors.get("weight_g_idx"))
