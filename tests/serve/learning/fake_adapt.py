"""Stands for `eyas adapt`: does what a plan says, in no time. `python fake_adapt.py PLAN DRAFTER ANSWERS OUT`.

The plan is JSON: `made`, the drafter to hand out; `change`, fields of the record that are otherwise; `sleep`, seconds;
`code`, to end with instead; `seen`, where to copy the answers to.
"""

import hashlib
import json
import shutil
import sys
import time
from pathlib import Path


def digest(folder: Path) -> str:
    (weights,) = folder.glob("*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def main() -> None:
    plan_file, drafter, answers, out = map(Path, sys.argv[1:])
    plan = json.loads(plan_file.read_text())
    print("adapting", flush=True)
    if "seen" in plan:
        shutil.copy(answers, plan["seen"])
    time.sleep(plan.get("sleep", 0))
    if "code" in plan:
        print("it cannot be done", flush=True)
        sys.exit(plan["code"])
    kept = "made" in plan
    out.mkdir()
    low, high = (0.1, 0.3) if kept else (-0.1, 0.1)
    lengths = {"before": {"acceptance_length": 2.0}, "after": {"acceptance_length": 2.2}}
    record = {
        "schema": "eyas.adaptation/1",
        "kept": kept,
        "verdict": "the new drafter is better" if kept else "the old drafter stays: not better beyond the interval",
        "from": {"drafter": str(drafter), "fingerprint": digest(drafter)},
        "target": {"fingerprint": plan["target"]},
        "data": {"conversations": len(answers.read_text().splitlines())},
        "changes": {"traffic": {"conversations": 16, **lengths, "gain": {"value": 0.2, "low": low, "high": high}}},
    }
    if kept:
        made = Path(plan["made"])
        record["drafter"] = {"fingerprint": digest(made)}
        shutil.copytree(made, out / "drafter")
        (out / "drafter" / "record.json").write_text(json.dumps(record))
    (out / "record.json").write_text(json.dumps(record | plan.get("change", {})))
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
