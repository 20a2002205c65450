"""Attention mass and entropy by depth: measures of drift for the doctor and the engine's drift probe.

`AttentionProbe` is a watcher of `RoundAttention`. The mass of a region of slots is the sum of a query's weights on it,
averaged over heads and layers:

    sink      the first slots of the sequence
    prompt    the rest of the prompt
    verified  verified tokens of the answer
    own       drafts of the round itself

Entropy is H = - sum_s w_s ln w_s of each head, averaged likewise; `spread` is H / ln(number of visible slots), which is
1 for uniform weights.

Shapes: R rounds, S depths, H heads, T slots.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

REGIONS = ("sink", "prompt", "verified", "own")
SINKS = 4


def rms(x: Tensor) -> Tensor:
    """Root mean square over the last dim, in float32."""
    return x.float().square().mean(dim=-1).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStatistics:
    """Mass, entropy and spread of every round."""

    mass: dict[str, NDArray[np.float64]]
    """[S, R] by region."""
    entropy_SR: NDArray[np.float64]
    spread_SR: NDArray[np.float64]


class AttentionProbe:
    """Accumulates the measures; keeps no weights."""

    def __init__(self, start_R: Tensor, *, prompt_length: int, depth: int, sinks: int = SINKS) -> None:
        self._start_R = start_R
        # Slot i holds token i + 1, so the last slot of the prompt already holds a token of the answer.
        self._bounds = (0, min(sinks, prompt_length - 1), prompt_length - 1)
        shape = (depth, len(start_R))
        self._mass = {region: torch.zeros(shape, dtype=torch.float64) for region in REGIONS}
        self._entropy, self._spread = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self._layers = [0] * depth

    def __call__(self, depth: int, layer: int, weights_HRS: Tensor, own: int) -> None:
        row, slots = depth - 1, weights_HRS.shape[-1] - own
        weights_RS = weights_HRS.mean(dim=0)
        first, sink_end, prompt_end = self._bounds
        borders = {"sink": (first, sink_end), "prompt": (sink_end, prompt_end), "verified": (prompt_end, slots)}
        for region, (start, end) in (borders | {"own": (slots, slots + own)}).items():
            self._mass[region][row] += weights_RS[:, start:end].sum(dim=-1).double().cpu()
        entropy_HR = torch.special.entr(weights_HRS).sum(dim=-1)
        visible_R = self._start_R + 1 + own
        self._entropy[row] += entropy_HR.mean(dim=0).double().cpu()
        # Spread is 1 for a query that sees one slot.
        share_HR = torch.where(visible_R > 1, entropy_HR / visible_R.clamp(min=2).log(), torch.ones_like(entropy_HR))
        self._spread[row] += share_HR.mean(dim=0).double().cpu()
        self._layers[row] += 1

    def statistics(self) -> AttentionStatistics:
        layers_S1 = torch.tensor(self._layers, dtype=torch.float64)[:, None].clamp(min=1)
        return AttentionStatistics(
            mass={region: (mass / layers_S1).numpy() for region, mass in self._mass.items()},
            entropy_SR=(self._entropy / layers_S1).numpy(),
            spread_SR=(self._spread / layers_S1).numpy(),
        )
