"""Numbers with their uncertainty. Prompts are what is drawn from the world, so prompts are what is resampled.

Intervals are percentile bootstraps over prompts, seeded: the same measurements give the same report. Shares of rounds
also have their Wilson interval, and the wider of both counts: few prompts that agree resample to no width at all.

Shapes: P prompts, S depths, B resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eyas.doctor.sample_size import LEVEL, wilson
from eyas.drafter.drift import Estimate, plain, slope

RESAMPLES = 1000
SEED = 7

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class DepthCurve:
    """A number for every depth."""

    value: list[float]
    low: list[float]
    high: list[float]
    slope: Estimate
    """By depth, least squares."""

    def as_json(self) -> dict[str, object]:
        """For the record."""
        points = {name: [plain(x) for x in getattr(self, name)] for name in ("value", "low", "high")}
        return {**points, "slope": self.slope.as_json()}


def resamples(prompts: int) -> NDArray[np.int64]:
    """Which prompts each resample holds [B, P]."""
    return np.random.default_rng(SEED).integers(0, max(1, prompts), size=(RESAMPLES, max(1, prompts)))


def depth_curve(value_PS: Array, statistic: Callable[[Array], Array] | None = None) -> DepthCurve:
    """The mean over prompts at every depth (or another `statistic` of the rows), its band and its slope."""
    value_PS = np.asarray(value_PS, dtype=np.float64)
    statistic = statistic or mean_rows
    if not len(value_PS):
        return DepthCurve(value=[], low=[], high=[], slope=Estimate(value=np.nan, low=np.nan, high=np.nan))
    centre_S = statistic(value_PS)
    drawn_BS = np.stack([statistic(value_PS[rows]) for rows in resamples(len(value_PS))])
    low_S, high_S = interval(drawn_BS)
    slopes_B = np.array([slope(list(row)) for row in drawn_BS])
    low, high = interval(slopes_B)
    return DepthCurve(
        value=list(centre_S),
        low=list(low_S),
        high=list(high_S),
        slope=Estimate(value=slope(list(centre_S)), low=float(low), high=float(high)),
    )


def estimate(rows: Array, statistic: Callable[[Array], float]) -> Estimate:
    """A number that is computed from the prompts' rows, and its interval."""
    rows = np.asarray(rows)
    if not len(rows):
        return Estimate(value=np.nan, low=np.nan, high=np.nan)
    drawn_B = np.array([statistic(rows[chosen]) for chosen in resamples(len(rows))])
    low, high = interval(drawn_B)
    return Estimate(value=float(statistic(rows)), low=float(low), high=float(high))


def with_wilson(curve: DepthCurve, hits_S: Array, of_S: Array) -> DepthCurve:
    """A curve of shares whose band is at least as wide as that of its rounds."""
    shares = [wilson(float(hits), float(of)) for hits, of in zip(hits_S, of_S, strict=True)]
    return replace(
        curve,
        low=[float(np.fmin(low, share.low)) for low, share in zip(curve.low, shares, strict=True)],
        high=[float(np.fmax(high, share.high)) for high, share in zip(curve.high, shares, strict=True)],
    )


def mean_rows(value_PS: Array) -> Array:
    """The mean over prompts of what was measured; NaN where nothing was."""
    known = np.isfinite(value_PS)
    count_S = known.sum(axis=0)
    total_S = np.where(known, value_PS, 0.0).sum(axis=0)
    return np.where(count_S > 0, total_S / np.maximum(count_S, 1), np.nan)


def interval(drawn: Array) -> tuple[Array, Array]:
    """The middle of the resamples, along the first axis; NaN where no resample has a value."""
    known = np.isfinite(drawn)
    filled = np.where(known.any(axis=0), drawn, 0.0)
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(filled, [tail, 1 - tail], axis=0)
    nothing = ~known.any(axis=0)
    return np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How often the drafter is right when it says so."""

    edges: list[float]
    count: list[int]
    confidence: list[float | None]
    """Mean confidence of the drafts in each bin."""
    accuracy: list[float | None]
    ece: float | None
    """Expected calibration error: sum over bins of (n_b / n) * |accuracy_b - confidence_b|."""


def calibrate(
    confidence_N: Sequence[float] | Array, hit_N: Sequence[bool] | NDArray[np.bool_], bins: int = 10
) -> Calibration:
    """Reliability in equally wide bins."""
    confidence, hit = np.asarray(confidence_N, dtype=np.float64), np.asarray(hit_N, dtype=np.float64)
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.digitize(confidence, edges[1:-1]), 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    means: list[list[float | None]] = []
    for values in (confidence, hit):
        total = np.bincount(place, weights=values, minlength=bins)
        means.append([float(t / n) if n else None for t, n in zip(total, count, strict=True)])
    gaps = [
        n * abs(a - c) for n, a, c in zip(count, means[1], means[0], strict=True) if a is not None and c is not None
    ]
    return Calibration(
        edges=[float(edge) for edge in edges],
        count=[int(n) for n in count],
        confidence=means[0],
        accuracy=means[1],
        ece=float(sum(gaps) / count.sum()) if count.sum() else None,
    )
