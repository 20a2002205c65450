"""Words and gates follow from numbers."""

from typing import Any

import numpy as np
import pytest

import tiny
from eyas.doctor.measures import Drift
from eyas.doctor.requirements import check_requirements, parse_requirement
from eyas.doctor.robustness import Case, Cell
from eyas.doctor.statistics import DepthCurve, calibrate, depth_curve, estimate
from eyas.doctor.verdict import judge
from eyas.drafter.drift import Estimate, slope
from eyas.errors import UserError
from eyas.reports.charts import Axes, Line, line_chart, ticks


def sure(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def flat(value: float, depth: int = 16) -> DepthCurve:
    return DepthCurve(value=[value] * depth, low=[value] * depth, high=[value] * depth, slope=sure(0.0))


def drift_of(**changes: Any) -> Drift:
    values: dict[str, Any] = {
        "prompts": 4,
        "depth": 16,
        "rounds": 100,
        "mass": {region: flat(0.25) for region in ("sink", "prompt", "verified", "own")},
        "entropy": flat(2.0),
        "spread": flat(0.5),
        "rms": flat(1.9),
        "growth": sure(0.0),
        "conditional": flat(0.7),
        "joint": flat(0.5),
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


def names(drift: Drift, cases: list[Case] | None = None, **flags: Any) -> dict[str, str]:
    config = tiny.drafter_config(**flags)
    verdict = judge(config, name="one", drift=drift, cases=cases or [], diagnosis=None, cost=0.1)
    return {
        statement.name: f"{statement.text}; {statement.cause}; {statement.advice}" for statement in verdict.statements
    }


def case_of(name: str, group: str, kept: float) -> Case:
    cell = Cell(length=2.5 * kept, reference=2.5, kept=Estimate(value=kept, low=kept - 0.05, high=kept + 0.05))
    return Case(name=name, group=group, about="", prompts=6, cells={"one": {7: cell}})


def test_a_flat_drafter_is_healthy() -> None:
    assert set(names(drift_of())) == {"flat_feedback", "holds_depth", "balanced"}


def test_growth_is_drift_and_its_cause_depends_on_the_flag() -> None:
    grown = [45 * 1.06**k for k in range(16)]
    rms = DepthCurve(value=grown, low=grown, high=grown, slope=sure(3.0))
    grows = drift_of(rms=rms, growth=Estimate(value=0.06, low=0.05, high=0.07))
    assert "since depth 3; unnormalised feedback" in names(grows)["drift"]
    assert "norm_output is set" in names(grows, norm_output=True)["drift"]
    uncertain = drift_of(rms=rms, growth=Estimate(value=0.06, low=-0.01, high=0.12))
    assert "drift" not in names(uncertain)


def test_weaknesses_are_told_with_their_cause() -> None:
    faded = [0.7] * 6 + [0.3] * 10
    found = names(
        drift_of(
            conditional=DepthCurve(value=faded, low=faded, high=faded, slope=sure(-0.02)),
            share=[sure(0.05), sure(0.05), sure(0.9)],
            outside_share=0.2,
            calibration=calibrate([0.9] * 4, [False] * 4),
        )
    )
    assert "fades since depth 7" in found["fades"]
    assert "state 3 of 3 drowns the others" in found["imbalance"]
    assert "20.0% of the target's tokens cannot be drafted" in found["coverage"]
    assert "confidence is off by 90%" in found["calibration"]


def test_conditions_become_warnings_only_where_something_is_lost() -> None:
    cases = [
        case_of("no template", "template", 0.6),
        case_of("no BOS", "template", 0.98),
        case_of("German", "text", 0.95),
        case_of("700 tokens, end", "context", 0.7),
    ]
    found = names(drift_of(), cases)
    assert "template mismatch" in found["sensitive_template"]
    assert "robust_text" in found
    assert "rope too short: max_position_embeddings is 512" in found["sensitive_context"]


def record_of() -> dict[str, Any]:
    drift = {
        "depth": 4,
        "length": [{"value": 1.5 + 0.3 * k} for k in range(4)],
        "conditional": {"value": [0.7, 0.6, 0.5, None]},
        "joint": {"value": [0.7, 0.42, 0.2, 0.0]},
        "growth": {"value": 0.03},
        "calibration": {"ece": 0.04},
        "outside_share": 0.01,
    }
    cells = {"one": {"3": {"kept": {"value": 0.99}}, "7": {"kept": {"value": 0.9}}}}
    worse = {"one": {"3": {"kept": {"value": 0.99}}, "7": {"kept": {"value": 0.8}}}}
    return {
        "drafters": {"one": {"drift": drift, "diagnosis": {}, "verdict": {"statements": [{"level": "fault"}]}}},
        "cases": [
            {"name": "7000 tokens, end", "cells": cells, "left_out": None},
            {"name": "7000 tokens, start", "cells": worse, "left_out": None},
            {"name": "no template", "cells": cells, "left_out": None},
            {"name": "16000 tokens", "cells": {}, "left_out": "the target's context is 8192 tokens"},
        ],
    }


@pytest.mark.parametrize(
    ("text", "passed", "reason"),
    [
        ("length@3>=2.1", True, "2.1 >= 2.1"),
        ("length@3 > 2.1", False, "2.1 is not > 2.1"),
        ("length@9>=1", False, "depth 9 is outside 1..4"),
        ("conditional@2>=0.6", True, "0.6"),
        ("conditional@4>=0.1", False, "no round came as far"),
        ("joint@2>=0.5", False, "0.42 is not"),
        ("drift<=0.02", False, "0.03 is not <= 0.02"),
        ("ece<0.05", True, "0.04"),
        ("outside<=0.02", True, "0.01"),
        ("faults<=0", False, "1 is not <= 0"),
        ("retained@7000>=0.85", False, "0.8 is not"),
        ("retained@no template>=0.85", True, "0.9"),
        ("retained@16000>=0.5", False, "not measured: the target's context is 8192"),
        ("retained@no tempate>=0.5", False, "did you mean 'no template'?"),
    ],
)
def test_a_gate_holds_or_says_why_not(text: str, passed: bool, reason: str) -> None:
    outcome = check_requirements([parse_requirement(text)], record_of(), "one")[0]
    assert outcome.passed is passed
    assert reason in outcome.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length at 3", "is no condition"),
        ("lenght@3>=2", "did you mean 'length'?"),
        ("length>=2", "length needs a depth behind @"),
        ("drift@3<=1", "drift takes nothing behind @"),
        ("length@deep>=2", "'deep' is no depth"),
        ("length@3>=two", "'two' is no number"),
    ],
)
def test_what_is_no_gate_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_requirement(text)


def test_intervals_hold_what_they_are_of() -> None:
    held = 0
    for seed in range(30):
        rows = np.random.default_rng(seed).normal(5.0, 1.0, size=(40, 3)) + np.array([0.0, 1.0, 2.0])
        found = depth_curve(rows)
        assert all(low < value < high for low, value, high in zip(found.low, found.value, found.high, strict=True))
        held += found.slope.low < 1.0 < found.slope.high
    assert held >= 25
    assert slope([1.0, float("nan"), 3.0]) == pytest.approx(1.0)
    assert estimate(np.ones((5, 1)), lambda rows: float(rows.mean())) == sure(1.0)
    gaps = depth_curve(np.array([[1.0, np.nan], [3.0, np.nan]]))
    assert gaps.as_json()["value"] == [2.0, None]


def test_calibration_counts_the_gap_in_every_bin() -> None:
    found = calibrate([0.95, 0.95, 0.15, 0.15], [True, False, False, False])
    assert found.ece == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)
    assert found.count[1] == found.count[9] == 2
    assert calibrate([], []).ece is None


def test_charts_stay_inside_their_box_and_escape_names() -> None:
    drawn = line_chart(
        [Line(label="<a&b>", x=[1, 2, 3], y=[1.0, None, 300.0], low=[0.5, None, 290.0], high=[2.0, None, 310.0])],
        Axes(across="depth", up="RMS", y_min=0.0),
    )
    assert "<a&b>" not in drawn
    assert "&lt;a&amp;b&gt;" in drawn
    assert drawn.count("<polyline") == 2
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert "nothing was measured" in line_chart([], Axes(across="x", up="y"))
