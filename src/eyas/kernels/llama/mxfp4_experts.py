"""Experts whose weights stay in MXFP4 on a GPU (`linear/mxfp4_weight.py`).

The module replaces that of transformers. Called as a module, it dequantises each expert that has tokens and multiplies
by torch; passes of the engine run the kernels of `mxfp4_experts_triton.py` instead.

Shapes: N tokens of a pass, K experts per token, E experts, D hidden size, I intermediate size, G = 2 I gates and ups.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight
from eyas.kernels.linear.served_linear import ServedWeights
from eyas.kernels.llama.experts import Experts, Gating, Router, Routes, ServedExperts, mixed


class Mxfp4Experts(ServedExperts, ServedWeights):
    """Experts in MXFP4; called as a module, it dequantises one after the other."""

    gate_up: Mxfp4Weight
    down: Mxfp4Weight
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, experts: Any, gate_up: Mxfp4Weight, down: Mxfp4Weight, dtype: torch.dtype) -> None:
        """Replace `experts`, with its biases, which may be set later; `dtype` is that of rows."""
        super().__init__()
        self.is_concatenated = bool(getattr(experts, "is_concatenated", True))
        self._gate = type(experts)._apply_gate  # reads the attributes below
        for name in ("act_fn", "alpha", "limit"):
            if hasattr(experts, name):
                setattr(self, name, getattr(experts, name))
        # Not buffers: nothing may cast or move them.
        self.gate_up, self.down, self.dtype = gate_up, down, dtype
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(experts, name, None))

    def packed(self) -> list[Tensor]:
        return [*self.gate_up.packed(), *self.down.packed()]

    def fused(self, router: Router, *, interleaved: bool, gating: Gating) -> "FourBitExperts | None":
        gate_up, down = self.gate_up, self.down
        shapes = (down.outputs, down.inputs), router.weight_ED.shape
        if shapes != ((gate_up.inputs, gate_up.outputs // 2), (gate_up.count, gate_up.inputs)):
            return None
        return FourBitExperts(
            router=router,
            interleaved=interleaved,
            gating=gating,
            gate_up=gate_up,
            gate_up_bias_EG=None if self.gate_up_proj_bias is None else self.gate_up_proj_bias.detach(),
            down=down,
            down_bias_ED=None if self.down_proj_bias is None else self.down_proj_bias.detach(),
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def run_expert(expert: int, x: Tensor) -> Tensor:
            gates: Tensor = self._gate(self, _product(self.gate_up, self.gate_up_proj_bias, expert, x))
            return _product(self.down, self.down_proj_bias, expert, gates)

        return mixed(hidden_states, Routes(top_k_index, top_k_weights), self.gate_up.count, run_expert)


@dataclass(frozen=True, kw_only=True, eq=False)
class FourBitExperts(Experts):
    """Experts in MXFP4, as a fused block runs them."""

    gate_up: Mxfp4Weight
    gate_up_bias_EG: Tensor | None
    down: Mxfp4Weight
    down_bias_ED: Tensor | None

    @property
    def count(self) -> int:
        return self.gate_up.count

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        gates = self.gated(_product(self.gate_up, self.gate_up_bias_EG, expert, x))
        return _product(self.down, self.down_bias_ED, expert, gates)


def _product(weight: Mxfp4Weight, bias: Tensor | None, expert: int, x: Tensor) -> Tensor:
    """A product that is rounded before its bias is added."""
    made = functional.linear(x, weight.dequantised(expert, x.dtype))
    return made if bias is None else made + bias[expert]
