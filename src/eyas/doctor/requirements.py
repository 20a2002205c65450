"""Requirements on a drafter, for pipelines: `length@3>=2.2`, `drift<=0.02`, `retained@7000>=0.95`.

A requirement that was not measured fails, with the reason.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError

METRICS = {
    "length": "length@3>=0.5",
    "conditional": "conditional@3>=0.5",
    "joint": "joint@3>=0.5",
    "drift": "drift<=0.02",
    "ece": "ece<=0.1",
    "retained": "retained@7000>=0.95",
    "faults": "faults<=0",
    "outside": "outside<=0",
}
"""Metrics, each with an example; docs/doctor.md explains them."""
BY_DEPTH = ("length", "conditional", "joint")
_REQUIREMENT = re.compile(
    r"^\s*(?P<metric>[a-z]+)\s*(@\s*(?P<at>[^<>=]+?))?\s*(?P<sign><=|>=|<|>)\s*(?P<limit>\S+)\s*$"
)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A requirement on the first drafter."""

    text: str
    metric: str
    at: str | None
    sign: str
    limit: float


@dataclass(frozen=True, kw_only=True)
class RequirementResult:
    """Outcome of a requirement."""

    requirement: str
    passed: bool
    value: float | None
    reason: str


def parse_requirement(text: str) -> Requirement:
    """Parse a requirement."""
    found = _REQUIREMENT.match(text)
    if found is None:
        raise UserError(
            f"--require {text!r} is no condition; write one like length@3>=2.2, drift<=0.02, retained@7000>=0.95"
        )
    metric, at, limit = found["metric"], found["at"], found["limit"]
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(METRICS)}"
        raise UserError(f"--require {text!r} asks for {metric!r}, which is not measured; {hint}")
    example = METRICS[metric]
    if ("@" in example) != (at is not None):
        what = "a case or a number of tokens" if metric == "retained" else "a depth"
        need = f"needs {what} behind @" if "@" in example else "takes nothing behind @"
        raise UserError(f"--require {text!r}: {metric} {need}; write it like {example}")
    if metric in BY_DEPTH and not (at or "").isdigit():
        raise UserError(f"--require {text!r}: {at!r} is no depth; give a whole number, like {example}")
    try:
        number = float(limit)
    except ValueError:
        raise UserError(f"--require {text!r}: {limit!r} is no number; write it like {example}") from None
    return Requirement(text=text, metric=metric, at=at, sign=found["sign"], limit=number)


def check_requirements(
    requirements: Sequence[Requirement], record: Mapping[str, Any], subject: str
) -> list[RequirementResult]:
    """Check every requirement on a record."""
    return [_check(requirement, record, subject) for requirement in requirements]


def _check(requirement: Requirement, record: Mapping[str, Any], subject: str) -> RequirementResult:
    value, why = _value(requirement, record, subject)
    passed, reason = False, f"not measured: {why}"
    if value is not None:
        passed = _SIGNS[requirement.sign](value, requirement.limit)
        reason = f"{value:.4g}{'' if passed else ' is not'} {requirement.sign} {requirement.limit:g}"
    return RequirementResult(requirement=requirement.text, passed=passed, value=value, reason=reason)


def _value(requirement: Requirement, record: Mapping[str, Any], subject: str) -> tuple[float | None, str]:
    """Look up the value of a metric, or the reason why there is none."""
    own, metric = record["drafters"][subject], requirement.metric
    drift = own["drift"]
    if metric == "faults":
        if own["diagnosis"] is None:
            return None, "no diagnosis"
        statements = own["verdict"]["statements"]
        unsure = next((s["text"] for s in statements if s.get("name") == "unsure_faults"), None)
        faults = float(sum(s["level"] == "fault" for s in statements))
        return (faults, "") if faults or unsure is None else (None, unsure)
    if metric == "retained":
        return _retained(requirement.at or "", record, subject)
    if drift is None:
        return None, "no prompt was finished"
    if metric in BY_DEPTH:
        depth = int(requirement.at or 0)
        if not 1 <= depth <= drift["depth"]:
            return None, f"depth {depth} is outside 1..{drift['depth']}"
        if metric == "length":
            return drift["length"][depth - 1]["value"], ""
        return drift[metric]["value"][depth - 1], f"no round came as far as depth {depth}"
    simple = {"drift": drift["growth"]["value"], "ece": drift["calibration"]["ece"], "outside": drift["outside_share"]}
    return simple[metric], "nothing to measure it on"


def _retained(at: str, record: Mapping[str, Any], subject: str) -> tuple[float | None, str]:
    """Find the least share kept in the cases that `at` names."""
    named = [
        case for case in record["cases"] if case["name"] == at or (at.isdigit() and case["name"].startswith(f"{at} "))
    ]
    kept = [list(case["cells"][subject].values())[-1]["kept"]["value"] for case in named if subject in case["cells"]]
    kept = [value for value in kept if value is not None]
    if kept:
        return min(kept), ""
    if named:
        return None, named[0]["left_out"] or "no prompt was finished"
    known = [case["name"] for case in record["cases"]]
    near = difflib.get_close_matches(at, known, n=1)
    return None, f"there is no case {at!r}" + (f", did you mean {near[0]!r}?" if near else "")
