"""How the target's states enter the drafter: their size before and after the norms, and who speaks loudest.

The share of state i is |W_i x_i| / sum_j |W_j x_j|, where W_i are the columns of `fc` that read it and x_i is what
reaches them. One state that drowns the others is what EAGLE 3.1's `fc_norm` is against.

Shapes: T tokens, A auxiliary states, D target hidden, X = A * D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafter.attention_mass import rms
from eyas.drafter.model import Drafter


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Averages over the tokens of a transcript that a round may start at."""

    state_rms: tuple[float, ...]
    """Of each auxiliary state as the target gives it."""
    read_rms: tuple[float, ...]
    """Of each state as `fc` reads it: behind `norm_before_fc` and `fc_norm`."""
    share: tuple[float, ...]
    fused_rms: float


@torch.inference_mode()
def measure_fusion(drafter: Drafter, aux_TX: Tensor) -> Fusion:
    """Measure at these tokens."""
    states = drafter.config.num_aux_hidden_states
    aux_TX = aux_TX.to(drafter.fc.weight.dtype)
    read_TX = aux_TX if drafter.input_norm is None else drafter.input_norm(aux_TX)
    parts = list(read_TX.chunk(states, dim=-1))
    if drafter.fc_norm is not None:
        parts = [norm(part) for norm, part in zip(drafter.fc_norm, parts, strict=True)]
    columns = drafter.fc.weight.chunk(states, dim=-1)
    size_AT = torch.stack([functional.linear(x, w).float().norm(dim=-1) for x, w in zip(parts, columns, strict=True)])
    share_A = (size_AT / size_AT.sum(dim=0).clamp(min=1e-30)).mean(dim=1)
    return Fusion(
        state_rms=tuple(float(rms(state).mean()) for state in aux_TX.chunk(states, dim=-1)),
        read_rms=tuple(float(rms(part).mean()) for part in parts),
        share=tuple(share_A.tolist()),
        fused_rms=float(rms(drafter.fuse(aux_TX)).mean()),
    )
