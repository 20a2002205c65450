"""`ServedLinear`: a linear layer for inference, whose weights lie in memory as its kernel reads them.

Each kind of linear is one file with one subclass. Everything else (fused blocks, engine, target, drafter) uses only the
base classes here:

    CompiledLinear   multiplied on a CPU by compiled code, float32 in and out     packed_linear.py, quantised_linear.py
    GpuLinear        has one kernel for prompts and one for decoding              w8a8_linear.py, w4a16_linear.py

Invariant: a row's result never depends on how many rows are computed with it.

Shapes: N rows, K inputs, E outputs.
"""

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from eyas.kernels.linear.decode_tiling import decode_counts
from eyas.kernels.linear.quantised_weight import QuantisedWeight


class ServedWeights(nn.Module):
    """A module whose weights are packed: none of them is a parameter."""

    @abstractmethod
    def packed(self) -> list[Tensor]:
        """Tensors that hold the weights."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.packed())


def packed_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors of all packed weights in a model."""
    return [x for part in model.modules() if isinstance(part, ServedWeights) for x in part.packed()]


def packed_bytes(model: nn.Module) -> int:
    """Memory of all packed weights in a model; tensors that layers share count for each."""
    return sum(x.nbytes for x in packed_tensors(model))


class ServedLinear(ServedWeights):
    """A linear layer for inference."""

    rounds_inputs: ClassVar[bool] = False
    """Whether it rounds the rows that it reads to 8 bits."""
    shared_packed: ClassVar[bool] = False
    """Whether a drafter that shares this layer as its head multiplies by it, instead of a dense copy."""
    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weight as nn.Linear has it, [E, K]: a copy made on each call."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @abstractmethod
    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        """Multiply rows; `decoding` chooses the kernel, where there are two."""

    @classmethod
    @abstractmethod
    def join(cls, linears: Sequence[Self]) -> Self | None:
        """One layer with the outputs of all, in order, on the same memory; None if that is impossible."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a quantised linear has no gradient; load the target with quantization none")
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.nbytes} bytes"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save under the names and shapes of nn.Linear: packed layouts differ between devices."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias


class ProductWeight(ctypes.Structure):
    """`struct product` of llama/cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "parts")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "halved", "part_count")),
    )


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """Compiled products of one kind of linear."""

    library: ctypes.CDLL

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # code, not state: copies of a model share it

    @property
    def width(self) -> int:
        """The number of outputs in a panel, C."""
        return int(self.library.panel_width())

    @property
    def tiles(self) -> bool:
        """Whether products use the CPU's matrix unit (AMX) where it is faster."""
        return bool(self.library.uses_tiles())

    @staticmethod
    def outputs_of(x: Tensor, outputs: int, out: Tensor | None) -> Tensor:
        """Memory for a product; refuses dtypes that would be read or written past their end."""
        y = x.new_empty((*x.shape[:-1], outputs)) if out is None else out
        if x.dtype != torch.float32 or y.dtype != torch.float32:
            raise TypeError(f"compiled products read and write float32, not {x.dtype} and {y.dtype}")
        return y


class CompiledLinear(ServedLinear):
    """A linear layer multiplied by compiled code on a CPU, which can call it without Python between layers."""

    @abstractmethod
    def product_weight(self) -> ProductWeight:
        """The layer as llama/cpu.c reads it; its weights must stay where they are."""

    @property
    @abstractmethod
    def steps(self) -> dict[str, Any]:
        """Compiled functions that multiply it or look rows up, by their names in `struct steps` of llama/cpu.c."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that the product takes for each row."""
        return 0


class GpuLinear(ServedLinear):
    """A linear layer of 8- or 4-bit weights on a GPU, with one kernel for prompts and one for decoding.

    The pass chooses the kernel, never the number of rows. On other devices torch computes it: for tests.
    """

    outputs_axis: ClassVar[dict[str, int]]
    """The tensors of a layer that have one entry per output, and along which dimension."""
    arrived: Tensor

    @staticmethod
    @abstractmethod
    def takes(weight: QuantisedWeight) -> bool:
        """Whether its kernels can multiply this weight."""

    @classmethod
    @abstractmethod
    def of(cls, weight: QuantisedWeight, bias_E: Tensor | None, dtype: torch.dtype) -> Self:
        """Pack a weight on its device; `dtype` is that of inputs and outputs."""

    @abstractmethod
    def joins(self, other: Self) -> bool:
        """Whether both read the same input in the same way."""

    @classmethod
    def join(cls, linears: Sequence[Self]) -> Self | None:
        """Concatenate alike layers; the parts become views of the joined layer."""
        first = linears[0]
        if len(linears) == 1:
            return first
        if not all(first.joins(x) for x in linears):
            return None
        whole, outputs = copy(first), [x.out_features for x in linears]
        whole.out_features = sum(outputs)
        for name, axis in cls.outputs_axis.items():
            parts = [getattr(x, name) for x in linears]
            joined = None if parts[0] is None else torch.cat(parts, dim=axis)
            setattr(whole, name, joined)
            views = [None] * len(parts) if joined is None else torch.split(joined, outputs, dim=axis)
            for part, view in zip(linears, views, strict=True):
                setattr(part, name, view)
        whole.arrived = decode_counts(getattr(whole, next(iter(cls.outputs_axis))))
        return whole
