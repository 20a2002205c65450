"""Verdicts and gates follow from measurements."""

from dataclasses import replace
from typing import Any

import pytest

import tiny
from doctor.findings import case_of, drift_of, sure
from each import each
from eyas.doctor.measures import Drift
from eyas.doctor.requirements import check_requirements, parse_requirement
from eyas.doctor.robustness import Case, Cell
from eyas.doctor.statistics import DepthCurve, calibrate
from eyas.doctor.verdict import Statement, judge
from eyas.drafter.drift import Estimate
from eyas.errors import UserError
from eyas.reports.charts import Axes, Line, line_chart, ticks


def names(drift: Drift, cases: list[Case] | None = None, **flags: Any) -> dict[str, str]:
    config = tiny.drafter_config(**flags)
    verdict = judge(config, name="one", drift=drift, cases=cases or [], diagnosis=None, cost=0.1)
    return {
        statement.name: f"{statement.text}; {statement.cause}; {statement.advice}" for statement in verdict.statements
    }


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


def test_weaknesses_have_causes() -> None:
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


def test_health_needs_enough_prompts() -> None:
    found = judge(tiny.drafter_config(), name="one", drift=drift_of(prompts=3), cases=[], diagnosis=None, cost=0.1)
    assert found.statements[0].text == "too few prompts to judge (3; at least 16)"
    assert "44% of prompts only" in found.statements[0].evidence[0]
    assert {one.level for one in found.statements} == {"unknown", "note"}
    grows = drift_of(prompts=3, growth=sure(0.05))
    (unsure,) = [s for s in judge_of(grows) if s.name == "drift"]
    assert (unsure.level, unsure.text[:20]) == ("unknown", "on 3 prompts only, t")


def test_depths_that_few_rounds_reach_are_not_judged() -> None:
    low, high = [0.65] * 6 + [0.2] * 10, [0.75] * 6 + [0.95] * 10
    wide = DepthCurve(value=[0.7] * 16, low=low, high=high, slope=sure(0.0))
    assert "holds to depth 6; deeper, too few rounds" in names(drift_of(conditional=wide))["holds_depth"]
    none = DepthCurve(value=[1.0] * 16, low=[0.4] * 16, high=[1.0] * 16, slope=sure(0.0))
    assert "too few rounds" in names(drift_of(conditional=none))["unsure_depth"]


def test_uncertain_growth_is_neither_drift_nor_flat() -> None:
    found = names(drift_of(growth=Estimate(value=0.02, low=-0.01, high=0.05)))
    assert "unsure_growth" in found
    assert not {"drift", "flat_feedback"} & set(found)


def test_conditions_on_few_prompts_are_not_judged() -> None:
    few = [replace(case_of("no template", "template", 0.5), prompts=4)]
    assert "too few prompts to judge (4; at least 5)" in names(drift_of(), few)["unsure_template"]
    wide = Cell(length=2.4, reference=2.5, kept=Estimate(value=0.96, low=0.7, high=1.2))
    found = names(drift_of(), [Case(name="German", group="text", about="", prompts=6, cells={"one": {7: wide}})])
    assert "unseen_text" in found


def judge_of(drift: Drift) -> tuple[Statement, ...]:
    return judge(tiny.drafter_config(), name="one", drift=drift, cases=[], diagnosis=None, cost=0.1).statements


def test_a_gate_on_faults_fails_on_too_few_prompts() -> None:
    record = record_of()
    unsure = {"level": "unknown", "name": "unsure_faults", "text": "too few prompts to judge (3; at least 5)"}
    record["drafters"]["one"]["verdict"]["statements"] = [unsure]
    outcome = check_requirements([parse_requirement("faults<=0")], record, "one")[0]
    assert not outcome.passed
    assert "not measured: too few prompts" in outcome.reason


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


@each(
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
def test_gates_hold_or_fail_with_a_reason(text: str, passed: bool, reason: str) -> None:
    outcome = check_requirements([parse_requirement(text)], record_of(), "one")[0]
    assert outcome.passed is passed
    assert reason in outcome.reason


@each(
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
def test_wrong_gates_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_requirement(text)


def test_charts_escape_names_and_break_lines_at_gaps() -> None:
    drawn = line_chart(
        [Line(label="<a&b>", x=[1, 2, 3], y=[1.0, None, 300.0], low=[0.5, None, 290.0], high=[2.0, None, 310.0])],
        Axes(across="depth", up="RMS", y_min=0.0),
    )
    assert "<a&b>" not in drawn
    assert "&lt;a&amp;b&gt;" in drawn
    assert drawn.count("<polyline") == 2
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert "nothing was measured" in line_chart([], Axes(across="x", up="y"))
