"""The learning rate over a run, as a share of its peak."""

import math

from eyas.errors import UserError


def learning_rate_share(
    step: int, steps: int, *, schedule: str, warmup: float, decay: float = 0.2, final: float = 0.0
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
    if schedule == "wsd":
        fall = max(1, round(decay * steps))
        left = steps - step
        return 1.0 if left >= fall else final + (1 - final) * left / fall
    raise UserError(f"schedule {schedule!r} is not one of cosine, wsd; choose one of them")
