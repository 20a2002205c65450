"""Features at a pace: rests before and after every pass of the target, and within what is made of it.

A step on a CPU takes seconds, and so does one of a large target on a GPU. So there are rests between modules, forwards
and backwards, and between the depths that are scored. Nothing of what is computed changes.

Shapes: C chosen rows, W draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from eyas.train.batch import TrainingBatch
from eyas.train.features import Features, FeatureSource, OpenSource, TargetDistribution, Teacher
from eyas.train.pace import Pace


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedSources:
    """Opens sources that keep to a pace; compiled ones rest between batches alone."""

    open_source: OpenSource
    pace: Pace

    def __call__(self, aux_layer_ids: Sequence[int], *, compiled: bool) -> FeatureSource:
        """As `open_source` does."""
        return PacedSource(self.open_source(aux_layer_ids, compiled=compiled), self.pace, within=not compiled)


class PacedSource:
    """Another source's features."""

    def __init__(self, source: FeatureSource, pace: Pace, *, within: bool = True) -> None:
        self._source, self._pace, self._within = source, pace, within

    def __call__(self, batch: TrainingBatch) -> Features:
        """Features of one batch; what was done with those before has its rest first."""
        self._pace.rest()
        features = self._source(batch)
        self._pace.rest()
        if not self._within:
            return features

        def teachers(target_ids_W: Tensor) -> Teacher:
            return _PacedTeacher(features.teachers(target_ids_W), self._pace)

        return replace(features, teachers=teachers)


class _PacedTeacher:
    def __init__(self, teacher: Teacher, pace: Pace) -> None:
        self._teacher, self._pace = teacher, pace

    def distribution(self, row_C: Tensor) -> TargetDistribution:
        self._pace.rest()
        return _PacedDistribution(self._teacher.distribution(row_C), self._pace)


class _PacedDistribution:
    """Asked once for every depth that is scored."""

    def __init__(self, distribution: TargetDistribution, pace: Pace) -> None:
        self._distribution, self._pace = distribution, pace

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        self._pace.rest()
        return self._distribution.probabilities(log_q_CW)

    @property
    def best_C(self) -> Tensor:
        return self._distribution.best_C


@contextmanager
def rests_between_modules(pace: Pace, *, compiled: bool = False) -> Iterator[None]:
    """Inside, rests lie between any two modules, forwards and backwards; compiled code is not interrupted."""
    if pace.share == 1 or compiled:
        yield
        return

    def ran(module: nn.Module, given: Any, output: Any) -> None:
        pace.rest()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(came_back)  # type: ignore[no-untyped-call]

    def came_back(gradient: Tensor) -> None:
        pace.rest()

    hook = register_module_forward_hook(ran)
    try:
        yield
    finally:
        hook.remove()
