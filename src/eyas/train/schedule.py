"""How long a run is, and the learning rate over it as a share of its peak.

A run is as long as so many steps, or as so much time, or as whichever of both is over first. Time is counted in
milliseconds, and a schedule over milliseconds is the same function as one over steps.
"""

import math
from dataclasses import dataclass

from eyas.train.recipe import ScheduleName


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Where a run ends: at one of both, or at the first of them."""

    steps: int | None = None
    minutes: float | None = None
    """Of training; loading, encoding and compiling come before it."""

    def __post_init__(self) -> None:
        assert self.steps is not None or self.minutes is not None

    def position(self, step: int, seconds: float) -> tuple[int, int]:
        """Where a run stands that begins `step` and has trained for `seconds`, and of how much: by the nearer end."""
        if self.minutes is None:
            assert self.steps is not None
            return step, self.steps
        end = round(self.minutes * 60_000)
        by_time = min(end, round(seconds * 1000)), end
        if self.steps is not None and step * end >= by_time[0] * self.steps:
            return step, self.steps
        return by_time

    def reached(self, step: int, seconds: float) -> bool:
        """Whether a run ends that has done `step` steps in `seconds`."""
        position, end = self.position(step, seconds)
        return position >= end

    def __str__(self) -> str:
        steps = None if self.steps is None else f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        minutes = None if self.minutes is None else f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}"
        return " or ".join(end for end in (steps, minutes) if end is not None)


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """How the learning rate rises and falls over a run."""

    name: ScheduleName
    warmup: float
    decay: float
    final: float

    def share(self, step: int, steps: int) -> float:
        """Share of the peak at `step` of `steps`: a linear rise over `warmup`, then a cosine, or a plateau and a fall.

        `wsd` (warm-up, stable, decay) stays at the peak until the last `decay` of the run and falls linearly there.
        """
        rise = max(1, round(self.warmup * steps))
        if step < rise:
            return (step + 1) / rise
        if self.name == "cosine":
            progress = (step - rise) / max(1, steps - rise)
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
        fall = max(1, round(self.decay * steps))
        left = steps - step
        return 1.0 if left >= fall else self.final + (1 - self.final) * left / fall
