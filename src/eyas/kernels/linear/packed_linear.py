"""float32 linear layers with weights in panels, fast for the few rows of decoding on a CPU.

Verifying four draft tokens should cost little more than decoding one token, since the weights are read once either
way; torch's product for two or more rows takes three times as long as for one. packed_linear.c explains how it avoids
that. One copy of the weights, in panels, serves any number of rows, prompts included. Only a head tied to the embedding
needs a second copy: lookups need rows, the product needs panels.

Products of a row or two take as long as reading the weights. Halved panels store weights as bfloat16 where that is
exact, so that float32 results come out sooner: always for drafters, which run for few rows; for targets where vectors
are wide enough, or a matrix unit (`tiles.h`) makes all products cheaper.

Invariant: a row's result is the same to the last bit however many rows are computed with it. So greedy decoding gives
the same tokens one by one and verified as drafts.

Shapes: M rows, N outputs, K inputs; P panels of C outputs each.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.served_linear import CompiledKernel, CompiledLinear, ProductWeight
from eyas.kernels.native import load_native

SOURCE = Path(__file__).with_name("packed_linear.c")
STEP = 32
"""Inputs of halved panels are padded to a multiple of it."""
# Linears of one parent that read the same input are packed side by side, so that `PackedLinear.join` can join them.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, eq=False)
class LinearKernel(CompiledKernel):
    """The compiled product."""

    def __post_init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_long
        product = self.library.packed_linear
        product.argtypes = [pointer, size, size, pointer, ctypes.c_int, pointer, size, pointer, ctypes.c_int]
        product.restype = None

    @property
    def halving_pays(self) -> bool:
        """Whether halved panels are no slower than whole ones for any number of rows."""
        return bool(self.library.halving_pays())

    def linear(self, x: Tensor, layer: "PackedLinear", out: Tensor | None = None) -> Tensor:
        """torch's linear; x, bias and `out` are float32 on the CPU, and all but x are contiguous."""
        x = x.contiguous()
        y = self.outputs_of(x, layer.out_features, out)
        self.library.packed_linear(
            x.data_ptr(),
            x.numel() // layer.in_features,
            layer.in_features,
            layer.panels_PKC.data_ptr(),
            layer.halved,
            None if layer.bias is None else layer.bias.data_ptr(),
            layer.out_features,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y


def load_kernel(*, cache: Path | None = None) -> tuple[LinearKernel | None, str]:
    """Return the kernel and its compiler, or None and the reason why there is none."""
    library, words = load_native(SOURCE, cache=cache)
    if library is None:
        return None, words
    kernel = LinearKernel(library)
    return (kernel, words) if _is_right(kernel) else (None, f"the library compiled by {words} computes wrong results")


@torch.no_grad()
def _is_right(kernel: LinearKernel) -> bool:
    """Try it: this compiler may never have been tested."""
    linear = nn.Linear(2 * kernel.width + 1, 2 * kernel.width + 1, device="meta").to_empty(device="cpu")
    for parameter in linear.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 - 3)  # small integers: sums are exact
    x_MK = torch.arange(15 * linear.in_features).view(15, -1) % 5 - 2.0
    expected = linear(x_MK)
    return all(torch.equal(pack(kernel, [linear], halve=halve)[0](x_MK), expected) for halve in (False, True))


class PackedLinear(CompiledLinear):
    """A linear layer of float32 weights; gradients and other types run unpacked and slowly."""

    panels_PKC: Tensor
    """float32; or bfloat16 if halved: then an output's weights for two neighbouring inputs are adjacent, and inputs are
    zero-padded to a multiple of STEP."""

    def __init__(
        self,
        kernel: LinearKernel,
        panels_PKC: Tensor,
        in_features: int,
        out_features: int,
        bias_N: Tensor | None,
        *,
        halved: bool,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.in_features = in_features
        self.out_features = out_features
        self.halved = halved  # not derived from the dtype: panels keep their layout whatever the module is cast to
        self.register_buffer("panels_PKC", panels_PKC)
        self.register_buffer("bias", bias_N)

    @property
    def weight(self) -> Tensor:
        panels_PKC = self.panels_PKC
        if self.halved:
            panels, inputs, width = panels_PKC.shape
            panels_PKC = panels_PKC.view(panels, inputs // 2, width, 2).transpose(2, 3).flatten(1, 2).float()
        weight_NK = panels_PKC[:, : self.in_features].transpose(1, 2).flatten(0, 1)
        return weight_NK[: self.out_features].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        panels_PKC = self.panels_PKC
        if (
            x.dtype == torch.float32
            and panels_PKC.dtype == (torch.bfloat16 if self.halved else torch.float32)
            and x.is_cpu
            and panels_PKC.is_cpu
            and x.shape[-1] == self.in_features
            and not (x.requires_grad and torch.is_grad_enabled())
        ):
            return self.kernel.linear(x, self)
        weight_NK = self.weight.to(x.dtype) if self.halved else self.weight
        return functional.linear(x, weight_NK, self.bias)

    def product(self, x_NK: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False) -> Tensor:
        return self.kernel.linear(x_NK, self, out_NE)

    def packed(self) -> list[Tensor]:
        return [self.panels_PKC]

    def product_weight(self) -> ProductWeight:
        return ProductWeight(
            panels=self.panels_PKC.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
            halved=self.halved,
        )

    @property
    def steps(self) -> dict[str, Any]:
        return {"product": self.kernel.library.packed_linear}

    @classmethod
    def join(cls, linears: Sequence["PackedLinear"]) -> "PackedLinear | None":
        """Join layers whose panels are adjacent in memory.

        They are after `pack` if every number of outputs but the last is a multiple of the panel's width.
        """
        parts = [linear.panels_PKC for linear in linears]
        width = parts[0].shape[-1]
        for linear, before, after in zip(linears, parts, parts[1:], strict=False):
            end = before.data_ptr() + before.numel() * before.element_size()
            same_storage = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
            if not same_storage or end != after.data_ptr() or linear.out_features % width:
                return None
        panels_PKC = parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
        bias_N = None
        if any(linear.bias is not None for linear in linears):
            biases = [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
            bias_N = torch.cat(biases)
        outputs = sum(linear.out_features for linear in linears)
        first = linears[0]
        return cls(first.kernel, panels_PKC, first.in_features, outputs, bias_N, halved=first.halved)


@torch.no_grad()
def pack(kernel: LinearKernel, linears: Sequence[nn.Linear], *, halve: bool = False) -> list[PackedLinear]:
    """Pack linears of the same input size into one block of memory, with halved panels if asked for and exact."""
    width, inputs = kernel.width, linears[0].in_features
    counts = [-(-linear.out_features // width) for linear in linears]
    panels_PKC = torch.zeros(sum(counts), inputs, width)
    for linear, part_PKC in zip(linears, torch.split(panels_PKC, counts), strict=True):
        weight_NK = linear.weight.detach()
        full, rest = divmod(linear.out_features, width)
        part_PKC[:full] = weight_NK[: full * width].reshape(full, width, inputs).transpose(1, 2)
        if rest:
            part_PKC[full, :, :rest] = weight_NK[full * width :].T
    halved = halve and torch.equal((halved_PKC := panels_PKC.bfloat16()).float(), panels_PKC)
    if halved:
        halved_PKC = functional.pad(halved_PKC, (0, 0, 0, -inputs % STEP))
        by_pairs = halved_PKC.view(len(halved_PKC), -1, 2, width)
        panels_PKC = by_pairs.transpose(2, 3).reshape(halved_PKC.shape)
    biases = [None if linear.bias is None else linear.bias.detach().float().contiguous() for linear in linears]
    return [
        PackedLinear(kernel, part_PKC, inputs, linear.out_features, bias_N, halved=halved)
        for linear, part_PKC, bias_N in zip(linears, torch.split(panels_PKC, counts), biases, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The result of `pack_linears`."""

    linears: int
    """How many were replaced; 0 means that the model is unchanged."""
    words: str
    """The compiler of the kernel, or why nothing was packed."""


def pack_linears(
    model: nn.Module, *, halve: bool | None = None, widen: bool = False, cache: Path | None = None
) -> Packing:
    """Replace every float32 nn.Linear on the CPU inside `model`, in place; the model can no longer be trained.

    `halve` stores panels in bfloat16 where that is exact: for models that run for one or two rows at a time. None
    halves them where that is no slower for any number of rows.

    `widen` lets a bfloat16 model compute in float32 from its weights as they are, if all matrices belong to linears and
    halving them pays: that is faster than torch in bfloat16, and a row's result does not depend on the others.
    """
    widen = widen and _can_widen(model)
    dtype, nothing = torch.bfloat16 if widen else torch.float32, "there are no float32 linears on the CPU"
    groups = _groups(model, dtype)
    kernel, words = load_kernel(cache=cache) if groups else (None, nothing)
    if kernel is not None and halve is None:
        halve = kernel.halving_pays
    if kernel is None or (widen and not halve):
        return Packing(linears=0, words=words if kernel is None else nothing)
    count = 0
    for parent, names in groups:
        linears = [getattr(parent, name) for name in names]
        several = pack(kernel, linears, halve=bool(halve))
        for name, packed in zip(names, several, strict=True):
            setattr(parent, name, packed)
            count += 1
    if widen:
        _widen(model)
    return Packing(linears=count, words=words)


def _can_widen(model: nn.Module) -> bool:
    """Whether it is bfloat16 on the CPU, and only embeddings would take twice the memory."""
    own = [(module, weight) for module in model.modules() for weight in module.parameters(recurse=False)]
    return all(
        weight.dtype == torch.bfloat16
        and weight.is_cpu
        and (weight.ndim < 2 or isinstance(module, nn.Embedding) or _can_pack(module, torch.bfloat16))
        for module, weight in own
    )


def _widen(model: nn.Module) -> None:
    """Convert everything that is not packed to float32."""
    for module in model.modules():
        if not isinstance(module, PackedLinear):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.float()
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.float())


def _groups(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Find the linears: each parent with the names of those to pack together."""
    groups: list[tuple[nn.Module, tuple[str, ...]]] = []
    for parent in model.modules():
        inputs = {name: child.in_features for name, child in parent.named_children() if _can_pack(child, dtype)}
        together = [group for group in GROUPS if len({inputs.get(name) for name in group}) == 1 and group[0] in inputs]
        grouped = {name for group in together for name in group}
        groups += [(parent, group) for group in (*together, *((name,) for name in inputs if name not in grouped))]
    return groups


def _can_pack(module: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Whether it is exactly an nn.Linear (subclasses may compute something else), of this dtype, without hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == dtype
        and module.weight.is_cpu
        and module.weight.numel() > 0
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
