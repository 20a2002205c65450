"""A recipe that exists is consistent; errors name the key, its value and what is allowed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from each import each
from eyas.errors import UserError
from eyas.train.recipe import DataSettings, DrafterSettings, LossName, OutputSettings, Recipe, TrainSettings
from eyas.train.recipe_file import load_recipe, read_recipe, to_toml

LEAST: dict[str, Any] = {"data": {"files": ["a.jsonl"]}, "output": {"folder": "runs/a"}}
LEAST_TOML = '[data]\nfiles = ["a.jsonl"]\n[output]\nfolder = "runs/a"\n'
TWO_TOML = LEAST_TOML + "[drafters.old]\nfc_norm = false\nnorm_output = false\n[drafters.new]\nlr = 3e-3\ndepths = 7\n"


def with_value(key: str, value: object) -> dict[str, Any]:
    """Minimal recipe with one value set."""
    tables: dict[str, Any] = {name: dict(table) for name, table in LEAST.items()}
    *path, last = key.split(".")
    table = tables
    for name in path:
        table = table.setdefault(name, {})
    table[last] = value
    return tables


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_minimal_recipe_has_files_and_a_folder(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, LEAST_TOML))
    assert recipe == Recipe(data=DataSettings(files=("a.jsonl",)), output=OutputSettings(folder="runs/a"))
    assert recipe.train == TrainSettings()
    assert (recipe.data.workers, recipe.data.max_bad_share) == (0, 0.05)


@each(("table", "key"), [("data", "files"), ("output", "folder")])
def test_a_required_key_is_named(table: str, key: str) -> None:
    with pytest.raises(UserError, match=rf"does not say {table}\.{key}; add {key} to \[{table}\]"):
        read_recipe({name: value for name, value in LEAST.items() if name != table})


@each(
    ("keys", "value", "message"),
    [
        ("features.top_k drafter.layers drafter.intermediate_size train.depths train.steps", 0, "at least 1"),
        ("train.packs_per_step train.chunk train.log_every train.eval_packs", 0, "at least 1"),
        ("data.join_share data.seed train.noise train.head_lr_scale train.weight_decay", -1, "at least 0"),
        ("train.final_lr train.eval_every train.save_every", -1, "at least 0"),
        ("train.gamma train.first_weight train.lr train.eps train.epochs", 0, "greater than 0"),
        ("data.held_out_share train.warmup", 1, "less than 1"),
        ("data.augment.no_bos train.decay", 2, "at most 1"),
        ("data.workers", 5000, "at most 1024"),
        ("data.max_length", 2, "at least 3"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_limit(keys: str, value: int, message: str) -> None:
    for key in keys.split():
        with pytest.raises(UserError, match=rf"{re.escape(key)} is {value}; it must be {message}"):
            read_recipe(with_value(key, value))


@each(
    ("key", "value", "message"),
    [
        ("target.source", " ", r"target\.source is empty"),
        ("target.dtype", "bfloat61", r"target\.dtype is 'bfloat61'; did you mean 'bfloat16'\?"),
        ("target.device", "gpu", r"target\.device is 'gpu'; it must be auto, cpu, cuda or cuda:N"),
        ("target.chat_template", "", r"target\.chat_template is empty"),
        ("data.files", [], r"data\.files is empty"),
        ("data.files", [""], r"data\.files\[0\] is empty"),
        ("data.max_length", 5000, r"max_length 5000 exceeds data\.pack_length 4096"),
        ("data.join_length", 5000, r"join_length 5000 exceeds data\.pack_length 4096"),
        ("data.join_share", 0.5, r"needs a data\.join_length of at least 2048, not 0"),
        ("features.source", "disk", r"features\.source is 'disk'; it must be 'live', 'served' or 'cache'"),
        ("features.source", "cache", r"no features\.folder"),
        ("features.dtype", "fp16", r"features\.dtype is 'fp16'; it must be 'bfloat16' or 'fp8'"),
        (
            "drafter.draft_vocab_size",
            0,
            r"drafter\.draft_vocab_size is 0; it must be a whole number from 1, .auto. or .none.",
        ),
        ("drafter.draft_vocab_size", "all", r"drafter\.draft_vocab_size is .all.; it must be a whole number from 1"),
        ("drafter.aux_layer_ids", [], r"drafter\.aux_layer_ids is \[\]"),
        ("drafter.aux_layer_ids", [5, 2], r"drafter\.aux_layer_ids is \[5, 2\]; it must be a list of ascending"),
        ("drafter.init_from", "", r"drafter\.init_from is empty"),
        ("train.loss", "cross-entropy", r"train\.loss is 'cross-entropy'; did you mean 'cross_entropy'\?"),
        (
            "train.loss",
            {"tv": 1.0},
            r"train\.loss is \{'tv': 1\.0\}; it must be one of .*, or a table of their weights",
        ),
        (
            "train.loss",
            {"kl": 0},
            r"train\.loss is \{'kl': 0\}; the weight of kl must be a number above 0, at most 1000",
        ),
        ("train.loss", {"kl": "much"}, r"the weight of kl must be a number"),
        ("train.loss", {"kl": float("nan")}, r"the weight of kl must be a number"),
        ("train.loss", {}, r"train\.loss is \{\}; it must be one of"),
        ("train.loss", ["kl"], r"train\.loss is \['kl'\]; it must be one of"),
        ("drafters.a.loss", {"kl": -1}, r"drafters\.a\.loss is \{'kl': -1\}; the weight of kl"),
        ("train.lr", float("nan"), r"train\.lr is nan; it must be a finite number"),
        ("train.betas", [0.9, 1.0], r"train\.betas\[1\] is 1\.0; it must be less than 1"),
        ("train.clip", float("inf"), r"train\.clip is inf; it must be a finite number"),
        ("train.schedule", "linear", r"train\.schedule is 'linear'; it must be 'cosine' or 'wsd'"),
        ("train.minutes", 0, r"train\.minutes is 0; it must be greater than 0 or \"none\""),
        ("train.precision", "float16", r"train\.precision is 'float16'; did you mean 'bfloat16'\?"),
        ("output.trackers", ["tensorbord"], r"output\.trackers\[0\] is 'tensorbord'; did you mean 'tensorboard'\?"),
        ("output.trackers", ["wandb", "wandb"], "each tracker once"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe(with_value(key, value))


def test_one_key_sets_the_length_of_a_run(tmp_path: Path) -> None:
    def lengths(*overrides: str, **train: object) -> tuple[object, ...]:
        keys = "".join(f"{key} = {value}\n" for key, value in train.items())
        settings = load_recipe(written(tmp_path, f"{LEAST_TOML}[train]\n{keys}"), overrides).train
        return settings.steps, settings.minutes, settings.epochs

    assert lengths() == (None, None, 1.0)
    assert lengths(steps=5) == (5, None, None)
    assert lengths(minutes=0.5) == (None, 0.5, None)
    assert lengths(steps='"none"', epochs=3) == (None, None, 3.0)
    with pytest.raises(UserError, match=r"train\.steps 5 and train\.minutes 2, but only one of them.*\"none\""):
        lengths(steps=5, minutes=2)
    # The command line overrides the file.
    assert lengths("train.minutes=30", steps=5) == (None, 30, None)
    assert lengths("train.steps=none", steps=5) == (None, None, 1.0)
    with pytest.raises(UserError, match="only one of them"):
        lengths("train.minutes=30", "train.epochs=1")


def test_warmup_and_decay_share_the_steps() -> None:
    with pytest.raises(UserError, match=r"train\.warmup 0\.6 and train\.decay 0\.6"):
        TrainSettings(schedule="wsd", warmup=0.6, decay=0.6)
    TrainSettings(schedule="cosine", warmup=0.6, decay=0.6)


@each(
    ("key", "value", "message"),
    [
        ("train.lr", "fast", r"train\.lr is 'fast'; it must be a valid number"),
        ("train.lr", True, r"train\.lr is True; it must be a valid number"),
        ("train.depths", 5.0, r"train\.depths is 5\.0; it must be a valid integer"),
        ("train.depths", True, r"train\.depths is True; it must be a valid integer"),
        ("train.compile", 1, r"train\.compile is 1; it must be a valid boolean"),
        ("train.steps", "many", r"train\.steps is 'many'; it must be a valid integer or \"none\""),
        ("train.betas", [0.9], r"train\.betas is \[0\.9\]; it must be a list of 2 numbers"),
        ("train.betas", [0.9] * 3, r"train\.betas is \[0\.9, 0\.9, 0\.9\]; it must be a list of 2 numbers"),
        ("train.betas", [0.9, "x"], r"train\.betas\[1\] is 'x'; it must be a valid number"),
        ("target.chat_template_kwargs", 5, r"target\.chat_template_kwargs is 5; it must be a table"),
        ("target.raw", 1, r"target\.raw is 1; it must be a valid boolean"),
        ("data.files", "a.jsonl", r"data\.files is 'a\.jsonl'; it must be a list"),
        ("data.files", [1], r"data\.files\[0\] is 1; it must be a valid string"),
        ("data.augment", 0.1, r"data\.augment is 0\.1; it must be a table"),
        ("data.augment.no_bos", "all", r"data\.augment\.no_bos is 'all'"),
        ("drafter.aux_layer_ids", [1.5], r"aux_layer_ids\[0\] is 1\.5; it must be a valid integer$"),
        ("output.folder", 3, r"output\.folder is 3; it must be a valid string"),
        ("train", 5, r"train is 5; it must be a table: write \[train\]"),
        ("drafters", 5, r"drafters is 5; .* \[drafters\.NAME\]"),
        ("drafters.a", 5, r"drafters\.a is 5; .* \[drafters\.a\]"),
        ("drafters.a.lr", "fast", r"drafters\.a\.lr is 'fast'; it must be a valid number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe(with_value(key, value))


@each(
    ("key", "message"),
    [
        ("tain.lr", r"the recipe has no key 'tain'; did you mean 'train'\?"),
        ("lr", r"the recipe has no key 'lr'; it belongs in \[train\]"),
        ("train.warmpu", r"\[train\] has no key 'warmpu'; did you mean 'warmup'\?"),
        ("train.zzz", r"\[train\] has no key 'zzz'; known are depths, gamma"),
        ("train.layers", r"\[train\] has no key 'layers'; it belongs in \[drafter\]"),
        ("target.seed", r"\[target\] has no key 'seed'; it belongs in \[data\] or \[train\]"),
        ("data.no_bos", r"\[data\] has no key 'no_bos'; it belongs in \[data\.augment\]"),
        ("data.augment.nobos", r"\[data\.augment\] has no key 'nobos'; did you mean 'no_bos'\?"),
        ("drafters.a.layer", r"\[drafters\.a\] has no key 'layer'; did you mean 'layers'\?"),
        ("train.checkpoint", r"\[train\] has no key 'checkpoint'; it is called 'activation_checkpointing' now"),
        ("drafters.a.schedule", r"\[drafters\.a\] has no key 'schedule'; it belongs in \[train\]"),
    ],
)
def test_an_unknown_key_is_refused_with_its_table_and_the_nearest(key: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe(with_value(key, 1))


@each("name", ["a b", "../x", "", "-x", "a.b"])
def test_a_drafters_name_must_be_a_folder_name(name: str) -> None:
    with pytest.raises(UserError, match="cannot be called"):
        read_recipe({**LEAST, "drafters": {name: {}}})


@each(
    ("override", "table", "key", "value"),
    [
        ("train.lr=2e-3", "train", "lr", 2e-3),
        ("train.lr = 1", "train", "lr", 1.0),
        ("train.steps=100", "train", "steps", 100),
        ("train.steps=none", "train", "steps", None),
        ("train.compile=true", "train", "compile", True),
        ("train.loss=kl", "train", "loss", "kl"),
        ('train.loss="kl"', "train", "loss", "kl"),
        ("train.betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
        ("data.files=['x.jsonl', 'y.parquet']", "data", "files", ("x.jsonl", "y.parquet")),
        ("data.held_out=runs/held=out.jsonl", "data", "held_out", "runs/held=out.jsonl"),
        ("drafter.aux_layer_ids=[1,2,3]", "drafter", "aux_layer_ids", (1, 2, 3)),
        ("target.source=org/name-1.5", "target", "source", "org/name-1.5"),
        ("output.folder=2025-03-01", "output", "folder", "2025-03-01"),
    ],
)
def test_an_override_sets_its_value(tmp_path: Path, override: str, table: str, key: str, value: object) -> None:
    recipe = load_recipe(written(tmp_path, LEAST_TOML), [override])
    assert getattr(getattr(recipe, table), key) == value


def test_overrides_reach_nested_tables_and_drafters_and_the_last_one_counts(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_TOML)
    recipe = load_recipe(path, ["data.augment.no_bos=0.1", "drafters.new.lr=1e-2", "train.lr=1", "train.lr=2e-3"])
    assert recipe.data.augment.no_bos == 0.1
    assert {own.name: own.train.lr for own in recipe.drafter_recipes()} == {
        "old": 2e-3,
        "new": 1e-2,
    }


@each(
    ("override", "message"),
    [
        ("train.lr", "not of the form"),
        ("train.lr=", "not of the form"),
        ("=1", "not of the form"),
        ("train..lr=1", "not of the form"),
        ("train.betas=[0.9", r"the value is not TOML"),
        ("train.lr=1\nsteps=2", "several lines"),
        ("train.lrr=1", r"\[train\] has no key 'lrr'; did you mean 'lr'\?"),
        ("trian.lr=1", r"no key 'trian'; did you mean 'train'\?"),
        ("data.files.x=1", r"data\.files is a value and not a table"),
        ("train.lr=quick", r"train\.lr is 'quick'; it must be a valid number"),
        ("drafters.knew.lr=1", r"\[drafters\] of the recipe has no key 'knew'; did you mean 'new'\?"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(written(tmp_path, TWO_TOML), [override])


def test_an_override_does_not_add_a_drafter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \[drafters\.a\]"):
        load_recipe(written(tmp_path, LEAST_TOML), ["drafters.a.lr=1e-3"])


def test_without_named_drafters_there_is_one() -> None:
    (only,) = read_recipe(LEAST).drafter_recipes()
    assert (only.name, only.drafter, only.train) == ("drafter", DrafterSettings(), TrainSettings())


def test_named_drafters_override_shared_settings(tmp_path: Path) -> None:
    shared = "[drafter]\ndraft_vocab_size = 100\n[drafters.whole]\ndraft_vocab_size = 'none'\n"
    old, new, whole = load_recipe(written(tmp_path, TWO_TOML + shared)).drafter_recipes()
    assert (old.name, new.name, whole.name) == ("old", "new", "whole")
    assert old.drafter == DrafterSettings(fc_norm=False, norm_output=False, draft_vocab_size=100)
    assert new.drafter == DrafterSettings(draft_vocab_size=100)
    assert whole.drafter == DrafterSettings(draft_vocab_size=None)
    assert [(c.train.lr, c.train.depths) for c in (old, new, whole)] == [(1e-3, 5), (3e-3, 7), (1e-3, 5)]


FULL: dict[str, Any] = {
    "target": {
        "source": 'a "quoted" \\ näme\x7f',
        "device": "cuda:1",
        "chat_template": "{{ messages }}\n",
        "chat_template_kwargs": {"enable_thinking": False, "odd key": [{"a.b": 1}], "deep": {"x y": {"z": "w"}}},
    },
    "data": {
        "files": ["a.jsonl", "b\tc.parquet"],
        "held_out": "h.jsonl",
        "join_share": 0.25,
        "join_length": 4096,
        "augment": {"no_system": 0.1, "varied_system": 0.5},
    },
    "features": {"source": "live", "folder": "cache", "dtype": "fp8"},
    "drafter": {"aux_layer_ids": [2, 15, 27], "init_from": "old"},
    "train": {"eps": 1e-12, "steps": 10, "betas": [0, 0.5], "schedule": "wsd"},
    "drafters": {"a": {"lr": 1, "aux_layer_ids": "none", "loss": "kl"}, "b": {}},
    "output": {"folder": "out", "trackers": ["wandb", "trackio"]},
}


@each("tables", [LEAST, FULL])
def test_a_printed_recipe_reads_back_the_same(tmp_path: Path, tables: dict[str, Any]) -> None:
    recipe = read_recipe(tables)
    text = to_toml(recipe)
    assert load_recipe(written(tmp_path, text)) == recipe
    assert to_toml(load_recipe(written(tmp_path, text))) == text


def test_raw_text_has_no_template() -> None:
    with pytest.raises(UserError, match=r"target\.raw and target\.chat_template are two ways"):
        read_recipe({**LEAST, "target": {"raw": True, "chat_template": "chat.jinja"}})


def test_every_value_is_resolved_and_printed() -> None:
    recipe = read_recipe(LEAST)
    assert set(recipe.resolved()["train"]) == set(TrainSettings.model_fields)
    assert recipe.resolved()["data"]["augment"]["no_bos"] == 0.0
    assert recipe.resolved()["data"]["held_out"] is None
    assert 'held_out = "none"' in to_toml(recipe)


@each(
    ("content", "message"),
    [(b"[train\n", "is not TOML"), (b"\xff\xfe", "is not UTF-8"), (None, "cannot read the recipe")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_recipe(path)


def test_a_mixture_of_losses_survives_printing_and_overrides(tmp_path: Path) -> None:
    mixed = "[drafters.mixed]\nloss = { cross_entropy = 0.1, total_variation = 0.9 }\nnoise = 0.1\nseed = 2\n"
    path = written(tmp_path, LEAST_TOML + mixed + "[drafters.plain]\nfirst_weight = 3\n")
    recipe = load_recipe(path, ["train.loss={kl = 1, acceptance = 2}"])
    own, plain = (drafter.train for drafter in recipe.drafter_recipes())
    assert own.loss == {"cross_entropy": 0.1, "total_variation": 0.9}
    assert (own.noise, own.seed, own.first_weight) == (0.1, 2, 1.0)
    assert plain.loss == {"kl": 1.0, "acceptance": 2.0}
    assert (plain.noise, plain.seed, plain.first_weight) == (0.0, 0, 3.0)
    assert load_recipe(written(tmp_path, to_toml(recipe))) == recipe


def test_losses_are_those_that_training_knows() -> None:
    from eyas.train import loss

    assert set(get_args(LossName)) == set(loss.LOSSES)


def test_reading_a_recipe_needs_no_torch() -> None:
    code = "import sys, eyas.train.recipe; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
