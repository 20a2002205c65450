"""`eyas doctor` examines, tells, writes, gates, and says what is wrong before it starts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.doctor import robustness
from eyas.doctor.report import render_report
from eyas.doctor.robustness import Case
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from reports.hostile import hostile
from reports.pages import assert_sound

Run = Callable[..., Any]

PROMPTS = ["What is the capital of France?", "Say hi.", "Count to 3."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that can chat in bytes, two random drafters for it, and prompts."""
    folder = tmp_path_factory.mktemp("doctor")
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.target_config(vocab_size=264, max_position_embeddings=2048))
    model.save_pretrained(folder / "target")
    chat_tokenizer(CHATML).save_pretrained(folder / "target")
    for name, flag in (("eagle31", True), ("eagle3", False)):
        config = tiny.drafter_config(vocab_size=264, draft_vocab_size=264, fc_norm=flag, norm_output=flag)
        write_checkpoint(checkpoint_of(tiny.random_drafter(config, own_embedding=False)), folder / name)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return folder


def words(folder: Path, *more: object) -> list[object]:
    given: list[object] = ["doctor", folder / "prompts.jsonl", "--target", folder / "target"]
    given += ["--drafter", folder / "eagle31", "--max-tokens", 8, "--depth", 4, "--case-prompts", 2]
    return [*given, "--length", 60, "--dtype", "float32", "--device", "cpu", *more]


@pytest.mark.slow
def test_a_whole_examination_is_told_and_written(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "report"
    outcome = run(*words(folder, "--drafter", folder / "eagle3", "--out", out, "--require", "length@3>=1"))
    assert outcome.code == 0, outcome
    for part in (
        "eagle31 (EAGLE-3.1): 3 prompts",
        "RMS fed back",
        "no template",
        "recommended depth",
        "holds  length@3",
    ):
        assert part in outcome.out, (part, outcome.out)
    record = json.loads((out / "doctor.json").read_text(encoding="utf-8"))
    assert record["schema"] == "eyas.doctor/1"
    assert record["whole"]
    assert list(record["drafters"]) == ["eagle31", "eagle3"]
    drift = record["drafters"]["eagle31"]["drift"]
    assert len(drift["rms"]["value"]) == len(drift["length"]) == 4
    assert drift["mass"].keys() == {"sink", "prompt", "verified", "own"}
    assert record["drafters"]["eagle3"]["drift"]["growth"]["value"] > drift["growth"]["value"]
    assert {case["group"] for case in record["cases"]} >= {"noise", "template", "context", "weights"}
    assert (out / "doctor.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "doctor.html").read_text(encoding="utf-8")
    assert_sound(page)
    assert "prefers-color-scheme: dark" in page
    assert outcome.out.startswith(f"eagle31: {record['decision']['text']}\neagle3: ")
    assert record["decision"] == {"drafter": "eagle31", **record["drafters"]["eagle31"]["decision"]}
    assert record["decision"]["text"] == "Cannot tell yet: too few prompts to judge (3; at least 16)"
    assert f"eagle31: {record['decision']['text']}</p>" in page
    assert not any(
        one["level"] == "healthy" for own in record["drafters"].values() for one in own["verdict"]["statements"]
    )
    renamed = json.loads(json.dumps(record).replace("eagle31", "<script>eagle31"))
    assert_sound(render_report(hostile(renamed)))


def test_a_gate_that_fails_sets_the_exit_code(folder: Path, run: Run) -> None:
    quick = words(folder, "--no-robustness", "--no-diagnosis", "--limit", 1, "--json")
    outcome = run(*quick, "--require", "length@2>=2.9", "--require", "length@2>=1", "--require", "faults<=0")
    assert outcome.code == 1
    gates = json.loads(outcome.out)["gates"]
    assert [gate["passed"] for gate in gates] == [False, True, False]
    assert "not measured" in gates[2]["reason"]
    assert json.loads(outcome.out)["decision"]["text"].startswith(
        "Do not ship: required and does not hold: length@2>=2.9"
    )


def test_an_interruption_keeps_what_was_measured(
    folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = robustness.Robustness.cases

    def one_case(self: robustness.Robustness) -> Iterator[Case]:
        yield next(cases(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(robustness.Robustness, "cases", one_case)
    outcome = run(*words(folder, "--no-diagnosis", "--out", tmp_path / "out", "--json"))
    assert outcome.code == 130
    assert "stopped early" in outcome.err
    record = json.loads(outcome.out)
    assert not record["whole"]
    assert len(record["cases"]) == 1
    assert record["drafters"]["eagle31"]["drift"]["prompts"] == 3
    page = (tmp_path / "out" / "doctor.html").read_text(encoding="utf-8")
    assert "Stopped early" in page
    assert "It was turned off (--no-diagnosis)" in page, "what was not measured is folded, with the reason"
    assert "stopped early" in record["decision"]["unknown"]
    assert_sound(page)


def test_what_cannot_be_examined_is_refused_at_once(folder: Path, tmp_path: Path, run: Run) -> None:
    run(*words(folder, "--require", "lenght@3>=2")).assert_refused("did you mean 'length'?")
    run(*words(folder, "--drafter", folder / "eagle31")).assert_refused("eagle31 is given twice")
    run(*words(folder, tmp_path / "none.jsonl")).assert_refused("none.jsonl")
    run(*words(folder, "--filler", tmp_path / "none.txt")).assert_refused("cannot read", "none.txt")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    run(*words(folder, "--filler", empty)).assert_refused("holds no text")
    other = tiny.random_drafter(tiny.drafter_config(), own_embedding=False)
    write_checkpoint(checkpoint_of(other), tmp_path / "other")
    outcome = run(*words(folder, "--drafter", tmp_path / "other"))
    assert outcome.code == 2
    assert "vocabulary 96" in outcome.err
