"""States and distributions of the target for a batch, whichever source they come from.

A source maps a `TrainingBatch` to `Features`: the auxiliary states that the drafter reads, and teachers that give the
target's distribution after any row. In sources/: `live` runs the target, `served` asks vLLM servers that run it, and
`cache` reads what either of them wrote down.

Shapes: T tokens, A auxiliary states, D their width, X = A * D, C chosen rows, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from eyas.train.batch import TrainingBatch


class TargetDistribution(Protocol):
    """Distribution of the target for some rows, over one drafter's vocabulary."""

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        """p [C, W]; the drafter's own distribution fills in where only a sum is known."""

    @property
    def best_C(self) -> Tensor:
        """The target's most likely token, as a target id."""


Teacher = Callable[[Tensor], TargetDistribution]
"""Gives the target's distribution after the tokens `row_C` of one batch, for one draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """States and distributions of the target for one batch."""

    aux_TX: Tensor
    """States of `aux_layer_ids`, concatenated."""
    aux_layer_ids: tuple[int, ...]
    teachers: Callable[[Tensor], Teacher]
    """Gives the teacher for a draft vocabulary `target_ids_W`; drafters trained side by side may differ in it."""

    def aux_of(self, layer_ids: Sequence[int]) -> Tensor:
        """States of some of the layers; drafters trained side by side may read different ones."""
        if tuple(layer_ids) == self.aux_layer_ids:
            return self.aux_TX
        states = dict(zip(self.aux_layer_ids, self.aux_TX.chunk(len(self.aux_layer_ids), dim=-1), strict=True))
        return torch.cat([states[k] for k in layer_ids], dim=-1)

    def with_noise(self, layer_ids: Sequence[int], share: float, seed: Sequence[int]) -> "Features":
        """Features with Gaussian noise on the states of these layers, so that a drafter does not rely on last digits.

        When served, states come from another precision, another quantisation, or a target that was tuned a little.
        The noise is relative to each state's own RMS, which differs a thousandfold between layers and tokens. It is a
        function of `seed`, so resumed runs and runs on more processes have the same noise. Teachers stay as they are.
        """
        aux_TX = self.aux_of(layer_ids)
        state_TAD = aux_TX.float().reshape(len(aux_TX), len(layer_ids), -1)
        mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        generator = torch.Generator(aux_TX.device).manual_seed(mixed)
        noise_TAD = torch.randn(state_TAD.shape, generator=generator, device=aux_TX.device)
        rms_TA1 = state_TAD.square().mean(dim=-1, keepdim=True).sqrt()
        noisy_TX = (state_TAD + share * rms_TA1 * noise_TAD).flatten(1).to(aux_TX.dtype)
        return replace(self, aux_TX=noisy_TX, aux_layer_ids=tuple(layer_ids))


FeatureSource = Callable[[TrainingBatch], Features]


@runtime_checkable
class FetchingSource(Protocol):
    """Feature source that is told of batches ahead of time, and may miss some documents."""

    def __call__(self, batch: TrainingBatch) -> Features: ...

    def prefetch(self, batch: TrainingBatch) -> None:
        """Announce a batch, to be fetched after those announced before; returns at once."""

    def available(self, batch: TrainingBatch) -> TrainingBatch:
        """Wait for the batch and return it; documents that could not be fetched teach nothing in it.

        Raises `InterruptedWaitError` if the run is to stop and nothing arrives.
        """


class InterruptedWaitError(Exception):
    """Raised when the run is to stop while it waits for features that do not arrive."""


class OpenSource(Protocol):
    """Opens the source that computes states (as opposed to reading a cache)."""

    def __call__(self, aux_layer_ids: Sequence[int], *, compiled: bool) -> FeatureSource:
        """Source of features with the states of these layers; `compiled` is for many batches of one shape."""


@dataclass(frozen=True, kw_only=True)
class ExactDistribution:
    """Exact distribution from the target's logits."""

    logits_CW: Tensor
    normaliser_C: Tensor
    """Log of the sum of exponentials over the target's whole vocabulary."""
    best_C: Tensor

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        return (self.logits_CW.float() - self.normaliser_C[:, None]).exp()
