"""Ten planted faults are named, three healthy drafters raise none."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch

import tiny
from doctor.planted import broken
from each import each
from eyas.doctor.candidate import DrafterCandidate, prepare_candidate
from eyas.doctor.conditions import quantised
from eyas.doctor.diagnosis import DEPTH, Diagnosis, diagnose
from eyas.doctor.repairs import measure_resemblance, repairs, variant
from eyas.doctor.transcripts import Answering, Asked, Transcriber
from eyas.doctor.verdict import FAULTS, Verdict, judge, recommend_depth
from eyas.drafter.checkpoint import Checkpoint, checkpoint_of
from eyas.drafter.model import Drafter
from eyas.errors import UserError
from eyas.kernels.linear.quantised_linear import load_quantised
from eyas.target.model import Target

pytestmark = pytest.mark.slow


def examined(checkpoint: Checkpoint, target: Target, asked: Sequence[Asked]) -> tuple[Diagnosis, Verdict]:
    candidate = prepare_candidate(checkpoint, "candidate", target)
    subject = candidate.subject
    how = Answering(max_new_tokens=40, overshoot=DEPTH)
    transcripts = list(Transcriber(target, subject.layer_ids).answer(asked, how))
    alike = measure_resemblance(subject.drafter, target)
    tried = list(repairs(subject, target, alike, candidate.unused))
    found = diagnose(subject, target, transcripts, tried, alike)
    verdict = judge(checkpoint.config, name="candidate", drift=None, cases=(), diagnosis=found, cost=0.1)
    return found, verdict


def faults_of(verdict: Verdict) -> list[str]:
    return [statement.name for statement in verdict.statements if statement.level == "fault"]


@each("fault", [fault for fault in FAULTS if fault != "norm_before_fc"])
def test_a_planted_fault_is_named(
    fault: str, tiny_target: Target, other_target: Target, pruned_drafter: Drafter, asked: list[Asked]
) -> None:
    checkpoint = broken(pruned_drafter, tiny_target.embedding())[fault]
    target = other_target if fault == "wrong_target" else tiny_target
    diagnosis, verdict = examined(checkpoint, target, asked)
    assert faults_of(verdict) == [fault], [(t.fault, t.about, t.ratio) for t in diagnosis.trials]
    statement = verdict.statements[0]
    assert statement.text == FAULTS[fault]
    assert statement.evidence
    assert statement.advice


def test_healthy_drafters_raise_no_alarm(
    tiny_target: Target, tiny_drafter: Drafter, pruned_drafter: Drafter, plain_drafter: Drafter, asked: list[Asked]
) -> None:
    for drafter in (tiny_drafter, pruned_drafter, plain_drafter):
        diagnosis, verdict = examined(checkpoint_of(drafter), tiny_target, asked)
        assert faults_of(verdict) == [], [(t.fault, t.about, t.ratio) for t in diagnosis.trials]
        assert [statement.name for statement in verdict.statements] == ["no_fault"]
        assert not diagnosis.unread


def test_a_repair_leaves_the_drafter_as_it_was(tiny_target: Target, pruned_drafter: Drafter) -> None:
    candidate: DrafterCandidate = prepare_candidate(checkpoint_of(pruned_drafter), "candidate", tiny_target)
    before = {name: tensor.clone() for name, tensor in candidate.subject.drafter.state_dict().items()}
    changed = variant(candidate.subject, tiny_target, tensors={"fc.weight": before["fc.weight"] * 2}, norm_output=False)
    assert not changed.drafter.config.norm_output
    assert torch.equal(changed.drafter.fc.weight, before["fc.weight"] * 2)
    for name, tensor in candidate.subject.drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_only_tensors_of_a_lost_flag_are_allowed(tiny_target: Target, pruned_drafter: Drafter) -> None:
    healthy = checkpoint_of(pruned_drafter)
    extra = broken(pruned_drafter, tiny_target.embedding())["fc_norm"]
    candidate = prepare_candidate(extra, "candidate", tiny_target)
    assert sorted(candidate.unused) == [f"fc_norm.{i}.weight" for i in range(3)]
    assert "fc_norm.0.weight" in candidate.remarks[0]
    incomplete = {name: tensor for name, tensor in healthy.tensors.items() if name != "norm.weight"}
    with pytest.raises(UserError, match=r"norm\.weight is missing"):
        prepare_candidate(
            Checkpoint(config=healthy.config, tensors=incomplete, extras={}, raw_config={}), "candidate", tiny_target
        )


def test_a_quantised_target_is_restored(tiny_target: Target) -> None:
    if load_quantised()[0] is None:
        pytest.skip("no compiler here for integer products")
    before = {name: tensor.clone() for name, tensor in tiny_target.model.state_dict().items()}
    weight = before["model.layers.0.mlp.up_proj.weight"]
    cases: list[tuple[Literal[4, 8], float]] = [(8, 0.01), (4, 0.2)]
    for bits, most in cases:
        with quantised(tiny_target, bits) as layers:
            assert layers == 7 * tiny.LAYERS
            changed = tiny_target.model.state_dict()
            assert torch.equal(changed["lm_head.weight"], before["lm_head.weight"])
            error = (changed["model.layers.0.mlp.up_proj.weight"] - weight).norm() / weight.norm()
        assert 0 < float(error) < most
    for name, tensor in tiny_target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_recommended_depth_weighs_length_against_cost() -> None:
    lengths = [1.7, 2.2, 2.5, 2.6, 2.65]
    assert recommend_depth(lengths, cost=0.0) == 5
    assert recommend_depth(lengths, cost=0.1) == 3
    assert recommend_depth(lengths, cost=2.0) == 0
