"""Experts as compiled linears (`linear/packed_linear.py`, or quantised), for decoding on a CPU.

transformers keeps the weights of all experts of a layer in two tensors. The module here replaces that of transformers
and is called in the same way: it has the weights once, in panels, and the model's own code keeps working. A row's
result does not depend on the rows beside it, to the last bit.

Shapes: N tokens of a pass, K experts per token, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.kernels.linear.packed_linear import LinearKernel, PackedLinear, load_kernel, pack
from eyas.kernels.linear.served_linear import CompiledLinear
from eyas.kernels.llama.experts import Experts, Gating, Router, Routes, ServedExperts, mixed

WEIGHTS = ("gate_up_proj", "down_proj")
CLOSE = 1e-4
"""How far packed experts may differ from the originals, relative to the length of their output."""


class PackedExperts(ServedExperts):
    """Experts that are compiled linears."""

    def __init__(
        self,
        experts: Any,
        gate_up: Sequence[CompiledLinear],
        down: Sequence[CompiledLinear],
        kernel: LinearKernel | None,
    ) -> None:
        """Replace `experts`; `kernel` multiplies the router."""
        super().__init__()
        self.is_transposed, self.is_concatenated = experts.is_transposed, experts.is_concatenated
        self.has_bias = hasattr(experts, "gate_up_proj_bias")
        self._gate = type(experts)._apply_gate  # reads the activation and numbers of the module, whatever their names
        if hasattr(experts, "act_fn"):
            self.act_fn = experts.act_fn
        for name, value in vars(experts).items():
            if isinstance(value, int | float) and not hasattr(self, name):
                setattr(self, name, value)
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self.kernel = kernel
        self.register_state_dict_post_hook(_as_transformers)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, kernel: LinearKernel, experts: Any, *, halve: bool) -> "PackedExperts":
        gate_up, down = (_packed(kernel, experts, name, halve) for name in WEIGHTS)
        return cls(experts, gate_up, down, kernel)

    @property
    def products(self) -> Sequence[tuple[CompiledLinear, CompiledLinear]]:
        return list(zip(self.gate_up, self.down, strict=True))  # type: ignore[arg-type]

    def fused(self, router: Router, *, interleaved: bool, gating: Gating) -> "CompiledExperts":
        if self.kernel is not None:  # a second copy, of a small matrix
            packed = pack(self.kernel, [_linear(router.weight_ED, router.bias_E)])[0]
            router = replace(router, packed=packed)
        return CompiledExperts(router=router, interleaved=interleaved, gating=gating, products=self.products)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def run_expert(expert: int, x: Tensor) -> Tensor:
            made: Tensor = self.down[expert](self._gate(self, self.gate_up[expert](x)))
            return made

        return mixed(hidden_states, Routes(top_k_index, top_k_weights), len(self.down), run_expert)


def _packed(kernel: LinearKernel, experts: Any, name: str, halve: bool) -> list[PackedLinear]:
    """Pack the matrices `name` of all experts."""
    weights = getattr(experts, name).detach()
    weights = weights.transpose(1, 2) if experts.is_transposed else weights
    biases = getattr(experts, f"{name}_bias").detach() if hasattr(experts, f"{name}_bias") else None
    linears = (_linear(weight, None if biases is None else biases[e]) for e, weight in enumerate(weights))
    return [pack(kernel, [linear], halve=halve)[0] for linear in linears]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear over existing tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _as_transformers(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Save under the names and shapes of transformers."""
    assert isinstance(module, PackedExperts)
    for name, inner in zip(WEIGHTS, ("gate_up", "down"), strict=True):
        weights = torch.stack([state.pop(f"{prefix}{inner}.{e}.weight") for e in range(len(module.down))])
        state[prefix + name] = weights.transpose(1, 2).contiguous() if module.is_transposed else weights
        if module.has_bias:
            biases = [state.pop(f"{prefix}{inner}.{e}.bias") for e in range(len(module.down))]
            state[f"{prefix}{name}_bias"] = torch.stack(biases)


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledExperts(Experts):
    """Experts with packed weights, as a fused block runs them."""

    products: Sequence[tuple[CompiledLinear, CompiledLinear]]

    @property
    def count(self) -> int:
        return len(self.products)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        gate_up, down = self.products[expert]
        return down.product(self.gated(gate_up.product(x)))


def pack_experts(model: nn.Module, *, halve: bool | None = None, cache: Path | None = None) -> int:
    """Replace all float32 experts on the CPU inside `model`, in place; returns how many layers had some.

    `halve` is that of `pack_linears`. Experts whose results differ when packed are left alone.
    """
    found = [(parent, name) for parent in model.modules() for name, x in parent.named_children() if _can_pack(x)]
    kernel = load_kernel(cache=cache)[0] if found else None
    if kernel is None:
        return 0
    count = 0
    for parent, name in found:
        experts = getattr(parent, name)  # held no longer than this: the weights of one layer exist twice at a time
        packed = PackedExperts.of(kernel, experts, halve=kernel.halving_pays if halve is None else halve)
        if _is_same(packed, experts):
            setattr(parent, name, packed)
            count += 1
    return count


def _can_pack(module: Any) -> bool:
    """Whether it is a plain experts module of transformers: two tensors, perhaps two biases, and no hooks."""
    own = dict(module.named_parameters())
    return (
        set(own) in ({*WEIGHTS}, {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)})
        and all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "_apply_gate"))
        and all(own[name].ndim == 3 and own[name].numel() > 0 for name in WEIGHTS)
        and all(x.dtype == torch.float32 and x.is_cpu for x in own.values())
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


@torch.no_grad()
def _is_same(packed: PackedExperts, experts: nn.Module) -> bool:
    """Compare both on a few rows that reach every expert."""
    count, hidden = len(packed.down), packed.products[0][0].in_features
    expert_NK = torch.stack([torch.arange(count), torch.arange(count).roll(1)], dim=1)
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(count, hidden, generator=generator)
    weight_NK = torch.rand(expert_NK.shape, generator=generator)
    theirs = experts(x_ND, expert_NK, weight_NK)
    try:
        ours = packed(x_ND, expert_NK, weight_NK)
    except AttributeError:  # their gate reads an attribute that was not copied
        return False
    return bool((ours - theirs).norm() <= CLOSE * theirs.norm())
