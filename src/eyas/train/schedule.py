"""Length of a run, and the learning rate over it as a share of its peak.

A run ends after a number of steps, after a time, or at whichever comes first. Time is counted in milliseconds, so a
schedule over time is the same function as one over steps.
"""

import math
from dataclasses import dataclass

from eyas.train.recipe import ScheduleName


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """End of a run: a number of steps, a time, or whichever comes first."""

    steps: int | None = None
    minutes: float | None = None
    """Minutes of training; loading, encoding and compiling are not counted."""

    def __post_init__(self) -> None:
        assert self.steps is not None or self.minutes is not None

    def position(self, step: int, seconds: float) -> tuple[int, int]:
        """Position of a run at the start of `step`, and its length, by whichever end is nearer."""
        if self.minutes is None:
            assert self.steps is not None
            return step, self.steps
        end = round(self.minutes * 60_000)
        by_time = min(end, round(seconds * 1000)), end
        if self.steps is not None and step * end >= by_time[0] * self.steps:
            return step, self.steps
        return by_time

    def reached(self, step: int, seconds: float) -> bool:
        position, end = self.position(step, seconds)
        return position >= end

    def __str__(self) -> str:
        steps = None if self.steps is None else f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        minutes = None if self.minutes is None else f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}"
        return " or ".join(end for end in (steps, minutes) if end is not None)


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate over a run."""

    name: ScheduleName
    warmup: float
    decay: float
    final: float

    def share(self, step: int, steps: int) -> float:
        """Share of the peak at `step` of `steps`: a linear warm-up, then a cosine decay, or `wsd`.

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
