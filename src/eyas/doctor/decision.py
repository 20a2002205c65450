"""Decision on a drafter in one line: ship it at a depth, do not ship it, or measure more first.

The first rule that applies decides:

1. a required condition does not hold           do not ship
2. a fault of the checkpoint was found          do not ship
3. no prompt was finished                       cannot tell
4. fewer prompts than a judgement needs         cannot tell
5. no depth is faster than plain decoding       do not ship
6. the gain may be none: its interval holds 1   cannot tell
7. otherwise                                    ship at the recommended depth

The speedup at a depth is length / (1 + depth * cost), as for the recommended depth. Weaknesses (the verdict's warnings)
are listed behind the decision and do not change it: they matter only where such prompts are served. What was not looked
for is listed as well, since silence would read as health.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.doctor.measures import Drift
from eyas.doctor.requirements import RequirementResult
from eyas.doctor.statistics import LEAST_PROMPTS, too_few
from eyas.doctor.verdict import CONDITION_GROUPS, Statement, Verdict
from eyas.drafter.drift import Estimate

Outcome = Literal["ship", "do_not_ship", "cannot_tell"]
MOST_TOLD = 3
"""Weaknesses named in the line; further ones are counted."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The first line of a report."""

    outcome: Outcome
    text: str
    depth: int | None = None
    """Depth to serve with; None unless the drafter is to be shipped."""
    speedup: dict[str, float | None] | None = None
    """Expected over plain decoding at that depth, for one user, with its interval."""
    weaknesses: tuple[str, ...] = ()
    """The verdict's warnings as short phrases."""
    unknown: tuple[str, ...] = ()
    """Questions that could not be judged, with reasons."""


def decide(
    verdict: Verdict,
    drift: Drift | None,
    *,
    cost: float,
    gates: Sequence[RequirementResult] = (),
    diagnosed: bool,
    whole: bool = True,
) -> Decision:
    """Apply the rules; `cost` is the time of drafting one token over that of a step of the target."""
    weaknesses = [weakness for one in verdict.statements if one.level == "warning" for weakness in _weaknesses(one)]
    unknown = [one.text for one in verdict.statements if one.level == "unknown"]
    unknown += [] if diagnosed else ["faults were not looked for"]
    judged = {one.name.rpartition("_")[2] for one in verdict.statements}
    untried = [label for group, label in CONDITION_GROUPS.items() if group not in judged]
    unknown += [f"not tried: other {label}" for label in untried]
    unknown += [] if whole else ["stopped early"]

    def decided(outcome: Outcome, text: str, depth: int | None = None, speedup: Estimate | None = None) -> Decision:
        return Decision(
            outcome=outcome,
            text=text,
            depth=depth,
            speedup=None if speedup is None else speedup.as_json(),
            weaknesses=tuple(weaknesses),
            unknown=tuple(unknown),
        )

    failed = [gate for gate in gates if not gate.passed]
    if failed:
        reasons = ", ".join(f"{gate.requirement} ({gate.reason})" for gate in failed)
        return decided("do_not_ship", f"Do not ship: required and does not hold: {reasons}")
    faults = [one.text for one in verdict.statements if one.level == "fault"]
    if faults:
        return decided("do_not_ship", f"Do not ship: {', '.join(faults)}")
    depth = verdict.recommended_depth
    if drift is None or depth is None:
        return decided("cannot_tell", "Cannot tell: no prompt was finished")
    if drift.prompts < LEAST_PROMPTS:
        return decided("cannot_tell", f"Cannot tell yet: {too_few(drift.prompts, LEAST_PROMPTS)}")
    if depth == 0:
        return decided("do_not_ship", "Do not ship: no depth is faster than plain decoding")
    gain = _speedup(drift.length[depth - 1], depth, cost)
    if gain.low <= 1.0:
        interval = f"{gain.value:.2f} times plain decoding at depth {depth}, {gain.low:.2f} to {gain.high:.2f}"
        return decided("cannot_tell", f"Cannot tell yet: it may gain nothing ({interval})")
    text = f"Ship it at depth {depth}"
    if weaknesses:
        text += f"; {', '.join(weaknesses[:MOST_TOLD])}"
        more = len(weaknesses) - MOST_TOLD
        text += f" and {more} more" if more > 0 else ""
    if not diagnosed:
        text += "; faults were not looked for"
    if len(untried) == len(CONDITION_GROUPS):
        text += "; other conditions were not tried"
    return decided("ship", text, depth, gain)


def _speedup(length: Estimate, depth: int, cost: float) -> Estimate:
    spent = 1 + depth * cost
    return Estimate(value=length.value / spent, low=length.low / spent, high=length.high / spent)


def _weaknesses(statement: Statement) -> list[str]:
    """Shorten a warning to phrases for the line."""
    if statement.conditions:
        return [f"weak {_WHERE.get(name, _where(name))}" for name in statement.conditions]
    return [_SHORT.get(statement.name, statement.text)]


_SHORT = {
    "drift": "its state grows with depth",
    "imbalance": "one state drowns the others",
}
_WHERE = {
    "no BOS": "without the first token (BOS)",
    "no template": "without a template",
    "no system prompt": "without a system prompt",
    "long system prompt": "with a long system prompt",
    "foreign system prompt": "with an unusual system prompt",
    "code": "on code",
    "tool traffic": "on tool traffic",
    "8-bit target": "on an 8-bit target",
}


def _where(name: str) -> str:
    """Phrase names such as `Llama-3 template`, `German`, `4-bit target` and `1000 tokens, end`."""
    if name.endswith(" template"):
        return f"with the {name}"
    if name.endswith(" target"):
        return f"on a {name}"
    if " tokens, " in name:
        length, _, place = name.partition(" tokens, ")
        return f"after {length} tokens" if place == "end" else f"in {length} tokens (question at the {place})"
    return f"in {name}"
