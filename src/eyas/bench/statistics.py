"""Numbers for many: medians with their spread over repetitions, percentiles over requests, each with its count."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

Json = dict[str, Any]
SHOWN = (50, 90, 95, 99)


def spread(values: Sequence[float]) -> Json | None:
    """Median over repetitions with the lowest and highest; None where there are none."""
    if not values:
        return None
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "all": [round(value, 4) for value in values],
    }


def percentiles(values: Sequence[float], *, scale: float = 1.0) -> Json:
    """Mean and percentiles over all of them, linearly interpolated as numpy does."""
    if not values:
        return {"count": 0, "mean": None, **{f"p{share}": None for share in SHOWN}}
    scaled = np.asarray(values, dtype=np.float64) * scale
    found = np.percentile(scaled, SHOWN)
    return {
        "count": len(values),
        "mean": round(float(scaled.mean()), 4),
        **{f"p{share}": round(float(value), 4) for share, value in zip(SHOWN, found, strict=True)},
    }
