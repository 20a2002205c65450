"""Each rule decides where those before it do not apply."""

from typing import Any

import pytest

import tiny
from doctor.findings import case_of, drift_of, sure
from each import each
from eyas.doctor.decision import Decision, decide
from eyas.doctor.measures import Drift
from eyas.doctor.requirements import RequirementResult
from eyas.doctor.robustness import Case
from eyas.doctor.verdict import Statement, Verdict, judge
from eyas.drafter.drift import Estimate

FAULT = Statement(level="fault", name="norm_output", text="wrong norm flag: norm_output")
HEALTHY = Statement(level="healthy", name="robust_text", text="holds under other languages, code and tool traffic")


def gate(*, passed: bool) -> RequirementResult:
    return RequirementResult(requirement="length@3>=2.2", passed=passed, value=2.1, reason="2.1 is not >= 2.2")


def decided(
    *statements: Statement, depth: int | None = 3, drift: Drift | None = None, cost: float = 0.05, **changes: Any
) -> Decision:
    verdict = Verdict(statements=statements or (HEALTHY,), recommended_depth=depth)
    return decide(verdict, drift_of() if drift is None else drift, cost=cost, **{"diagnosed": True, **changes})


def judged(*cases: Case, **changes: Any) -> Decision:
    drift = drift_of(**changes)
    verdict = judge(tiny.drafter_config(), name="one", drift=drift, cases=cases, diagnosis=None, cost=0.05)
    return decide(verdict, drift, cost=0.05, diagnosed=True)


def test_a_healthy_drafter_is_shipped_at_the_recommended_depth() -> None:
    found = decided()
    assert (found.outcome, found.text, found.depth) == ("ship", "Ship it at depth 3", 3)
    assert found.speedup == {key: pytest.approx((1 + 0.3 * 3**0.5) / 1.15) for key in ("value", "low", "high")}


GATES = [gate(passed=True), gate(passed=False)]
UNCERTAIN = [Estimate(value=1.3, low=1.1, high=1.5)] * 16


@each(
    ("found", "outcome", "text"),
    [
        (
            decided(FAULT, gates=GATES),
            "do_not_ship",
            "Do not ship: required and does not hold: length@3>=2.2 (2.1 is not >= 2.2)",
        ),
        (decided(gates=GATES[:1]), "ship", "Ship it at depth 3"),
        (decided(FAULT, drift=drift_of(prompts=3)), "do_not_ship", "Do not ship: wrong norm flag: norm_output"),
        (judged(prompts=3), "cannot_tell", "Cannot tell yet: too few prompts to judge (3; at least 16)"),
        (judged(prompts=15), "cannot_tell", "Cannot tell yet: too few prompts to judge (15; at least 16)"),
        (decided(depth=0), "do_not_ship", "Do not ship: no depth is faster than plain decoding"),
        (
            decided(drift=drift_of(length=UNCERTAIN)),
            "cannot_tell",
            "Cannot tell yet: it may gain nothing (1.13 times plain decoding at depth 3, 0.96 to 1.30)",
        ),
        (decided(diagnosed=False), "ship", "Ship it at depth 3; faults were not looked for"),
    ],
)
def test_the_first_rule_that_applies_decides(found: Decision, outcome: str, text: str) -> None:
    assert (found.outcome, found.text) == (outcome, text)
    assert (found.depth is None) == (outcome != "ship")


def test_without_measurements_there_is_no_decision() -> None:
    verdict = Verdict(statements=(), recommended_depth=None)
    found = decide(verdict, None, cost=0.1, diagnosed=False, whole=False)
    assert (found.outcome, found.text) == ("cannot_tell", "Cannot tell: no prompt was finished")
    assert found.unknown[0] == "faults were not looked for"
    assert found.unknown[-1] == "stopped early"


def test_weaknesses_follow_the_decision() -> None:
    found = judged(case_of("no template", "template", 0.6), case_of("no BOS", "template", 0.98))
    assert "not tried: other lengths of context" in found.unknown
    assert not any("templates" in one for one in found.unknown)
    assert found.text == f"Ship it at depth {found.depth}; weak without a template"
    assert found.weaknesses == ("weak without a template",)


@each(
    ("name", "group", "words"),
    [
        ("Llama-3 template", "template", "weak with the Llama-3 template"),
        ("German", "text", "weak in German"),
        ("code", "text", "weak on code"),
        ("4-bit target", "weights", "weak on a 4-bit target"),
        ("8-bit target", "weights", "weak on an 8-bit target"),
        ("1000 tokens, end", "context", "weak after 1000 tokens"),
        ("1000 tokens, middle", "context", "weak in 1000 tokens (question at the middle)"),
    ],
)
def test_every_kind_of_condition_has_a_phrase(name: str, group: str, words: str) -> None:
    assert judged(case_of(name, group, 0.6)).weaknesses == (words,)


def test_further_weaknesses_are_counted() -> None:
    names = ("no template", "no BOS", "Gemma template", "long system prompt", "no system prompt")
    cases = [case_of(name, "template", 0.5 + 0.01 * i) for i, name in enumerate(names)]
    told = "weak without a template, weak without the first token (BOS), weak with the Gemma template and 2 more"
    assert judged(*cases).text.endswith(f"; {told}")


def test_growth_an_early_stop_and_untried_conditions_are_mentioned() -> None:
    assert judged(growth=sure(0.05)).weaknesses == ("its state grows with depth",)
    assert decided(whole=False).unknown[-1] == "stopped early"
    sixteen = judged(prompts=16)
    assert sixteen.outcome == "ship"
    assert sixteen.text.endswith("; other conditions were not tried")
    assert len(sixteen.unknown) == 5
