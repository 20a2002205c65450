"""Findings as the doctor's rules take them, made by hand: a healthy drafter, and conditions of the matrix."""

from typing import Any

from eyas.doctor.measures import Drift
from eyas.doctor.robustness import Case, Cell
from eyas.doctor.statistics import DepthCurve, calibrate
from eyas.drafter.drift import Estimate


def sure(value: float) -> Estimate:
    """Without any width."""
    return Estimate(value=value, low=value, high=value)


def flat(value: float, depth: int = 16) -> DepthCurve:
    """The same at every depth."""
    return DepthCurve(value=[value] * depth, low=[value] * depth, high=[value] * depth, slope=sure(0.0))


def drift_of(**changes: Any) -> Drift:
    """A healthy drafter, but for `changes`."""
    values: dict[str, Any] = {
        "prompts": 40,
        "depth": 16,
        "rounds": 100,
        "mass": {region: flat(0.25) for region in ("sink", "prompt", "verified", "own")},
        "entropy": flat(2.0),
        "spread": flat(0.5),
        "rms": flat(1.9),
        "growth": sure(0.0),
        "conditional": flat(0.7),
        "joint": flat(0.5),
        "offered": [100] * 16,
        "length": [sure(1 + 0.3 * k**0.5) for k in range(1, 17)],
        "calibration": calibrate([0.7, 0.7, 0.7], [True, True, False]),
        "calibration_by_depth": [0.1] * 16,
        "state_rms": [sure(1.0), sure(5.0), sure(20.0)],
        "read_rms": [sure(1.0)] * 3,
        "share": [sure(0.3), sure(0.3), sure(0.4)],
        "fused_rms": sure(1.0),
        "outside_share": 0.01,
    }
    return Drift(**{**values, **changes})


def case_of(name: str, group: str, kept: float) -> Case:
    """A condition under which the drafter `one` keeps so much, on 6 prompts."""
    cell = Cell(length=2.5 * kept, reference=2.5, kept=Estimate(value=kept, low=kept - 0.05, high=kept + 0.05))
    return Case(name=name, group=group, about="", prompts=6, cells={"one": {7: cell}})
