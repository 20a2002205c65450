"""`WeightFormat`: the way in which a quantised checkpoint stores its weights. Each format is one file in `formats/`.

Files here and in `formats/` import torch only where tensors are read: `eyas plan` reads config.json without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eyas.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from eyas.kernels.linear.quantised_weight import QuantisedWeight

SMALLEST_GROUP = 16
"""The fewest weights that may share a scale, where they are in groups."""


class WeightFormat(ABC):
    """How a kind of checkpoint stores the weights of its linears."""

    name: str
    methods: tuple[str, ...]
    """Values of `quant_method` in config.json."""

    @abstractmethod
    def parse(self, said: Mapping[str, Any], source: str) -> WeightScheme:
        """Read `quantization_config`; refuse by name what is not understood and could change numbers."""

    @abstractmethod
    def owns(self, names: Mapping[str, object]) -> bool:
        """Whether a module with tensors of these names is quantised; lists of exceptions are not needed then."""

    @abstractmethod
    def read(self, scheme: WeightScheme, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        """Read the linear `name` from its tensors, by their names in the module; KeyError where one is missing."""

    def read_module(
        self, scheme: WeightScheme, tensors: Mapping[str, Tensor], module: nn.Module, name: str
    ) -> StoredModule | None:
        """Read a module of transformers; None if it is stored as it is. A format of linears need not override this."""
        from torch import nn

        from eyas.quantization.stored_linear import StoredLinear

        if not isinstance(module, nn.Linear):
            return None
        weight, expected = scheme.read(tensors, name), (module.out_features, module.in_features)
        if tuple(weight.q_EK.shape) != expected:
            raise UserError(
                f"{name} has {tuple(weight.q_EK.shape)} weights in the file, and config.json makes it {expected}; "
                "they do not belong together"
            )
        words, inputs = f"{scheme.kind} in groups of {weight.group}", scheme.quantised_inputs
        return StoredLinear(weight=weight, bias_E=tensors.get("bias"), words=words, quantised_inputs=inputs)


class StoredModule(Protocol):
    """The quantised weights of a module, as they lie in a file."""

    def served(self, dtype: torch.dtype) -> nn.Module | None:
        """A module that multiplies by them on a GPU; None if there is no kernel for them."""

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights dequantised, by their names in the module of transformers."""

    @property
    def words(self) -> str:
        """The kind of weights, for the log."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """How the linears of one checkpoint are quantised, or with mxfp4 its experts."""

    format: WeightFormat
    kind: Literal["fp8", "int8", "int4", "mxfp4"]
    group_size: int | None = None
    """Inputs that share a scale; None: all inputs of an output, or more."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block that shares a scale."""
    quantised_inputs: bool = False
    """Whether products should round their inputs to 8 bits, too."""
    zero_offset: int = 0
    """Added to zero points as they are stored."""

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "mxfp4") else 8

    @property
    def words(self) -> str:
        """A description for people: fp8 (compressed-tensors), int4 in groups of 128 (awq)."""
        if self.block is not None:
            grouped = f" in blocks of {self.block[0]} x {self.block[1]}"
        else:
            grouped = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.kind}{grouped} ({self.format.name})"

    def owns(self, names: Mapping[str, object]) -> bool:
        return self.format.owns(names)

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantisedWeight:
        try:
            return self.format.read(self, tensors, name)
        except KeyError as error:
            raise UserError(
                f"{name} has {', '.join(sorted(tensors))} and no {error.args[0]}, which {self.words} needs; "
                "use a complete checkpoint"
            ) from error


def refused(source: str, field: str, value: object, known: str) -> UserError:
    """The error for a value of `quantization_config` that cannot be read."""
    return UserError(
        f"quantization_config of {source} has {field} {value!r}, and {known} can be read here; "
        "use another checkpoint of this model, or one in bfloat16 with --quantization"
    )


def parse_group(value: object, source: str) -> int | None:
    """The size of groups along the inputs; -1 and nothing mean whole rows."""
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < SMALLEST_GROUP or value % SMALLEST_GROUP:
        raise refused(source, "group_size", value, f"-1 or a multiple of {SMALLEST_GROUP}")
    return value


def parse_block(value: object, field: str, source: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or any(not isinstance(x, int) or isinstance(x, bool) or x < SMALLEST_GROUP for x in value)
    ):
        raise refused(source, field, value, f"two sizes of at least {SMALLEST_GROUP}")
    return value[0], value[1]
