"""`eyas adapt`: a better drafter takes the old one's place, another one does not, and both are told."""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.cli.adapt import adapt
from eyas.cli.stop import StopRequest
from eyas.drafter.checkpoint import checkpoint_of, load_drafter, write_checkpoint
from eyas.train.adaptation.judge import MAX_LOSS
from eyas.train.adaptation.recipe import AdaptationSettings
from eyas.train.recipe_file import load_recipe

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
ANSWERS = 40


def conversation(number: int, answer: str) -> str:
    turns = [{"role": "user", "content": f"What of {number}?"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that chats in bytes, a random drafter for it, answers, and other answers."""
    folder = tmp_path_factory.mktemp("adapt")
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.target_config(vocab_size=264, max_position_embeddings=2048))
    model.save_pretrained(folder / "target")
    chat_tokenizer(CHATML).save_pretrained(folder / "target")
    config = tiny.drafter_config(vocab_size=264, draft_vocab_size=264, fc_norm=True, norm_output=True)
    write_checkpoint(checkpoint_of(tiny.random_drafter(config, own_embedding=False)), folder / "drafter")
    (folder / "answers.jsonl").write_text("".join(conversation(n, "it is fine, it is fine") for n in range(ANSWERS)))
    (folder / "general.jsonl").write_text("".join(conversation(n, f"say {n} or {n}") for n in range(20)))
    return folder


def words(folder: Path, out: Path, *more: object) -> list[object]:
    given: list[object] = ["adapt", folder / "drafter", folder / "answers.jsonl", "--target", folder / "target"]
    given += ["--out", out, "--device", "cpu", "--dtype", "float32", "--depth", 3, "--set", "data.workers=1"]
    return [*given, "--set", "train.depths=3", "--set", "data.max_length=128", "--set", "data.pack_length=128", *more]


FAST = ("--lr", 1e-2, "--epochs", 3, "--anchor", 0)


def test_a_better_drafter_is_kept_with_its_story(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "adapted"
    outcome = run(*words(folder, out, *FAST, "--replay", folder / "general.jsonl", "--max-loss", 1))
    assert outcome.code == 0, outcome
    for part in ("the traffic", "what is replayed", "the new drafter is better", "doctor: ", "vllm serve"):
        assert part in outcome.out, (part, outcome.out)
    record = json.loads((out / "record.json").read_text())
    change = record["changes"]["traffic"]
    assert change["gain"]["low"] > 0
    assert change["after"]["acceptance_length"] > change["before"]["acceptance_length"]
    assert change["conversations"] == 16
    assert record["data"]["conversations"] == ANSWERS - 16
    assert record["changes"]["replay"]["conversations"] == 10, "half of them"
    assert record["from"]["drafter"] == str(folder / "drafter")
    assert record["from"]["fingerprint"] != record["drafter"]["fingerprint"]
    assert record["doctor"]["outcome"] in ("ship", "do_not_ship", "cannot_tell")
    beside = json.loads((out / "drafter" / "record.json").read_text())
    assert beside["changes"] == record["changes"]
    kept = load_drafter(str(out / "drafter"))
    assert kept.recorded_acceptance is not None
    assert list(kept.recorded_acceptance.accepted_at) == change["after"]["accepted_at"]
    assert (out / "adaptation.png").read_bytes().startswith(b"\x89PNG")
    assert load_recipe(out / "training" / "recipe.toml").drafter.init_from == str(folder / "drafter")
    assert run("check", out / "drafter", "--target", folder / "target").code == 0
    stored = {name: tensor.dtype for name, tensor in load_file(out / "drafter" / "model.safetensors").items()}
    before = {name: tensor.dtype for name, tensor in load_file(folder / "drafter" / "model.safetensors").items()}
    assert stored.items() >= before.items(), "in the precision of the one it came from"


def test_a_drafter_that_is_not_better_does_not_take_the_place(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "adapted"
    (out / "drafter").mkdir(parents=True)
    (out / "drafter" / "record.json").write_text("{}")  # of an earlier one, whose training was removed
    outcome = run(*words(folder, out, "--lr", 1e-9, "--epochs", 1, "--no-doctor", "--json"))
    assert outcome.code == 1, outcome
    record = json.loads(outcome.out)
    assert not record["kept"]
    assert record["verdict"].startswith("the old drafter stays: the new one is not better beyond the interval")
    assert record["doctor"] == {"skipped": "by --no-doctor"}
    assert not (out / "drafter").exists()
    assert (out / "training" / "drafter" / "model.safetensors").exists()
    assert json.loads((out / "record.json").read_text())["kept"] is False


def test_a_stopped_adaptation_is_gone_on_with(
    folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapted"
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "asked", lambda self: True)
        stopped = run(*words(folder, out, *FAST, "--no-doctor"))
    assert stopped.code == 130, stopped
    assert "--resume goes on" in stopped.err
    assert not (out / "record.json").exists()
    run(*words(folder, out, *FAST, "--no-doctor")).assert_refused("already holds a run", "--resume")
    resumed = run(*words(folder, out, *FAST, "--no-doctor", "--resume"))
    assert resumed.code == 0, resumed
    assert "doctor: skipped by --no-doctor" in resumed.out
    assert json.loads((out / "record.json").read_text())["kept"]


def test_what_cannot_be_adapted_is_refused_at_once(folder: Path, tmp_path: Path, run: Run) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(conversation(0, "it is fine"))
    given = ["adapt", folder / "drafter", few, "--target", folder / "target", "--out", tmp_path / "out"]
    run(*given).assert_refused("1 conversations in", "32 at least", "collect more")
    run(*given[:2], tmp_path / "none.jsonl", *given[3:]).assert_refused("none.jsonl")
    assert not (tmp_path / "out").exists()


def test_answers_that_cannot_be_read_are_told(folder: Path, tmp_path: Path, run: Run) -> None:
    lines = (folder / "answers.jsonl").read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    asked = json.dumps({"prompt": "What then?"})
    mixed.write_text("\n".join(["{", "{", "{", asked, *lines[:20]]))
    given = ["adapt", folder / "drafter", mixed, "--target", folder / "target", "--out", tmp_path / "out"]
    run(*given).assert_refused("3 of 24 records are bad", "mixed.jsonl:1", "--set data.max_bad_share")
    run(*given, "--set", "data.max_bad_share=0.5").assert_refused(
        "20 conversations in", "1 without an answer and 3 bad: 3 x not JSON, as", "collect more"
    )


def test_too_little_to_judge_by_is_refused_before_it_is_trained(folder: Path, tmp_path: Path, run: Run) -> None:
    answers, out = tmp_path / "answers.jsonl", tmp_path / "adapted"
    long = "".join(conversation(n, "it is fine, " * 30) for n in range(10))
    short = (folder / "answers.jsonl").read_text()
    answers.write_text(long + "".join(short.splitlines(keepends=True)[:31]))
    given = [word if word != folder / "answers.jsonl" else answers for word in words(folder, out, *FAST)]
    refused = run(*given, "--no-doctor")
    assert refused.code == 2, refused
    assert "31 conversations fit data.max_length 128 (10 are too long, 0 unanswered, 0 bad)" in refused.err
    assert "takes 32 at least; --set a higher data.max_length, or collect more" in refused.err
    assert not (out / "training" / "checkpoints").exists()
    answers.write_text(long + short)
    assert run(*given, "--no-doctor").code in (0, 1)
    record = json.loads((out / "record.json").read_text())
    assert record["changes"]["traffic"]["conversations"] == 16, "of 40 that fit, as many as it takes"
    one = tmp_path / "one.jsonl"
    one.write_text(conversation(0, "say it"))
    refused = run(*words(folder, tmp_path / "other", *FAST, "--no-doctor", "--replay", one))
    assert refused.code == 2, refused
    assert "1 conversations of --replay fit data.max_length 128" in refused.err
    assert "takes 2 at least" in refused.err


def test_the_drafter_to_start_from_is_not_written_over(folder: Path, run: Run) -> None:
    run(*words(folder, folder)).assert_refused("the drafter to start from", "choose another --out")


def test_a_dry_run_prints_the_recipe(folder: Path, tmp_path: Path, run: Run) -> None:
    outcome = run(*words(folder, tmp_path / "out", "--dry-run", "--anchor", 0.125))
    assert outcome.code == 0
    (tmp_path / "recipe.toml").write_text(outcome.out)
    assert load_recipe(tmp_path / "recipe.toml").train.anchor == 0.125
    assert not (tmp_path / "out").exists()


def test_the_command_has_the_defaults_of_the_library() -> None:
    command = {name: one.default for name, one in inspect.signature(adapt).parameters.items()}
    library = {one.name: one.default for one in fields(AdaptationSettings) if one.default is not MISSING}
    named = ("replay_share", "held_out_share", "lr", "anchor", "epochs", "minutes", "device_share")
    assert {name: command[name] for name in named} == {name: library[name] for name in named}
    assert command["max_loss"] == MAX_LOSS


def test_an_adaptation_keeps_to_its_share_of_the_device_and_says_so(
    folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr("time.process_time", lambda: 1.0)  # not that of all tests before this one
    given = ["--lr", 1e-2, "--epochs", 1, "--device-share", 0.5, "--json"]
    outcome = run(*words(folder, tmp_path / "adapted", *given))
    assert outcome.code in (0, 1), outcome
    assert asked == [max(1, torch.get_num_threads() // 2)]
    record = json.loads(outcome.out)
    share, seconds = record["device_share"], record["seconds"]
    assert (share["asked"], share["threads"]) == (0.5, torch.get_num_threads())
    assert 0.3 < share["taken"] < 0.6, "half of it, and part of what was done last"
    assert share["worked_seconds"] == pytest.approx(share["taken"] * share["seconds"], abs=0.2)
    assert seconds["total"] == pytest.approx(share["seconds"], abs=2)
    assert seconds["training"] < share["worked_seconds"], "minutes of training are of work"


def test_answers_are_encoded_and_read_as_tokens_once(
    folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eyas.train import run_data

    places: list[Path] = []
    real = run_data.load_or_encode

    def counted(place: Path, *given: Any) -> Any:
        places.append(place)
        return real(place, *given)

    monkeypatch.setattr(run_data, "load_or_encode", counted)
    outcome = run(
        *words(
            folder, tmp_path / "adapted", *FAST, "--no-doctor", "--replay", folder / "general.jsonl", "--max-loss", 1
        )
    )
    assert outcome.code == 0, outcome
    assert [place.name for place in places] == ["train.safetensors", "replay.safetensors"]
