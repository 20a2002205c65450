"""What the target knows about a batch, wherever it comes from.

A source maps a `TrainingBatch` to `Features`: auxiliary states that the drafter reads, and a teacher that says, for any
rows, how the target would go on. Sources live in sources/: `live` runs the target, `cache` reads what it once said.
Another process (a vLLM server, say) would be a third and needs nothing but this protocol.

Shapes: T tokens, X concatenated auxiliary states, C chosen rows, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.train.batch import TrainingBatch


class TargetDistribution(Protocol):
    """The target's distribution for some rows, over one drafter's vocabulary."""

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        """p [C, W]; the drafter's own distribution fills in where the teacher remembers a sum only."""
        ...

    @property
    def best_C(self) -> Tensor:
        """The target's most likely token, as a target id."""
        ...


class Teacher(Protocol):
    """The target's distributions over one batch, for one draft vocabulary."""

    def distribution(self, row_C: Tensor) -> TargetDistribution:
        """What the target says behind the tokens `row_C`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Features:
    """A batch as the target saw it."""

    aux_TX: Tensor
    """States of `aux_layer_ids`, joined."""
    aux_layer_ids: tuple[int, ...]
    teachers: "TeacherFactory"

    def aux_of(self, layer_ids: Sequence[int]) -> Tensor:
        """The states of some of the layers; drafters side by side may read different ones."""
        if tuple(layer_ids) == self.aux_layer_ids:
            return self.aux_TX
        states = dict(zip(self.aux_layer_ids, self.aux_TX.chunk(len(self.aux_layer_ids), dim=-1), strict=True))
        return torch.cat([states[k] for k in layer_ids], dim=-1)


class TeacherFactory(Protocol):
    """Draft vocabularies differ from drafter to drafter, what the target said does not."""

    def __call__(self, target_ids_W: Tensor) -> Teacher:
        """A teacher over the target ids `target_ids_W`."""
        ...


class FeatureSource(Protocol):
    """Where features come from."""

    def __call__(self, batch: TrainingBatch) -> Features:
        """Features of one batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExactDistribution:
    """From the target's logits: exact."""

    logits_CW: Tensor
    normaliser_C: Tensor
    """Log of the sum of exponentials over the whole vocabulary of the target."""
    best_C: Tensor

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        """p as it is."""
        return (self.logits_CW.float() - self.normaliser_C[:, None]).exp()
