"""An examination as JSON: everything that the table, the plot and the report are made from.

The schema is stable: keys are added, never renamed; a change that breaks readers raises the number in `schema`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eyas.doctor.decision import decide
from eyas.doctor.diagnosis import Diagnosis
from eyas.doctor.examination import Examination
from eyas.doctor.measures import Drift
from eyas.doctor.requirements import Requirement, RequirementResult, check_requirements
from eyas.doctor.robustness import GROUPS, Case
from eyas.doctor.statistics import DepthCurve
from eyas.doctor.verdict import Verdict
from eyas.drafter.attention_mass import REGIONS
from eyas.drafter.drift import Estimate, plain
from eyas.train.journal import versions

SCHEMA = "eyas.doctor/1"

Json = dict[str, Any]


def record_of(examination: Examination, arguments: Mapping[str, Any], requirements: Sequence[Requirement]) -> Json:
    """Everything found so far."""
    target, settings = examination.target, examination.config
    drifts = examination.drifts()
    verdicts = examination.verdicts(drifts)
    drafters: Json = {}
    for candidate in examination.candidates:
        name, config = candidate.subject.name, candidate.subject.drafter.config
        drift, diagnosis = drifts.get(name), examination.diagnoses.get(name)
        drafters[name] = {
            "source": candidate.source,
            "family": config.family,
            "layer_ids": list(candidate.subject.layer_ids),
            "config": asdict(config),
            "remarks": list(candidate.remarks),
            "cost": plain(examination.cost(candidate)),
            "drift": None if drift is None else _drift(drift),
            "diagnosis": None if diagnosis is None else _diagnosis(diagnosis),
            "verdict": _verdict(verdicts[name]),
        }
    record: Json = {
        "schema": SCHEMA,
        "versions": versions(),
        "arguments": dict(arguments),
        "target": {**asdict(target.facts), "dtype": str(target.dtype), "device": str(target.device)},
        "plan": {**asdict(settings), "prompts": len(examination.prompts)},
        "whole": examination.whole,
        "seconds": {**examination.seconds, "total": round(examination.elapsed, 1)},
        "drafters": drafters,
        "cases": [_case(case) for case in sorted(examination.cases, key=lambda case: GROUPS.index(case.group))],
    }
    first = examination.candidates[0].subject.name
    gates = check_requirements(requirements, record, first)
    record["gates"] = [_requirement(result) for result in gates]
    for candidate in examination.candidates:
        name = candidate.subject.name
        decision = decide(
            verdicts[name],
            drifts.get(name),
            cost=examination.cost(candidate),
            gates=gates if name == first else (),
            diagnosed=name in examination.diagnoses,
            whole=examination.whole,
        )
        drafters[name]["decision"] = asdict(decision)
    record["decision"] = {"drafter": first, **drafters[first]["decision"]}
    return record


def _drift(drift: Drift) -> Json:
    curves: dict[str, DepthCurve] = {
        name: getattr(drift, name) for name in ("entropy", "spread", "rms", "conditional", "joint")
    }
    return {
        "prompts": drift.prompts,
        "depth": drift.depth,
        "rounds": drift.rounds,
        "offered": drift.offered,
        "mass": {region: drift.mass[region].as_json() for region in REGIONS},
        **{name: curve.as_json() for name, curve in curves.items()},
        "growth": drift.growth.as_json(),
        "length": _estimates(drift.length),
        "calibration": asdict(drift.calibration),
        "calibration_by_depth": drift.calibration_by_depth,
        "state_rms": _estimates(drift.state_rms),
        "read_rms": _estimates(drift.read_rms),
        "share": _estimates(drift.share),
        "fused_rms": drift.fused_rms.as_json(),
        "outside_share": drift.outside_share,
    }


def _diagnosis(diagnosis: Diagnosis) -> Json:
    return {
        "prompts": diagnosis.prompts,
        "places": diagnosis.places,
        "accepted": plain(diagnosis.accepted),
        "first_hit": plain(diagnosis.first_hit),
        "reads_states": diagnosis.reads_states.as_json(),
        "agreement": {"own": plain(diagnosis.agreement.own), "others": plain(diagnosis.agreement.others)},
        "resemblance": asdict(diagnosis.resemblance),
        "trials": [
            {
                "fault": trial.fault,
                "about": trial.about,
                "suspected": trial.suspected,
                "convinces": trial.convinces,
                "ratio": trial.ratio.as_json(),
                "accepted": plain(trial.accepted),
                "surprise": trial.surprise.as_json(),
            }
            for trial in diagnosis.trials
        ],
    }


def _verdict(verdict: Verdict) -> Json:
    return {
        "recommended_depth": verdict.recommended_depth,
        "statements": [asdict(statement) for statement in verdict.statements],
    }


def _requirement(result: RequirementResult) -> Json:
    return {"gate": result.requirement, "passed": result.passed, "value": result.value, "reason": result.reason}


def _case(case: Case) -> Json:
    return {
        "name": case.name,
        "group": case.group,
        "about": case.about,
        "prompts": case.prompts,
        "left_out": case.left_out,
        "cells": {
            name: {
                str(depth): {
                    "length": plain(cell.length),
                    "reference": plain(cell.reference),
                    "kept": cell.kept.as_json(),
                }
                for depth, cell in by_depth.items()
            }
            for name, by_depth in case.cells.items()
        },
    }


def _estimates(found: Sequence[Estimate]) -> list[dict[str, float | None]]:
    return [one.as_json() for one in found]
