"""The feed-forward of a block whose tokens each go to a few of many experts.

    more = sum over the chosen experts e of weight_e * down_e(gate(gate_e, up_e))      gate_e, up_e of the norm of x

Mixtral, Qwen3-MoE and gpt-oss are this. They differ in what their router makes of its scores, in biases, in how gates
are opened and in how the weights lie in memory; `Router` and `Experts` say what there is. By torch, expert by expert,
which asks the device how many tokens each has: on a GPU the kernels of `experts_triton.py` run instead, and on a CPU
products are those of `packed_experts.py` where there is a compiler.

Invariant, as in `block.py`: every number is rounded where transformers rounds it. What a token gets is added up in the
order of its experts' weights, whatever else is in the pass.

Shapes: N tokens of a pass, K experts of a token, P = N * K pairs of both, E experts, D hidden size, I intermediate
size, G = 2 I gates and what they gate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.elementwise import Activation, elementwise_for
from eyas.kernels.linear.packed_linear import PackedLinear


class Routes(NamedTuple):
    """Which experts tokens go to."""

    expert_NK: Tensor
    """Largest weight first."""
    weight_NK: Tensor

    def dense(self, experts: int) -> Tensor:
        """The weight of every expert [N, E], 0 of those that were not chosen."""
        weight_NE = self.weight_NK.new_zeros(len(self.weight_NK), experts)
        return weight_NE.scatter_(1, self.expert_NK.long(), self.weight_NK)


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """Takes the experts of the K largest scores; their weights are a softmax of all scores."""

    weight_ED: Tensor
    bias_E: Tensor | None
    top_k: int
    renormalises: bool
    """Weights are divided by their sum, which makes them a softmax of the chosen scores alone."""
    dtype: torch.dtype
    """Weights are rounded to."""
    module: nn.Module
    """The model's own."""
    packed: PackedLinear | None = None
    """The same product, where a row's scores must not depend on the rows beside it."""

    def __call__(self, x_ND: Tensor) -> Routes:
        """By torch."""
        packed = self.packed
        score_NE = functional.linear(x_ND, self.weight_ED, self.bias_E) if packed is None else packed(x_ND)
        weight_NK, expert_NK = score_NE.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalises:
            weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
        return Routes(expert_NK, weight_NK.to(self.dtype))


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate up to `limit` and an up of no more than that either way."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts(ABC):
    """The experts of a layer, and who chooses among them."""

    router: Callable[[Tensor], Routes]
    interleaved: bool
    """Whether an expert's gates and what they gate come by turns; otherwise gates come first."""
    gating: Activation | ClampedSwiglu

    @property
    @abstractmethod
    def count(self) -> int:
        """How many there are."""

    @abstractmethod
    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """What one of them makes of rows."""

    def __call__(self, x_ND: Tensor) -> Tensor:
        """What the experts of each row make of it, by torch."""
        return mixed(x_ND, self.router(x_ND), self.count, self.run_expert)

    def gated(self, gate_up: Tensor) -> Tensor:
        """What the gates let through."""
        gates = gate_up.view(len(gate_up), -1, 2).unbind(-1) if self.interleaved else gate_up.chunk(2, dim=-1)
        gate, up = gates
        if isinstance(self.gating, ClampedSwiglu):
            limit = self.gating.limit
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            return (up + 1) * (gate * torch.sigmoid(gate * self.gating.alpha))
        compiled = elementwise_for(gate_up)
        if compiled is not None and not self.interleaved:
            return compiled.gate(gate_up, self.gating)
        return self.gating(gate) * up


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainExperts(Experts):
    """Experts whose weights lie in tensors."""

    gate_up_EGD: Tensor
    """An output's numbers lie side by side."""
    gate_up_bias_EG: Tensor | None
    down_EDI: Tensor
    down_bias_ED: Tensor | None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.gate_up_EGD)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """What one of them makes of rows."""
        up_bias, down_bias = (None if b is None else b[expert] for b in (self.gate_up_bias_EG, self.down_bias_ED))
        return _linear(self.gated(_linear(x, self.gate_up_EGD[expert], up_bias)), self.down_EDI[expert], down_bias)


def mixed(x_ND: Tensor, routes: Routes, count: int, run_expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """What the experts of each row make of it, one after the other, each with the rows that come to it."""
    expert_NK, weight_NK = routes
    tokens, top_k = expert_NK.shape
    expert_P, pair_P = expert_NK.flatten().sort(stable=True)
    rows_of = torch.split(x_ND.index_select(0, pair_P // top_k), torch.bincount(expert_P, minlength=count).tolist())
    made = torch.cat([run_expert(e, rows) for e, rows in enumerate(rows_of) if len(rows)])
    made_PD = torch.empty_like(made).index_copy_(0, pair_P, made)
    weighted_NKD = made_PD.view(tokens, top_k, -1) * weight_NK[..., None]
    return weighted_NKD.sum(dim=1).to(x_ND.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product is rounded before its bias is added."""
    made = functional.linear(x, weight)
    return made if bias is None else made.add_(bias)
