"""Conditions for a pipeline: `length@3>=2.2`, `drift<=0.02`, `retained@7000>=0.95`.

Invariant: what was not measured does not pass. A requirement that cannot be judged fails with the reason.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError

METRICS = {
    "length": "acceptance length of serving with this depth",
    "conditional": "acceptance at this depth given all before",
    "joint": "acceptance at this depth with all before",
    "drift": "growth of the fed-back state per depth",
    "ece": "expected calibration error",
    "retained": "acceptance length kept in a case, or at a context of so many tokens (the worst place)",
    "faults": "known faults found",
    "outside": "share of the target's tokens that cannot be drafted",
}
NEED = {"length": "a depth", "conditional": "a depth", "joint": "a depth", "retained": "a case or a number of tokens"}
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
    """A condition on the first drafter."""

    text: str
    metric: str
    at: str | None
    sign: str
    limit: float


@dataclass(frozen=True, kw_only=True)
class RequirementResult:
    """Whether a requirement holds."""

    requirement: str
    passed: bool
    value: float | None
    reason: str


def parse_requirement(text: str) -> Requirement:
    """Read a condition, or say what is wrong with it."""
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
    if (metric in NEED) != (at is not None):
        need = f"needs {NEED[metric]} behind @" if metric in NEED else "takes nothing behind @"
        raise UserError(f"--require {text!r}: {metric} {need}; write it like {_example(metric)}")
    if metric in ("length", "conditional", "joint") and not (at or "").isdigit():
        raise UserError(f"--require {text!r}: {at!r} is no depth; give a whole number, like {_example(metric)}")
    try:
        number = float(limit)
    except ValueError:
        raise UserError(f"--require {text!r}: {limit!r} is no number; write it like {_example(metric)}") from None
    return Requirement(text=text, metric=metric, at=at, sign=found["sign"], limit=number)


def _example(metric: str) -> str:
    examples = {"retained": "retained@7000>=0.95", "drift": "drift<=0.02", "ece": "ece<=0.1"}
    return examples.get(metric, f"{metric}@3>=0.5" if metric in NEED else f"{metric}<=0")


def check_requirements(
    requirements: Sequence[Requirement], record: Mapping[str, Any], subject: str
) -> list[RequirementResult]:
    """Hold every requirement against a record."""
    return [_check(requirement, record, subject) for requirement in requirements]


def _check(requirement: Requirement, record: Mapping[str, Any], subject: str) -> RequirementResult:
    value, why = _value(requirement, record, subject)
    if value is None:
        return RequirementResult(requirement=requirement.text, passed=False, value=None, reason=f"not measured: {why}")
    passed = _SIGNS[requirement.sign](value, requirement.limit)
    return RequirementResult(
        requirement=requirement.text,
        passed=passed,
        value=value,
        reason=f"{value:.4g}{'' if passed else ' is not'} {requirement.sign} {requirement.limit:g}",
    )


def _value(requirement: Requirement, record: Mapping[str, Any], subject: str) -> tuple[float | None, str]:
    own = record["drafters"][subject]
    drift = own["drift"]
    if requirement.metric == "faults":
        verdict = own["verdict"]
        if own["diagnosis"] is None:
            return None, "no diagnosis"
        unsure = next((s["text"] for s in verdict["statements"] if s.get("name") == "unsure_faults"), None)
        faults = float(sum(s["level"] == "fault" for s in verdict["statements"]))
        return (faults, "") if faults or unsure is None else (None, unsure)
    if requirement.metric == "retained":
        return _retained(requirement.at or "", record, subject)
    if drift is None:
        return None, "no prompt was finished"
    if requirement.metric in ("length", "conditional", "joint"):
        depth = int(requirement.at or 0)
        if not 1 <= depth <= drift["depth"]:
            return None, f"depth {depth} is outside 1..{drift['depth']}"
        if requirement.metric == "length":
            return drift["length"][depth - 1]["value"], ""
        return drift[requirement.metric]["value"][depth - 1], f"no round came as far as depth {depth}"
    simple = {"drift": drift["growth"]["value"], "ece": drift["calibration"]["ece"], "outside": drift["outside_share"]}
    return simple[requirement.metric], "nothing to measure it on"


def _retained(at: str, record: Mapping[str, Any], subject: str) -> tuple[float | None, str]:
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
