"""Linear layers whose float32 weights lie in panels, for the few rows of decoding on a processor.

Verifying four drafted tokens should cost little more than decoding one, since the weights are read once either way;
torch's product for two or more rows takes three times as long as for one. packed_linear.c says why and does better.
There is one copy of the weights, in panels; it serves any number of rows, prompts included. Only a head that shares its
matrix with the embedding becomes a second copy: lookups need rows, the product needs panels.

Products of a row or two take as long as reading the weights. Halved panels keep in two bytes what bfloat16 holds
exactly, so that float32 results come out in less time: always for drafters, which run for few rows; for targets where
the processor's vectors are wide enough, or a matrix unit (`tiles.h`) makes all products cheaper.

Invariant: a row's result does not depend on how many rows are computed with it, to the last bit. Greedy decoding
therefore gives the same tokens one by one and verified in drafts.

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

from eyas.kernels.native import load_native

SOURCE = Path(__file__).with_name("packed_linear.c")
STEP = 32
"""Inputs that halved panels are made of a multiple of."""
# Linears of one parent that read the same input: packed side by side, so that `joined` can run them as one.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, eq=False)
class LinearKernel:
    """The compiled product."""

    library: ctypes.CDLL
    made_by: str

    def __post_init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_long
        product = self.library.packed_linear
        product.argtypes = [pointer, size, size, pointer, ctypes.c_int, pointer, size, pointer, ctypes.c_int]
        product.restype = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "LinearKernel":
        return self  # code, not state: copies of a model share it

    @property
    def width(self) -> int:
        """Outputs in a panel, C."""
        return int(self.library.panel_width())

    @property
    def tiles(self) -> bool:
        """Whether halved panels are multiplied by the processor's matrix unit."""
        return bool(self.library.uses_tiles())

    @property
    def halving_pays(self) -> bool:
        """Whether halved panels are no slower than whole ones, however many rows there are."""
        return bool(self.library.halving_pays())

    def linear(self, x: Tensor, layer: "PackedLinear", out: Tensor | None = None) -> Tensor:
        """As torch's linear; x, bias and `out` are float32 on the processor, and all lie densely but for x."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], layer.out_features)) if out is None else out
        if x.dtype != torch.float32 or y.dtype != torch.float32:  # anything else would be read and written past its end
            raise TypeError(f"compiled products read and write float32, not {x.dtype} and {y.dtype}")
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
    """Return the kernel and who compiled it, or None and the reason why there is none."""
    library, words = load_native(SOURCE, cache=cache)
    if library is None:
        return None, words
    kernel = LinearKernel(library, words)
    return (kernel, words) if _is_right(kernel) else (None, f"what {words} made computes wrongly")


@torch.no_grad()
def _is_right(kernel: LinearKernel) -> bool:
    """Try it: the compiler is one that nobody here has met."""
    linear = nn.Linear(2 * kernel.width + 1, 2 * kernel.width + 1, device="meta").to_empty(device="cpu")
    for parameter in linear.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 - 3)  # small integers: sums are exact
    x_MK = torch.arange(15 * linear.in_features).view(15, -1) % 5 - 2.0
    expected = linear(x_MK)
    return all(torch.equal(pack(kernel, [linear], halve=halve)[0](x_MK), expected) for halve in (False, True))


class PackedLinear(nn.Module):
    """A linear layer for inference; what the kernel does not do (gradients, other types) runs unpacked and slowly."""

    panels_PKC: Tensor
    """float32; or bfloat16 if halved, then an output's weights for two neighbouring inputs lie side by side, and inputs
    are filled up with zeros to a multiple of STEP."""
    bias: Tensor | None

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
        self.halved = halved  # not told by the type: whatever the module is cast to, panels stay in their order
        self.register_buffer("panels_PKC", panels_PKC)
        self.register_buffer("bias", bias_N)

    @property
    def weight(self) -> Tensor:
        """The weight as nn.Linear keeps it, [N, K]: a copy made on each call."""
        panels_PKC = self.panels_PKC
        if self.halved:
            panels, inputs, width = panels_PKC.shape
            panels_PKC = panels_PKC.view(panels, inputs // 2, width, 2).transpose(2, 3).flatten(1, 2).float()
        weight_NK = panels_PKC[:, : self.in_features].transpose(1, 2).flatten(0, 1)
        return weight_NK[: self.out_features].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of rows [..., K], [..., N]."""
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

    def product(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """As `LinearKernel.linear`."""
        return self.kernel.linear(x, self, out)

    def extra_repr(self) -> str:
        """As nn.Linear prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A saved model holds the names and shapes of nn.Linear, not panels, which differ between processors."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias


@torch.no_grad()
def pack(kernel: LinearKernel, linears: Sequence[nn.Linear], *, halve: bool = False) -> list[PackedLinear]:
    """Pack linears of equally many inputs side by side into one block of memory, halved if told to and possible."""
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


def joined(linears: Sequence[PackedLinear]) -> PackedLinear | None:
    """Return one layer with the outputs of all, in order, on the same memory; None where they do not lie side by side.

    They do after `pack` if every number of outputs but the last is a multiple of the panel's width.
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
    return PackedLinear(first.kernel, panels_PKC, first.in_features, outputs, bias_N, halved=first.halved)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What `pack_linears` did."""

    linears: int
    """How many were replaced; 0 means that the model is as it was."""
    bytes: int
    """Size of all panels."""
    second_copy_bytes: int
    """The part of it whose original stays in memory too: a head tied to the embedding."""
    words: str
    """Who compiled the kernel, or why nothing was packed."""


def pack_linears(
    model: nn.Module, *, halve: bool | None = None, widen: bool = False, cache: Path | None = None
) -> Packing:
    """Replace every float32 nn.Linear on the processor inside `model`, in place; the model can no longer be trained.

    Panels are halved, where weights allow it, if told to: for models that run for one or two rows at a time. Left open,
    they are where that is no slower for any number of rows.

    `widen` lets a bfloat16 model compute in float32 from the weights as they are, where these are then halved and
    belong to linears all: that is faster than torch in bfloat16, and a row's result does not depend on the others.
    """
    widen = widen and _can_widen(model)
    dtype, nothing = torch.bfloat16 if widen else torch.float32, "there are no float32 linears on the processor"
    groups = _groups(model, dtype)
    kernel, words = load_kernel(cache=cache) if groups else (None, nothing)
    if kernel is not None and halve is None:
        halve = kernel.halving_pays
    if kernel is None or (widen and not halve):
        return Packing(linears=0, bytes=0, second_copy_bytes=0, words=words if kernel is None else nothing)
    kept = {
        id(parameter)
        for module in model.modules()
        if not _can_pack(module, dtype)
        for parameter in module.parameters(recurse=False)
    }
    count = total = second_copy = 0
    for parent, names in groups:
        linears = [getattr(parent, name) for name in names]
        several = pack(kernel, linears, halve=bool(halve))
        for name, linear, packed in zip(names, linears, several, strict=True):
            setattr(parent, name, packed)
            count += 1
            total += packed.panels_PKC.nbytes
            second_copy += packed.panels_PKC.nbytes if id(linear.weight) in kept else 0
    if widen:
        _widen(model)
    return Packing(linears=count, bytes=total, second_copy_bytes=second_copy, words=words)


def _can_widen(model: nn.Module) -> bool:
    """Whether it is bfloat16 on the processor, and has no matrix that would take twice the memory but embeddings."""
    own = [(module, weight) for module in model.modules() for weight in module.parameters(recurse=False)]
    return all(
        weight.dtype == torch.bfloat16
        and weight.is_cpu
        and (weight.ndim < 2 or isinstance(module, nn.Embedding) or _can_pack(module, torch.bfloat16))
        for module, weight in own
    )


def _widen(model: nn.Module) -> None:
    """Make float32 of all that is not packed."""
    for module in model.modules():
        if not isinstance(module, PackedLinear):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.float()
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.float())


def _groups(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Where the linears are: a parent and the names of those to be packed together."""
    groups: list[tuple[nn.Module, tuple[str, ...]]] = []
    for parent in model.modules():
        inputs = {name: child.in_features for name, child in parent.named_children() if _can_pack(child, dtype)}
        together = [group for group in GROUPS if len({inputs.get(name) for name in group}) == 1 and group[0] in inputs]
        grouped = {name for group in together for name in group}
        groups += [(parent, group) for group in (*together, *((name,) for name in inputs if name not in grouped))]
    return groups


def _can_pack(module: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Whether it is an nn.Linear of this type, no subclass, which may do otherwise, and has no hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == dtype
        and module.weight.is_cpu
        and module.weight.numel() > 0
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
