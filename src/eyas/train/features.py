"""What the target knows about a batch, wherever it comes from.

A source maps a `TrainingBatch` to `Features`: auxiliary states that the drafter reads, and a teacher that says, for any
rows, how the target would go on. Sources live in sources/: `live` runs the target, `served` asks servers that do, and
`cache` reads what either once said.

Shapes: T tokens, X concatenated auxiliary states, C chosen rows, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class FetchingSource(FeatureSource, Protocol):
    """A source that is told early what will be asked, and may not get all of it."""

    def prefetch(self, batch: TrainingBatch) -> None:
        """This batch will be asked for, after those that were named before it; returns at once."""
        ...

    def available(self, batch: TrainingBatch) -> TrainingBatch:
        """Wait for the batch; the same, in which documents that could not be had teach nothing.

        `InterruptedWaitError` where the run is to stop and nothing comes.
        """
        ...


class InterruptedWaitError(Exception):
    """The run is to stop, and what it waits for is not coming."""


class OpenSource(Protocol):
    """Opens the source that computes states, as opposed to remembering them."""

    def __call__(self, aux_layer_ids: Sequence[int], *, compiled: bool) -> FeatureSource:
        """Features with the states behind these layers; `compiled` is for many batches of one shape."""
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
