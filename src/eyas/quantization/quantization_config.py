"""What a checkpoint's `quantization_config` says, as one of the schemes that can be read here.

Invariant: a configuration that is not understood to the last field that changes numbers is refused by name; nothing
is guessed. Which layers are quantised is told by the tensors of the file, so lists of exceptions are not needed.

It imports no torch: `eyas plan` reads it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import UserError

Layout = Literal["compressed-tensors", "fp8", "awq", "gptq", "mxfp4"]
METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "awq", "gptq", "mxfp4")
SMALLEST_GROUP = 16
"""Weights that may share a scale at least, where they are in groups."""
MXFP4_BLOCK = 32
"""Weights that share a scale in MXFP4."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How the linears of a checkpoint are kept; with mxfp4, its experts."""

    layout: Layout
    kind: Literal["fp8", "int8", "int4", "mxfp4"]
    group_size: int | None = None
    """Inputs that share a scale; None: all of an output, or more."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block that shares a scale."""
    quantised_inputs: bool = False
    """Whether products are meant to round what they read to 8 bits, too."""
    zero_offset: int = 0
    """What is added to zero points as they are stored."""

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 4 if self.kind in ("int4", "mxfp4") else 8

    @property
    def words(self) -> str:
        """For people: fp8 (compressed-tensors), int4 in groups of 128 (awq)."""
        if self.block is not None:
            grouped = f" in blocks of {self.block[0]} x {self.block[1]}"
        else:
            grouped = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.kind}{grouped} ({self.layout})"


def weight_scheme(config: Mapping[str, Any], source: str) -> WeightScheme | None:
    """The scheme of a checkpoint with this config.json; None where nothing is quantised."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise UserError(f"quantization_config of {source} is {said!r}, not a table; repair its config.json")
    method = said.get("quant_method")
    reader = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }.get(str(method))
    if reader is None:
        raise _refused(source, "quant_method", method, f"one of {', '.join(METHODS)}")
    return reader(said, source)


def _refused(source: str, field: str, value: object, known: str) -> UserError:
    return UserError(
        f"quantization_config of {source} has {field} {value!r}, and {known} can be read here; "
        "use another checkpoint of this model, or one in bfloat16 with --quantization"
    )


def _group(value: object, source: str) -> int | None:
    """Of groups along the inputs; -1 and nothing are whole rows."""
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < SMALLEST_GROUP or value % SMALLEST_GROUP:
        raise _refused(source, "group_size", value, f"-1 or a multiple of {SMALLEST_GROUP}")
    return value


def _block(value: object, field: str, source: str) -> tuple[int, int]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or any(not isinstance(x, int) or isinstance(x, bool) or x < SMALLEST_GROUP for x in value)
    ):
        raise _refused(source, field, value, f"two sizes of at least {SMALLEST_GROUP}")
    return value[0], value[1]


def _fp8(said: Mapping[str, Any], source: str) -> WeightScheme:
    """Blocks as DeepSeek and Qwen publish them, or one scale per tensor."""
    if said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(source, "fmt", said["fmt"], "e4m3")
    if said.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise _refused(source, "activation_scheme", said["activation_scheme"], "dynamic or static")
    size = said.get("weight_block_size")
    block = None if size is None else _block(size, "weight_block_size", source)
    return WeightScheme(layout="fp8", kind="fp8", block=block, quantised_inputs=True)


def _fbgemm_fp8(_: Mapping[str, Any], __: str) -> WeightScheme:
    """A scale per output. Its bound on the scales of inputs (`activation_scale_ub`) only cuts what is larger off."""
    return WeightScheme(layout="fp8", kind="fp8", quantised_inputs=True)


def _bits(said: Mapping[str, Any], source: str) -> Literal["int4", "int8"]:
    bits = said.get("bits")
    if bits not in (4, 8):
        raise _refused(source, "bits", bits, "4 or 8")
    return "int4" if bits == 4 else "int8"


def _awq(said: Mapping[str, Any], source: str) -> WeightScheme:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refused(source, "version", said["version"], "the layout 'gemm'")
    if said.get("bits", said.get("w_bit")) != 4:
        raise _refused(source, "bits", said.get("bits", said.get("w_bit")), "4")
    group = _group(said.get("group_size", said.get("q_group_size")), source)
    return WeightScheme(layout="awq", kind="int4", group_size=group)


def _gptq(said: Mapping[str, Any], source: str) -> WeightScheme:
    form = said.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refused(source, "checkpoint_format", form, "'gptq' or 'gptq_v2'")
    if said.get("dynamic"):
        raise _refused(source, "dynamic", said["dynamic"], "one kind for all layers")
    return WeightScheme(
        layout="gptq",
        kind=_bits(said, source),
        group_size=_group(said.get("group_size"), source),
        zero_offset=1 if form == "gptq" else 0,  # the first format stores one less
    )


def _mxfp4(_: Mapping[str, Any], __: str) -> WeightScheme:
    """Experts as gpt-oss is published. What stays in 16 bits (`modules_to_not_convert`) the tensors tell."""
    return WeightScheme(layout="mxfp4", kind="mxfp4", group_size=MXFP4_BLOCK)


_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def _compressed_tensors(said: Mapping[str, Any], source: str) -> WeightScheme:
    if said.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        raise _refused(source, "quantization_status", said["quantization_status"], "'compressed'")
    sparsity = said.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(source, "sparsity_config.format", sparsity["format"], "'dense'")
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(source, "config_groups", groups, "a group of layers")
    schemes = {_scheme_of_group(group, said, source) for group in groups.values()}
    if len(schemes) > 1:
        kinds = ", ".join(sorted(scheme.words for scheme in schemes))
        raise _refused(source, "config_groups", kinds, "one kind for all layers")
    return schemes.pop()


def _scheme_of_group(group: Any, said: Mapping[str, Any], source: str) -> WeightScheme:
    weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
    form = group.get("format") or said.get("format") if isinstance(group, Mapping) else None
    if form is not None and form not in _FORMATS:
        raise _refused(source, "format", form, f"one of {', '.join(_FORMATS)}")
    kind = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}.get(
        (str(weights.get("type", "int")), int(weights.get("num_bits") or 0))
    )
    if kind is None:
        words = f"{weights.get('num_bits')} bits of type {weights.get('type')}"
        raise _refused(source, "weights", words, "float of 8 bits or int of 4 or 8 bits")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "group" if (weights.get("group_size") or -1) > 0 else "channel"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(source, "weights.strategy", strategy, "tensor, channel, group or block")
    block = _block(weights.get("block_structure"), "block_structure", source) if strategy == "block" else None
    if form == "pack-quantized" and kind == "fp8":
        raise _refused(source, "format", form, "'float-quantized' for fp8")
    return WeightScheme(
        layout="compressed-tensors",
        kind=kind,  # type: ignore[arg-type]
        group_size=_group(weights.get("group_size"), source) if strategy == "group" else None,
        block=block,
        quantised_inputs=bool(group.get("input_activations")),
    )
