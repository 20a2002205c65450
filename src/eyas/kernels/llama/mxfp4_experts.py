"""Experts whose weights stay in MXFP4 on a GPU (`linear/mxfp4_weight.py`).

A module of ours takes the place of transformers' and is called as theirs was: then each expert that has tokens is
dequantised and multiplied by torch. Passes of the engine take the kernels of `mxfp4_experts_triton.py` instead.

Shapes: N tokens of a pass, K experts of a token, E experts, D hidden size, I intermediate size, G = 2 I gates and what
they gate.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight
from eyas.kernels.llama.experts import Experts, Routes, mixed


class Mxfp4Experts(nn.Module):
    """Stands where a model of transformers has its experts."""

    gate_up: Mxfp4Weight
    down: Mxfp4Weight
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, experts: Any, gate_up: Mxfp4Weight, down: Mxfp4Weight, dtype: torch.dtype) -> None:
        """Take the place of `experts`, with its biases, which may be given later; `dtype` is that of rows."""
        super().__init__()
        self.is_concatenated = bool(getattr(experts, "is_concatenated", True))
        self._gate = type(experts)._apply_gate  # reads these of the module
        for name in ("act_fn", "alpha", "limit"):
            if hasattr(experts, name):
                setattr(self, name, getattr(experts, name))
        # No buffers: nothing may cast or move them.
        self.gate_up, self.down, self.dtype = gate_up, down, dtype
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(experts, name, None))

    def packed(self) -> list[Tensor]:
        """What its weights take memory for."""
        return [*self.gate_up.packed(), *self.down.packed()]

    @property
    def nbytes(self) -> int:
        """In memory."""
        return sum(x.nbytes for x in self.packed())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the module that this one replaces."""

        def run_expert(expert: int, x: Tensor) -> Tensor:
            gates: Tensor = self._gate(self, _product(self.gate_up, self.gate_up_proj_bias, expert, x))
            return _product(self.down, self.down_proj_bias, expert, gates)

        return mixed(hidden_states, Routes(top_k_index, top_k_weights), self.gate_up.count, run_expert)

    def extra_repr(self) -> str:
        """As nn.Linear prints itself."""
        return f"experts={self.gate_up.count}, in_features={self.gate_up.inputs}, mxfp4"


@dataclass(frozen=True, kw_only=True, eq=False)
class FourBitExperts(Experts):
    """Experts whose weights are packed."""

    gate_up: Mxfp4Weight
    gate_up_bias_EG: Tensor | None
    down: Mxfp4Weight
    down_bias_ED: Tensor | None

    @property
    def count(self) -> int:
        """How many there are."""
        return self.gate_up.count

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """What one of them makes of rows."""
        gates = self.gated(_product(self.gate_up, self.gate_up_bias_EG, expert, x))
        return _product(self.down, self.down_bias_ED, expert, gates)


def _product(weight: Mxfp4Weight, bias: Tensor | None, expert: int, x: Tensor) -> Tensor:
    """A product is rounded before its bias is added."""
    made = functional.linear(x, weight.dequantised(expert, x.dtype))
    return made if bias is None else made + bias[expert]
