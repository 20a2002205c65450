"""Intervals, and the least sample sizes for a claim.

Intervals are 95 % percentile bootstraps over prompts, since prompts are what varies; the seed is fixed, so the same
measurements give the same report. Shares of rounds also have their Wilson interval, and the wider of the two counts: a
few prompts that agree have no width when they are resampled.

A sample is too small when its interval still holds the opposite of what it shows. The least sizes follow from that:

rounds   The Wilson interval of a share stays open where all or none hit: 3 of 3 may be 44 %. A depth is judged if its
         interval is no wider than the loss that counts as fading.
prompts  Health is a statement about prompts in general. If all of n prompts are healthy, Wilson's interval begins at
         n / (n + 3.84). It must not reach below the share that counts as fading, so n is 16.
pairs    A condition or a repair is compared on the same prompts with and without it. If it changed nothing, all of n
         would move the same way by chance once in 2^n, which must be at most 5 %, so n is 5.

Shapes: P prompts, S depths, B resamples, N drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from eyas.drafter.drift import Estimate, slope

LEVEL = 0.95
"""Of all intervals of the doctor."""
FADES = 0.8
"""A drafter fades if conditional acceptance falls below this share of that of the first depths."""
RESAMPLES = 1000
SEED = 7
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

Array = NDArray[np.float64]


NOTHING = Estimate(value=nan, low=nan, high=nan)


def wilson(hits: float, of: float) -> Estimate:
    """Estimate a share of independent trials with Wilson's interval; NaN without trials."""
    if of <= 0:
        return NOTHING
    share, extra = hits / of, _Z * _Z / of
    middle = (share + extra / 2) / (1 + extra)
    half = _Z * sqrt(share * (1 - share) / of + extra / (4 * of)) / (1 + extra)
    return Estimate(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half))


LEAST_PROMPTS = next(n for n in range(1, 10_000) if wilson(n, n).low >= FADES)
"""Prompts from which on a drafter can be called healthy."""
LEAST_PAIRS = next(n for n in range(1, 100) if 0.5**n <= 1 - LEVEL)
"""Prompts from which on a condition or a repair can be said to change something, or nothing."""


def too_few(prompts: int, least: int) -> str:
    """Say that there are too few prompts for a judgement."""
    return f"too few prompts to judge ({prompts}; at least {least})"


@dataclass(frozen=True, kw_only=True)
class DepthCurve:
    """A number for every depth, with its interval."""

    value: list[float]
    low: list[float]
    high: list[float]
    slope: Estimate
    """By depth, least squares."""


def _resamples(prompts: int) -> NDArray[np.int64]:
    """Draw the prompts of each resample [B, P]."""
    return np.random.default_rng(SEED).integers(0, max(1, prompts), size=(RESAMPLES, max(1, prompts)))


def depth_curve(value_PS: Array, statistic: Callable[[Array], Array] | None = None) -> DepthCurve:
    """Estimate the mean over prompts at every depth, or another `statistic` of the rows, and its slope."""
    value_PS = np.asarray(value_PS, dtype=np.float64)
    statistic = statistic or _mean_rows
    if not len(value_PS):
        return DepthCurve(value=[], low=[], high=[], slope=NOTHING)
    centre_S = statistic(value_PS)
    drawn_BS = np.stack([statistic(value_PS[rows]) for rows in _resamples(len(value_PS))])
    low_S, high_S = _interval(drawn_BS)
    low, high = _interval(np.array([slope(list(row)) for row in drawn_BS]))
    return DepthCurve(
        value=list(centre_S),
        low=list(low_S),
        high=list(high_S),
        slope=Estimate(value=slope(list(centre_S)), low=float(low), high=float(high)),
    )


def estimate(rows: Array, statistic: Callable[[Array], float]) -> Estimate:
    """Estimate a statistic of the prompts' rows."""
    rows = np.asarray(rows)
    if not len(rows):
        return NOTHING
    low, high = _interval(np.array([statistic(rows[chosen]) for chosen in _resamples(len(rows))]))
    return Estimate(value=float(statistic(rows)), low=float(low), high=float(high))


def with_wilson(curve: DepthCurve, hits_S: Array, of_S: Array) -> DepthCurve:
    """Widen the interval of a curve of shares to at least Wilson's over its rounds."""
    shares = [wilson(float(hits), float(of)) for hits, of in zip(hits_S, of_S, strict=True)]
    return replace(
        curve,
        low=[float(np.fmin(low, share.low)) for low, share in zip(curve.low, shares, strict=True)],
        high=[float(np.fmax(high, share.high)) for high, share in zip(curve.high, shares, strict=True)],
    )


def _mean_rows(value_PS: Array) -> Array:
    """Mean over prompts of finite values; NaN where there is none."""
    known = np.isfinite(value_PS)
    count_S = known.sum(axis=0)
    total_S = np.where(known, value_PS, 0.0).sum(axis=0)
    return np.where(count_S > 0, total_S / np.maximum(count_S, 1), np.nan)


def _interval(drawn: Array) -> tuple[Array, Array]:
    """Quantiles of the resamples, along the first axis; NaN where no resample has a value."""
    known = np.isfinite(drawn)
    filled = np.where(known.any(axis=0), drawn, 0.0)
    tail = (1 - LEVEL) / 2
    low, high = np.nanquantile(filled, [tail, 1 - tail], axis=0)
    nothing = ~known.any(axis=0)
    return np.where(nothing, np.nan, low), np.where(nothing, np.nan, high)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Confidence of drafts against their acceptance, in equally wide bins."""

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
    """Bin drafts by confidence."""
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
