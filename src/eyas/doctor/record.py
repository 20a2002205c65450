"""Record of an examination as JSON, from which tables, plot and report are made.

The schema is stable: keys may be added, but are never renamed; an incompatible change raises the number in `schema`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from eyas.doctor.decision import decide
from eyas.doctor.examination import Examination
from eyas.doctor.requirements import Requirement, check_requirements
from eyas.doctor.robustness import GROUPS
from eyas.drafter.drift import plain
from eyas.train.journal import versions

SCHEMA = "eyas.doctor/1"
TRIAL_KEYS = ("fault", "about", "suspected", "convinces", "ratio", "accepted", "surprise")

Json = dict[str, Any]


def record_of(examination: Examination, arguments: Mapping[str, Any], requirements: Sequence[Requirement]) -> Json:
    """Record everything found so far."""
    target, drifts = examination.target, examination.drifts()
    verdicts = examination.verdicts(drifts)
    drafters: Json = {}
    for candidate in examination.candidates:
        name, config = candidate.subject.name, candidate.subject.drafter.config
        diagnosis = examination.diagnoses.get(name)
        drafters[name] = {
            "source": candidate.source,
            "family": config.family,
            "layer_ids": list(candidate.subject.layer_ids),
            "config": asdict(config),
            "remarks": list(candidate.remarks),
            "cost": plain(examination.cost(candidate)),
            "drift": to_json(drifts.get(name)),
            "diagnosis": to_json(diagnosis),
            "verdict": to_json(verdicts[name]),
        }
        if diagnosis is not None:
            trials = [{key: to_json(getattr(trial, key)) for key in TRIAL_KEYS} for trial in diagnosis.trials]
            drafters[name]["diagnosis"]["trials"] = trials
    record: Json = {
        "schema": SCHEMA,
        "versions": versions(),
        "arguments": dict(arguments),
        "target": {**asdict(target.facts), "dtype": str(target.dtype), "device": str(target.device)},
        "plan": {**asdict(examination.config), "prompts": len(examination.prompts)},
        "whole": examination.whole,
        "seconds": {**examination.seconds, "total": round(examination.elapsed, 1)},
        "drafters": drafters,
        "cases": [to_json(case) for case in sorted(examination.cases, key=lambda case: GROUPS.index(case.group))],
    }
    first = examination.candidates[0].subject.name
    gates = check_requirements(requirements, record, first)
    record["gates"] = [
        {"gate": gate.requirement, "passed": gate.passed, "value": gate.value, "reason": gate.reason} for gate in gates
    ]
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


def to_json(value: Any) -> Any:
    """Convert findings: floats are rounded, NaN becomes null."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    return plain(value) if isinstance(value, float) else value
