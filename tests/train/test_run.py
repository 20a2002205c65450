"""Runs from a recipe to drafters on disk, with stops, faults and resumption."""

import json
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.drafter.check import check
from eyas.drafter.checkpoint import load_drafter
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from eyas.train import resume
from eyas.train.estimate import RoundCounts
from eyas.train.journal import read_log
from eyas.train.ranks import Ranks
from eyas.train.recipe_file import read_recipe, to_toml
from eyas.train.run import TrainResult, run
from eyas.train.schedule import LearningRateSchedule, RunLength
from eyas.train.sources.live import LiveSource

pytestmark = pytest.mark.slow

STEPS = 4
Tables = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Small target with a tokenizer, loaded from its folder."""
    folder = tmp_path_factory.mktemp("models") / "target"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny.target_config(vocab_size=260)).save_pretrained(folder)
    chat_tokenizer(CHATML).save_pretrained(folder)
    return Target.load(str(folder))


@pytest.fixture
def tables(target: Target, tmp_path: Path) -> Tables:
    """Recipe that runs in a second."""
    return {
        "target": {"source": target.facts.source},
        "data": {"files": [conversations(tmp_path)], "workers": 1, "pack_length": 160, "max_length": 120},
        "drafter": {"aux_layer_ids": list(tiny.AUX_IDS), "draft_vocab_size": 64},
        "train": {"steps": STEPS, "depths": 2, "lr": 4e-3, "log_every": 1, "save_every": 2, "packs_per_step": 2},
        "output": {"folder": str(tmp_path / "run")},
    }


def conversations(folder: Path, answer: Callable[[int], str] = lambda i: f"it is {i} " * (1 + i % 3)) -> str:
    rows = [
        [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": answer(i)}] for i in range(16)
    ]
    path = folder / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def ran(tables: Tables, target: Target, **options: Any) -> TrainResult:
    return run(read_recipe(tables), TargetParts.of(target), partial(LiveSource, target), **options)


def stop_after(steps: int) -> Callable[[], bool]:
    asked = iter(range(1, 1000))
    return lambda: next(asked) >= steps


def folder_of(tables: Tables) -> Path:
    return Path(tables["output"]["folder"])


def contents(folder: Path) -> dict[Path, bytes]:
    """Contents of every file of a run, except the encoded text."""
    files = [path for path in folder.rglob("*") if path.is_file() and "encoded" not in path.parts]
    return {path: path.read_bytes() for path in files}


def test_two_drafters_side_by_side_are_saved_as_servers_load_them(
    tables: Tables, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    tables["drafters"] = {"old": {"fc_norm": False, "norm_output": False}, "new": {"lr": 2e-3, "draft_vocab_size": 260}}
    tables["train"]["eval_every"] = 2
    outcome = ran(tables, target)
    folder = folder_of(tables)
    assert (outcome.step, outcome.length, outcome.finished) == (STEPS, RunLength(steps=STEPS), True)
    assert outcome.drafters == {"old": folder / "old", "new": folder / "new"}
    for name, family, draft_vocab_size in (("old", "EAGLE-3", 64), ("new", "EAGLE-3.1", 260)):
        report = check(str(folder / name), target=target.facts)
        assert report.findings == ()
        assert (report.family, report.config.draft_vocab_size) == (family, draft_vocab_size)
        kept = load_drafter(str(folder / "checkpoints" / "step-000004" / name))
        assert torch.equal(load_drafter(str(folder / name)).fc.weight, kept.fc.weight)
    assert any("1 held out" in line for line in caplog.messages)
    files = {"best", "checkpoints", "log.jsonl", "new", "old", "recipe.toml", "record.json", "training.png"}
    assert {path.name for path in folder.iterdir()} - {"encoded"} == files
    assert (folder / "recipe.toml").read_text() == to_toml(read_recipe(tables))
    record = json.loads((folder / "record.json").read_text())
    for name in ("old", "new"):
        recorded = load_drafter(str(folder / name)).recorded_acceptance
        assert recorded is not None, "an engine starts from what was held out"
        assert list(recorded.accepted_at) == record["held_out"][name]["accepted_at"]
    assert (record["step"], record["data"]["conversations"], record["processes"]) == (STEPS, 15, 1)
    assert record["vocabulary"]["new"] == {"size": 260, "coverage": 1.0}
    for name in ("old", "new"):
        start = record["start"][name]
        assert start["uniform"] == pytest.approx(math.log(record["vocabulary"][name]["size"]))
        assert len(start["loss"]) == 2
        assert max(start["loss"]) < start["uniform"] * 1.01
        assert any(f"{name} starts at " in line for line in caplog.messages)
    assert set(record["held_out"]) == {"old", "new"}
    assert {line["step"] for line in read_log(folder / "log.jsonl") if "held_out" in line} == {2, 4}


def test_variants_side_by_side_use_their_own_settings(tables: Tables, target: Target, tmp_path: Path) -> None:
    start = ran(tables, target).drafters["drafter"]
    tables["output"] = {"folder": str(tmp_path / "variants")}
    warm = {"init_from": str(start), "lr": 1e-6}
    tables["drafters"] = {
        "same": {},
        "other": {"seed": 1},
        "warm": warm,
        "mixed": {**warm, "loss": {"cross_entropy": 0.1, "total_variation": 0.9}},
        "noisy": {**warm, "noise": 0.2},
        "first": {**warm, "first_weight": 5.0},
    }
    outcome = ran(tables, target)
    began = load_drafter(str(start)).fc.weight
    moved = {name: load_drafter(str(place)).fc.weight - began for name, place in outcome.drafters.items()}
    assert not moved.pop("same").any(), "it learns what it learnt alone"
    assert float(moved.pop("other").abs().max()) > 1e-3
    assert [name for name, own in moved.items() if not 0 < float(own.abs().max()) < 1e-4] == []
    assert [name for name, own in moved.items() if name != "warm" and torch.equal(own, moved["warm"])] == []


def test_a_resumed_run_ends_with_the_same_weights(tables: Tables, target: Target, tmp_path: Path) -> None:
    ran(tables, target)
    tables["output"]["folder"] = str(tmp_path / "parts")
    stopped = ran(tables, target, stop=stop_after(3))
    assert (stopped.step, stopped.drafters) == (3, {})
    assert not (tmp_path / "parts" / "drafter").exists()
    # Settings that do not change the result may change.
    tables["train"] |= {"log_every": 2, "save_every": 1}
    assert ran(tables, target, resuming=True).step == STEPS
    whole, parts = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("run", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    starts = [json.loads((tmp_path / name / "record.json").read_text())["start"] for name in ("run", "parts")]
    assert starts[0] == starts[1] != {}
    steps = [line["step"] for line in read_log(tmp_path / "parts" / "log.jsonl") if "loss" in line]
    assert steps == [1, 2, 3, 4]


def test_resuming_a_finished_run_changes_nothing(
    tables: Tables, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="eyas")
    ran(tables, target)
    record = (folder_of(tables) / "record.json").read_text()
    log = (folder_of(tables) / "log.jsonl").read_text()
    again = ran(tables, target, resuming=True)
    assert (again.step, list(again.drafters)) == (STEPS, ["drafter"])
    assert (folder_of(tables) / "record.json").read_text() == record
    assert (folder_of(tables) / "log.jsonl").read_text() == log
    assert any(
        re.search(r"is finished \(4 steps in .*nothing is left to do.*more train\.steps", m) for m in caplog.messages
    )


@pytest.mark.parametrize("stopped_at", [2, STEPS])
def test_a_run_may_become_longer(
    tables: Tables, target: Target, stopped_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate continues on the new schedule."""
    caplog.set_level(logging.INFO, logger="eyas")
    ran(tables, target, stop=stop_after(stopped_at))
    tables["train"]["steps"] = 8
    outcome = ran(tables, target, resuming=True)
    assert (outcome.step, outcome.finished) == (8, True)
    lines = [line for line in read_log(folder_of(tables) / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    settings = read_recipe(tables).train
    curve = LearningRateSchedule(name="cosine", warmup=settings.warmup, decay=settings.decay, final=settings.final_lr)
    for line in lines:
        length = STEPS if line["step"] <= stopped_at else 8
        assert line["lr_share"] == curve.share(line["step"] - 1, length)
    said = next(message for message in caplog.messages if "planned for 4 steps" in message)
    assert "is for 8 steps now: the learning rate goes on at" in said
    assert json.loads((folder_of(tables) / "record.json").read_text())["planned"] == {"steps": 8, "minutes": None}


def test_a_run_does_not_become_shorter_than_it_is(tables: Tables, target: Target) -> None:
    ran(tables, target)
    before = contents(folder_of(tables))
    tables["train"]["steps"] = 3
    with pytest.raises(UserError, match=r"has done 4 steps in .*, and 3 steps are less; give it more than that"):
        ran(tables, target, resuming=True)
    assert contents(folder_of(tables)) == before


def test_minutes_are_counted_across_interruptions(tables: Tables, target: Target) -> None:
    del tables["train"]["steps"]
    tables["train"]["minutes"] = 0.03
    stopped = ran(tables, target, stop=stop_after(1))
    assert (stopped.step, stopped.finished) == (1, False)
    before = json.loads((folder_of(tables) / "checkpoints" / "step-000001" / "state.json").read_text())
    assert before["planned"] == {"steps": None, "minutes": 0.03}
    assert 0 < before["seconds"] < 1.8
    outcome = ran(tables, target, resuming=True)
    assert outcome.finished
    record = json.loads((folder_of(tables) / "record.json").read_text())
    assert record["training_seconds"] >= 1.8
    assert record["first_step_seconds"] > 0
    assert 0.02 < record["last"]["lr_share"] < 1, "on its way down where the last step began"
    # Steps may replace minutes.
    del tables["train"]["minutes"]
    tables["train"]["steps"] = outcome.step + 2
    assert ran(tables, target, resuming=True).step == outcome.step + 2


class Lengths:
    """Estimates with given acceptance lengths."""

    def __init__(self, *lengths: float) -> None:
        self._lengths = iter(lengths)

    def __call__(self, states: Any, *_: object, depths: int, **__: object) -> dict[str, RoundCounts]:
        accepted = round(1000 * (next(self._lengths) - 1))
        return {state.name: RoundCounts(rounds=1000, accepted_at=(accepted,)) for state in states}


def test_the_best_drafter_is_kept_beside_the_last(
    tables: Tables, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables["train"] |= {"eval_every": 1, "save_every": 1}
    monkeypatch.setattr("eyas.train.loop.estimate", Lengths(1.2, 1.7, 1.5))
    ran(tables, target, stop=stop_after(3))
    folder = folder_of(tables)
    second = load_file(folder / "checkpoints" / "step-000002" / "drafter" / "model.safetensors")
    monkeypatch.setattr("eyas.train.loop.estimate", Lengths(1.6))  # better than before the stop, but not the best
    ran(tables, target, resuming=True)
    best = folder / "best" / "drafter"
    assert check(str(best), target=target.facts).findings == ()
    kept = load_file(best / "model.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in second.items())
    record = json.loads((folder / "record.json").read_text())
    assert record["best"] == {"drafter": {"folder": str(best), "step": 2, "acceptance_length": 1.7}}
    assert record["held_out"]["drafter"]["acceptance_length"] == 1.6
    last = load_file(folder / "drafter" / "model.safetensors")
    assert not torch.equal(last["fc.weight"], kept["fc.weight"])


def test_an_existing_run_is_not_overwritten(tables: Tables, target: Target) -> None:
    folder = folder_of(tables)
    with pytest.raises(UserError, match=r"no checkpoint in .*run/checkpoints to go on from; leave out --resume"):
        ran(tables, target, resuming=True)
    (folder / "drafter").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run/drafter exists and would be overwritten.*output\.folder"):
        ran(tables, target)
    (folder / "drafter").rmdir()
    (folder / "log.jsonl").write_text('{"drafter": "drafter", "step": 1}\n')
    with pytest.raises(UserError, match=r"saved no checkpoint; remove .*log\.jsonl"):
        ran(tables, target)
    (folder / "log.jsonl").unlink()
    ran(tables, target, stop=stop_after(1))
    with pytest.raises(UserError, match=r"already holds a run; pass --resume"):
        ran(tables, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"lr": 1e-3}}, r"had train\.lr = 0\.004 and now it is 0\.001"),
        ({"data": {"max_length": 60}}, r"had data\.max_length = 120 and now it is 60"),
        ({"drafter": {"draft_vocab_size": 80}}, r"had drafter\.draft_vocab_size = 64 and now it is 80"),
        ({"drafters": {"old": {}, "new": {}}}, r"had drafters\.old = None and now it is \{\}"),
    ],
)
def test_a_changed_recipe_is_not_resumed(tables: Tables, target: Target, changes: Tables, message: str) -> None:
    ran(tables, target, stop=stop_after(1))
    before = contents(folder_of(tables))
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    with pytest.raises(UserError, match=message):
        ran(tables, target, resuming=True)
    assert contents(folder_of(tables)) == before


def test_a_missing_drafter_and_other_data_are_not_resumed(tables: Tables, target: Target, tmp_path: Path) -> None:
    tables["drafters"] = {"old": {}, "new": {}}
    ran(tables, target, stop=stop_after(1))
    with pytest.raises(UserError, match=r"had drafters\.new = \{\} and now it is None"):
        ran({**tables, "drafters": {"old": {}}}, target, resuming=True)
    conversations(tmp_path, lambda i: f"it was {i} " * (1 + i % 3))
    with pytest.raises(UserError, match=r"had the data = "):
        ran(tables, target, resuming=True)


def test_a_run_without_held_out_text(tables: Tables, target: Target) -> None:
    tables["data"]["held_out_share"] = 0.0
    assert ran(tables, target).step == STEPS
    record = json.loads((folder_of(tables) / "record.json").read_text())
    assert (record["held_out"], record["best"], record["data"]["conversations"]) == ({}, {}, 16)
    assert not (folder_of(tables) / "best").exists()


def test_held_out_conversations_may_come_from_a_file(tables: Tables, target: Target, tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    tables["data"]["held_out"] = conversations(tmp_path / "apart", lambda i: f"apart {i}")
    ran(tables, target)
    record = json.loads((folder_of(tables) / "record.json").read_text())
    assert record["data"]["conversations"] == 16
    assert record["held_out"]["drafter"]["rounds"] > 0


def test_unusable_data_are_refused_before_writing(tables: Tables, target: Target, tmp_path: Path) -> None:
    def refused(message: str, **changes: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=message):
            ran({name: {**table, **changes.get(name, {})} for name, table in tables.items()}, target)
        assert contents(folder_of(tables)) == {}

    refused(r"draft_vocab_size 261 is not between 1 and the target's 260", drafter={"draft_vocab_size": 261})
    refused(r"drafter\.aux_layer_ids: auxiliary layer id 9 is outside 0\.\.4", drafter={"aux_layer_ids": [1, 2, 9]})
    refused(r"of 16 conversations none .*16 too long for data\.max_length 10", data={"max_length": 10})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello?"}\n' * 3)
    refused(r"of 3 conversations none .*3 unanswered", data={"files": [str(prompts)]})
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(r"empty\.jsonl holds no conversations", data={"files": [str(tmp_path / "empty.jsonl")]})
    refused(r"cannot read .*absent\.jsonl", data={"files": [str(tmp_path / "absent.jsonl")]})
    conversations(tmp_path, lambda i: "!")
    # An answer has two tokens here: its text, and the closing token of the template.
    assert ran(tables, target, stop=stop_after(1)).step == 1


def test_a_bad_recipe_is_refused_before_reading_data(
    tables: Tables, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("encoding begins")

    monkeypatch.setattr("eyas.train.run_data.encode_corpus", never)

    def refused(message: str, processes: int = 1, **changes: dict[str, Any]) -> None:
        changed = {name: {**tables.get(name, {}), **changes.get(name, {})} for name in {*tables, *changes}}
        with pytest.raises(UserError, match=message):
            ran(changed, target, ranks=Ranks(world=processes))

    refused(r"packs_per_step 2 cannot be shared by 3 processes.*multiple", processes=3)
    refused(r"draft_vocab_size 261 is not between 1 and the target's 260", drafter={"draft_vocab_size": 261})
    refused(r"drafter\.aux_layer_ids: auxiliary layer id 9 is outside", drafter={"aux_layer_ids": [9]})
    refused(r"drafter\.aux_layer_ids: .* has 4 layers and the default.*name three", drafter={"aux_layer_ids": "none"})
    refused(r"drafters\.deep\.aux_layer_ids: .* id 9", drafters={"deep": {"aux_layer_ids": [9]}})
    refused(r"none.*not", drafter={"init_from": str(tmp_path / "none"), "aux_layer_ids": "none"})
    long = {"max_length": 513, "pack_length": 600}
    refused(r"data\.max_length 513 exceeds the context of .*, 512 tokens; set .* 512 or less", data=long)
    joined = {"join_share": 0.5, "join_length": 2048, "pack_length": 2048}
    refused(r"data\.join_length 2048 exceeds the context of .*, 512 tokens", data=joined)
    refused(r"a pack of 20000 tokens in float32 on cpu .*data\.pack_length = 16384", data={"pack_length": 20000})
    refused(r"cannot read .*none\.jsonl.*data\.held_out", data={"held_out": str(tmp_path / "none.jsonl")})
    refused(
        r"cannot write .*conversations\.jsonl is a file.*output\.folder", output={"folder": tables["data"]["files"][0]}
    )
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "index.json").write_text('{"key": {"target": "another"}}')
    cache = {"source": "cache", "folder": str(tmp_path / "cache")}
    refused(r"cache .* was made for target 'another' and this run has .*features\.folder", features=cache)
    assert not folder_of(tables).exists()


def test_answers_of_one_token_are_refused(tables: Tables, target: Target, tmp_path: Path) -> None:
    bare = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    place = tmp_path / "bare"
    target.model.save_pretrained(place)
    chat_tokenizer(bare).save_pretrained(place)
    tables["target"]["source"] = str(place)
    given = Path(conversations(tmp_path, lambda i: "!"))
    # Answers cut at a length end without a stop token.
    given.write_text(given.read_text().replace('{"messages"', '{"finished": false, "messages"'))
    with pytest.raises(UserError, match=r"answers of 15 conversations have at most one token each.*longer answers"):
        ran(tables, target)


def test_tokens_outside_the_targets_vocabulary_are_refused(tables: Tables, tmp_path: Path) -> None:
    place = tmp_path / "narrow"
    LlamaForCausalLM(tiny.target_config()).save_pretrained(place)
    chat_tokenizer(CHATML).save_pretrained(place)
    tables["target"]["source"] = str(place)
    with pytest.raises(UserError, match=r"token id 259 but the target's vocabulary ends at 95.*own tokenizer"):
        ran(tables, Target.load(str(place)))


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("eyas.train.resume.save_file", OSError(28, "No space left on device")),
        ("eyas.train.resume.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("eyas.drafter.checkpoint.save_file", OSError(28, "No space left on device")),
        ("eyas.drafter.checkpoint.save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
    ],
)
def test_a_full_disk_leaves_the_earlier_checkpoint(
    tables: Tables, target: Target, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tables, target, stop=stop_after(2))

    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as disk:
        disk.setattr(where, full)
        with pytest.raises(UserError, match=r"cannot write .*(step-000004|best/drafter): .*No space left.*free space"):
            ran(tables, target, resuming=True)
    checkpoints = folder_of(tables) / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000002"]
    assert ran(tables, target, resuming=True).step == STEPS


def test_a_damaged_checkpoint_is_named(tables: Tables, target: Target) -> None:
    ran(tables, target, stop=stop_after(1))
    place = folder_of(tables) / "checkpoints" / "step-000001"
    (place / "state" / "drafter.safetensors").write_bytes(b"garbage")
    with pytest.raises(UserError, match=r"checkpoint .*step-000001 cannot be read .* remove it"):
        ran(tables, target, resuming=True)
    (place / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"checkpoint .*step-000001 cannot be read .* remove it"):
        ran(tables, target, resuming=True)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path: Path) -> None:
    assert resume.newest(tmp_path / "nowhere") is None
    for name in ("step-999999", "step-1000000", "step-000002", "step-old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-2000000").write_text("a file")
    found = resume.newest(tmp_path)
    assert found == tmp_path / "step-1000000"
    assert resume.step_of(found) == 1000000


@pytest.mark.parametrize("name", ["best", "checkpoints", "encoded", "state", "tensorboard"])
def test_a_drafter_cannot_have_the_name_of_a_run_folder(tables: Tables, name: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be called '{name}'.*choose another"):
        read_recipe({**tables, "drafters": {name: {}}})
