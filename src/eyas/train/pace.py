"""Training on a share of a device: work for a while, wait for the device, rest in proportion.

Training beside a server may take a share F of the device's time. All time that is not a rest counts as work: loading,
passes of the target, gradients, judging, the doctor. `rest` is called wherever work can be interrupted. It waits until
the device has finished its work, and then for (1 - F) / F of the time since the last rest.

Law: in any window of time, work takes at most F of it plus (1 - F) of one piece, which is what lies between two rests.
A rest that lasted too long is not made up for. The clock is monotonic, so setting the time of day changes nothing. A
piece counts `LONGEST_PIECE` at most, in case the process or its machine was suspended.

A step on a CPU takes seconds, as does one of a large target on a GPU. So there are rests before and after each pass of
the target, between modules, forwards and backwards, and between the depths that are scored. No result changes.

Shapes: C chosen rows, W draft vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from eyas.errors import UserError
from eyas.train.batch import TrainingBatch
from eyas.train.features import Features, FeatureSource, OpenSource, TargetDistribution, Teacher

SHORTEST_PIECE = 0.01
"""Seconds of work worth a rest; less is accumulated."""
LONGEST_PIECE = 60.0
"""Seconds that a piece of work counts at most."""
LONGEST_SLEEP = 0.25
"""Seconds after which a rest checks whether the run is to stop."""


class Pace:
    """Keeps one process to a share of its device."""

    def __init__(
        self,
        share: float = 1.0,
        *,
        before: float = 0.0,
        synchronize: Callable[[], None] = lambda: None,
        hurry: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`before` are seconds of earlier work that had no rest yet; `synchronize` waits for the device.

        While `hurry` is true, because the run is to save and end, there are no rests.
        """
        if not 0 < share <= 1:
            raise UserError(f"the share of the device is {share:g}, and must be above 0 and at most 1; 1 takes it all")
        self.share = share
        self._synchronize, self._hurry, self._clock, self._sleep = synchronize, hurry, clock, sleep
        self._began = clock() - before
        self._since: float | None = self._began  # None while resting
        self._worked = 0.0

    def rest(self) -> None:
        """Rest between two pieces of work."""
        if self.share == 1 or self._piece() < SHORTEST_PIECE:
            return
        self._synchronize()
        piece = self._piece()
        self._worked, self._since = self._worked + piece, None
        until = self._clock() + piece * (1 - self.share) / self.share
        while (left := until - self._clock()) > 0 and not self._hurry():
            self._sleep(min(left, LONGEST_SLEEP))
        self._since = self._clock()

    def seconds_worked(self) -> float:
        """Seconds of work since the start: a clock that stops during rests."""
        return self._worked + self._piece()

    @property
    def taken(self) -> float:
        """Share of the time since the start that was work."""
        return min(1.0, self.seconds_worked() / max(1e-9, self._clock() - self._began))

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": self.share,
            "taken": round(self.taken, 4),
            "worked_seconds": round(self.seconds_worked(), 1),
            "seconds": round(self._clock() - self._began, 1),
        }

    def _piece(self) -> float:
        """Seconds since the last rest, as far as they count."""
        gone = 0.0 if self._since is None else self._clock() - self._since
        return gone if self.share == 1 else min(gone, LONGEST_PIECE)


def threads_of(share: float, most: int) -> int:
    """Number of threads for a share of a processor that has use for `most`: at least one."""
    return max(1, int(share * most))


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedSources:
    """Opens sources that keep to a pace; compiled ones rest between batches only."""

    open_source: OpenSource
    pace: Pace

    def __call__(self, aux_layer_ids: Sequence[int], *, compiled: bool) -> FeatureSource:
        return PacedSource(self.open_source(aux_layer_ids, compiled=compiled), self.pace, within=not compiled)


class PacedSource:
    """Another source's features, with rests."""

    def __init__(self, source: FeatureSource, pace: Pace, *, within: bool = True) -> None:
        self._source, self._pace, self._within = source, pace, within

    def __call__(self, batch: TrainingBatch) -> Features:
        self._pace.rest()
        features = self._source(batch)
        self._pace.rest()
        return replace(features, teachers=self._paced(features.teachers)) if self._within else features

    def _paced(self, teachers: Callable[[Tensor], Teacher]) -> Callable[[Tensor], Teacher]:
        def teacher_of(target_ids_W: Tensor) -> Teacher:
            teacher = teachers(target_ids_W)

            def paced(row_C: Tensor) -> TargetDistribution:
                self._pace.rest()
                return _PacedDistribution(teacher(row_C), self._pace)

            return paced

        return teacher_of


class _PacedDistribution:
    """Rests before each depth that is scored."""

    def __init__(self, distribution: TargetDistribution, pace: Pace) -> None:
        self._distribution, self._pace = distribution, pace
        self.best_C = distribution.best_C

    def probabilities(self, log_q_CW: Tensor) -> Tensor:
        self._pace.rest()
        return self._distribution.probabilities(log_q_CW)


@contextmanager
def rests_between_modules(pace: Pace, *, compiled: bool = False) -> Iterator[None]:
    """Rest between any two modules, forwards and backwards, until the block ends; compiled code is not interrupted."""
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
