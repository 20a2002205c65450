"""The learning rate over a run, as a share of its peak."""

import math

from eyas.train.recipe import ScheduleName


def learning_rate_share(
    step: int, steps: int, *, schedule: ScheduleName, warmup: float, decay: float, final: float
) -> float:
    """Share of the peak at `step` of `steps`: a linear rise over `warmup`, then a cosine, or a plateau and a fall.

    `wsd` (warm-up, stable, decay) stays at the peak until the last `decay` of the run and falls linearly there.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    if schedule == "cosine":
        progress = (step - rise) / max(1, steps - rise)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    fall = max(1, round(decay * steps))
    left = steps - step
    return 1.0 if left >= fall else final + (1 - final) * left / fall
