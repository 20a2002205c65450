"""How large the depth policy is: its lines, and the numbers in it that somebody has tuned.

    python benchmarks/policy_size.py

Counted by role: what chooses depths, and the drift alarm. Beside it, and told apart: which passes the runner has
captured (`captured_shapes.py`). Suffix drafts are weighed by a policy of their own, `draft.py` says what a draft is,
and `pass_timings.py` is for suffix drafts and `eyas plan --calibrate`.

A tuned number is any literal but 0, 1 and -1, wherever it stands: in a constant, in a default, in a table, in the
middle of a formula. Numbers in docstrings and in texts decide nothing.
"""

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src/eyas/engine/speculation"
POLICY = (
    "controller.py",
    "choice.py",
    "step_report.py",
    "step_times.py",
    "acceptance.py",
    "probes.py",
    "drift.py",
)
BESIDE = ("captured_shapes.py",)
OTHER = ("__init__.py", "draft.py")
SUFFIX = ("suffix_", "decayed_counts.py")
MOST_LINES, MOST_NUMBERS = 1100, 30
FREE = (0, 1, -1)


def tuned(source: str) -> list[tuple[int, float, str]]:
    """Line, number and the line's text of every tuned number."""
    lines, found = source.splitlines(), list[tuple[int, float, str]]()
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in FREE:
            assert isinstance(node, ast.Constant)
            found.append((node.lineno, value, lines[node.lineno - 1].strip()))
    return sorted(found)


def main() -> int:
    """Print both counts; 1 where one is too large, or where a file has no role."""
    unknown = [
        path.name
        for path in sorted(FOLDER.glob("*.py"))
        if path.name not in (*POLICY, *BESIDE, *OTHER) and not path.name.startswith(SUFFIX)
    ]
    total, numbers = 0, 0
    for name in (*POLICY, *BESIDE):
        source = (FOLDER / name).read_text(encoding="utf-8")
        found, count = tuned(source), len(source.splitlines())
        if name in POLICY:
            total, numbers = total + count, numbers + len(found)
        role = "" if name in POLICY else ", not counted: the runner's passes"
        print(f"{name:20s} {count:5d} lines {len(found):3d} numbers{role}")
        for line, value, text in found:
            print(f"    {line:4d}  {value!s:8}  {text}")
    print(f"{'all':20s} {total:5d} lines {numbers:3d} numbers (at most {MOST_LINES} and {MOST_NUMBERS})")
    if unknown:
        print(f"files without a role: {', '.join(unknown)}")
    return int(bool(unknown) or total > MOST_LINES or numbers > MOST_NUMBERS)


if __name__ == "__main__":
    sys.exit(main())
