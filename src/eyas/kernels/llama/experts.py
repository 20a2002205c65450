"""The feed-forward of a mixture-of-experts block.

    more = sum over the chosen experts e of weight_e * down_e(gate(gate_e, up_e))      gate_e, up_e of the norm of x

Mixtral, Qwen3-MoE and gpt-oss are this. They differ in how routers turn scores into weights, in biases, in activations
and in the layout of weights; see `Router` and `Experts`. Here torch computes it expert by expert, which reads token
counts from the device: on a GPU the kernels of `experts_triton.py` run instead, and on a CPU the compiled products of
`packed_experts.py`.

Invariant, as in `block.py`: every number is rounded where transformers rounds it. A token's experts are added up in the
order of their weights, whatever else is in the pass.

Shapes: N tokens of a pass, K experts per token, P = N * K pairs of token and expert, E experts, D hidden size, I
intermediate size, G = 2 I gates and ups.
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
    """The experts of each token."""

    expert_NK: Tensor
    """Chosen experts, in order of descending weight."""
    weight_NK: Tensor

    def dense(self, experts: int) -> Tensor:
        """The weight of every expert [N, E], 0 if not chosen."""
        weight_NE = self.weight_NK.new_zeros(len(self.weight_NK), experts)
        return weight_NE.scatter_(1, self.expert_NK.long(), self.weight_NK)


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """Chooses the experts with the K largest scores; their weights are a softmax over all scores."""

    weight_ED: Tensor
    bias_E: Tensor | None
    top_k: int
    renormalises: bool
    """Divide weights by their sum, which makes them a softmax over the chosen scores."""
    dtype: torch.dtype
    """The dtype of the weights."""
    module: nn.Module
    """The model's own router."""
    packed: PackedLinear | None = None
    """The product in panels, where a row's scores must not depend on the rows beside it."""

    def __call__(self, x_ND: Tensor) -> Routes:
        packed = self.packed
        score_NE = functional.linear(x_ND, self.weight_ED, self.bias_E) if packed is None else packed(x_ND)
        weight_NK, expert_NK = score_NE.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalises:
            weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
        return Routes(expert_NK, weight_NK.to(self.dtype))


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to at most `limit` and up to +-`limit`."""

    alpha: float
    limit: float


Gating = Activation | ClampedSwiglu


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts(ABC):
    """The experts of a layer and their router."""

    router: Callable[[Tensor], Routes]
    interleaved: bool
    """Whether gates and ups alternate in an expert's outputs; otherwise all gates come first."""
    gating: Gating

    @property
    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def run_expert(self, expert: int, x: Tensor) -> Tensor: ...

    def __call__(self, x_ND: Tensor) -> Tensor:
        """The weighted sum of each row's experts, by torch."""
        return mixed(x_ND, self.router(x_ND), self.count, self.run_expert)

    def gated(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up."""
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


class ServedExperts(nn.Module):
    """A module with packed weights that takes the place of a model's own experts."""

    @abstractmethod
    def fused(self, router: Router, *, interleaved: bool, gating: Gating) -> Experts | None:
        """The experts as a fused block runs them; None if they and the router differ in size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainExperts(Experts):
    """Experts with plain tensors as weights."""

    gate_up_EGD: Tensor
    """Weights [E, G, D]; those of one output are contiguous."""
    gate_up_bias_EG: Tensor | None
    down_EDI: Tensor
    down_bias_ED: Tensor | None

    @property
    def count(self) -> int:
        return len(self.gate_up_EGD)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        up_bias, down_bias = (None if b is None else b[expert] for b in (self.gate_up_bias_EG, self.down_bias_ED))
        return _linear(self.gated(_linear(x, self.gate_up_EGD[expert], up_bias)), self.down_EDI[expert], down_bias)


def mixed(x_ND: Tensor, routes: Routes, count: int, run_expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum of each row's experts, which run one after the other, each on its rows."""
    expert_NK, weight_NK = routes
    tokens, top_k = expert_NK.shape
    expert_P, pair_P = expert_NK.flatten().sort(stable=True)
    rows_of = torch.split(x_ND.index_select(0, pair_P // top_k), torch.bincount(expert_P, minlength=count).tolist())
    made = torch.cat([run_expert(e, rows) for e, rows in enumerate(rows_of) if len(rows)])
    made_PD = torch.empty_like(made).index_copy_(0, pair_P, made)
    weighted_NKD = made_PD.view(tokens, top_k, -1) * weight_NK[..., None]
    return weighted_NKD.sum(dim=1).to(x_ND.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear whose product is rounded before its bias is added."""
    made = functional.linear(x, weight)
    return made if bias is None else made.add_(bias)
