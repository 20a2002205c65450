"""`eyas plan --calibrate` times real steps, and a plan is made of what it wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.bench import step_times
from eyas.bench.step_times import TimedSteps, measure
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.plan.measured import read_measured
from eyas.target.facts import facts_of
from eyas.target.model import Target
from tiny import drafter_config, random_drafter, target_config

Run = Callable[..., Any]


@each(("users", "depth"), [(1, 0), (1, 3), (4, 0), (4, 2)])
def test_steps_of_all_users_are_counted_and_nothing_is_left_behind(users: int, depth: int) -> None:
    model = LlamaForCausalLM(target_config()).eval().requires_grad_(False)
    target = Target(facts=facts_of(model.config, "tiny"), model=model, tokenizer=letter_tokenizer())
    drafter = random_drafter(drafter_config(), own_embedding=False).share_target(target.embedding(), target.head())
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=4, max_model_len=128, memory=2**24))
    times, shallow = TimedSteps(users=users, depth=depth), TimedSteps(users=users, depth=1)
    for _ in range(2):
        measure(engine, times, seconds=0.2)
        measure(engine, shallow, seconds=0.1)
    found = times.record(median(shallow.draft_seconds))
    assert len(times.seconds) >= 6
    assert found["users"] == users
    assert 64 < found["context"] < 128
    if depth:
        assert 1 <= found["length"] <= depth + 1
        assert found["length"] == pytest.approx(1 + sum(found["accepted"]), abs=0.02)
        assert found["accepted"] == sorted(found["accepted"], reverse=True)
        first, further = found["draft_seconds"]
        assert first > 0
        assert (further > 0) == (depth > 1)
    else:
        assert times.tokens == users * len(times.seconds)
    assert not list(engine.step())


@pytest.mark.default
def test_a_plan_is_calibrated_on_this_machine(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SECONDS", 1.0)
    monkeypatch.setattr(step_times, "ROUNDS", 1)
    monkeypatch.setattr(step_times, "DEPTHS", {1: (0, 2), 2: (0, 2)})
    out = tmp_path / "measured.json"
    outcome = run("plan", "--calibrate", out, "--quantization", "float32", "--users", 1, "--depth", 2, "--json")
    assert outcome.code == 0, outcome
    written = json.loads(out.read_text())
    assert (written["target"], written["drafter"], written["quantisation"]) == (
        "smollm2",
        "smollm2-eagle3.1",
        "float32",
    )
    assert [(step["users"], step["depth"]) for step in written["steps"]] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    record = json.loads(outcome.out)
    assert record["card"]["device"] == "cpu"
    found = record["calibration"]
    assert len(found["steps"]) == 4
    assert [tokens for tokens, _ in found["factors"]["verify"]] == [1, 2, 3, 6]
    told = {(one["users"], one["depth"]): way for one, way in zip(record["expected"], found["told"], strict=True)}
    assert (told[1, 0], told[1, 1], told[1, 2], told[4, 2]) == ("measured", "interpolated", "measured", "extrapolated")
    assert "as measured" in record["formulas"]["step"]
    again = run("plan", "--gpu", "cpu", "--memory", 24, "--bandwidth", 20, "--tflops", 0.1, "--measured", out, "--json")
    assert again.code == 0, again
    assert set(json.loads(again.out)["calibration"]["told"]) == {"fitted"}, (
        "float32 was measured, not the file as it is"
    )
    assert read_measured(out).halved is written["halved"]


def test_what_cannot_be_calibrated_is_refused(run: Run, tmp_path: Path, target: Path) -> None:
    out = tmp_path / "m.json"
    run("plan", "--calibrate", out, "--measured", out).assert_refused("give one of them")
    run("plan", target, "--calibrate", out).assert_refused("--drafter none")
    assert not out.exists()
