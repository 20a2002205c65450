"""Broken input is refused in one line that names the value, the limit and the fix; nothing is touched or left."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from each import each
from eyas.drafter.check import check
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.drafter.layer_json import IDS_KEY
from eyas.drafter.layouts import LAYOUTS
from eyas.errors import UserError
from tiny import drafter_config, random_drafter

Run = Callable[..., Any]
Save = Callable[..., Path]
Contents = Callable[[Path], dict[str, bytes]]
Break = Callable[[Path], None]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


# --- ways to break a folder ------------------------------------------------------------------------------------


def remove(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data) and None


def config_is_a_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def weights_are_a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def only_a_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "weights.pt")


def no_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


class Touches:
    """Its pickle makes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(make: Callable[[Path], Any]) -> Break:
    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        torch.save(make(folder), folder / "pytorch_model.bin")

    return apply


def cut_off(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def index(text: str) -> Break:
    return write("model.safetensors.index.json", text.encode())


def configure(*, drop: tuple[str, ...] = (), **changes: Any) -> Break:
    def apply(folder: Path) -> None:
        raw = {key: value for key, value in json.loads((folder / CONFIG).read_text()).items() if key not in drop}
        (folder / CONFIG).write_text(json.dumps({**raw, **changes}))

    return apply


def configure_layer(**changes: Any) -> Break:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / CONFIG).read_text())
        raw["transformer_layer_config"] |= changes
        (folder / CONFIG).write_text(json.dumps(raw))

    return apply


def tensors(change: Callable[[dict[str, Tensor]], None]) -> Break:
    def apply(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS)

    return apply


def without(name: str) -> Break:
    return tensors(lambda stored: stored.__delitem__(name))


def put(name: str, value: Tensor | Callable[[dict[str, Tensor]], Tensor]) -> Break:
    return tensors(lambda stored: stored.update({name: value(stored) if callable(value) else value}))


def prefixed(stored: dict[str, Tensor]) -> None:
    for name in list(stored):
        stored[f"model.{name}"] = stored.pop(name)


def twice(stored: dict[str, Tensor]) -> None:
    stored["layers.0.hidden_norm.weight"] = stored["midlayer.hidden_norm.weight"] + 1


V31 = {"fc_norm": True, "norm_output": True}
PRUNED = {"draft_vocab_size": 32}
SPECULATORS = {"layout": "speculators"}
TARGET_CONFIG = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
Q_PROJ = "midlayer.self_attn.q_proj.weight"

# name: how the drafter is made, how it is broken, what the line must name
FOLDERS: dict[str, tuple[dict[str, Any], Break, tuple[str, ...]]] = {
    "no config": ({}, remove(CONFIG), ("has no config.json", "holds config.json and")),
    "config is not JSON": ({}, write(CONFIG, b"{'a': 1,}"), ("not valid JSON", "line 1 column 2", "mend it")),
    "config is not text": ({}, write(CONFIG, b"\xff\xfe\x00"), ("not valid JSON", "mend it")),
    "config is empty": ({}, write(CONFIG, b""), ("not valid JSON", "mend it")),
    "config is a list": ({}, write(CONFIG, b"[1]"), ("holds a list", "must be an object", "mend it")),
    "config is a folder": ({}, config_is_a_folder, ("cannot read", "Is a directory", "check the file")),
    "a target": ({}, write(CONFIG, TARGET_CONFIG), ("['LlamaForCausalLM']", "LlamaForCausalLMEagle3", "Is this path")),
    "no architectures": ({}, configure(drop=("architectures",)), ("architectures None", "LlamaForCausalLMEagle3")),
    "latent attention over llama layers": (
        {},
        configure(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        ("Eagle3DeepseekV2ForCausalLM", "'llama'", "deepseek_v2", "write what the drafter was trained as"),
    ),
    "qwen3 over llama layers": (
        {},
        configure(model_type="qwen3"),
        ("'qwen3'", "LlamaForCausalLMEagle3", "write what the drafter was trained as"),
    ),
    "no weights": ({}, remove(WEIGHTS), ("has no *.safetensors", "its weights")),
    "pickle only": ({}, only_a_pickle, ("weights.pt", "can run code", "save with safetensors")),
    "pytorch_model.bin is none": ({}, no_pickle, ("pytorch_model.bin", "is damaged", "fetch it again")),
    "pytorch_model.bin of code": (
        {},
        pickled(lambda folder: {"fc.weight": Touches(folder / "touched")}),
        ("holds more than tensors", "could run code", "save its tensors with safetensors"),
    ),
    "pytorch_model.bin of a list": ({}, pickled(lambda _: [torch.zeros(1)]), ("holds a list", "export the drafter")),
    "pytorch_model.bin of a nest": (
        {},
        pickled(lambda _: {"model": {"fc.weight": torch.zeros(1)}}),
        ("model in", "is a dict and no tensor", "save the weights alone"),
    ),
    "weights cut off": ({}, cut_off, ("damaged or cut off", "bytes", "export it again")),
    "weights are garbage": ({}, write(WEIGHTS, b"garbage" * 100), ("damaged or cut off (700 bytes", "again")),
    "weights are empty": ({}, write(WEIGHTS, b""), ("(0 bytes", "export it again")),
    "weights are a folder": ({}, weights_are_a_folder, (WEIGHTS, "check the file")),
    "index names a missing shard": (
        {},
        index('{"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}'),
        ("lacks model-00001-of-00002.safetensors", "fetch it again"),
    ),
    "index is not JSON": ({}, index("{"), ("not a safetensors index", "again")),
    "index has no map": ({}, index("{}"), ("not a safetensors index", "weight_map", "again")),
    "index of numbers": ({}, index('{"weight_map": {"a": 1, "b": "c"}}'), ("lacks 1, c", "fetch it again")),
    "no fc": ({}, without("fc.weight"), ("fc.weight is missing", "[64, 192]", "export the drafter again")),
    "no fc_norm.1": (V31, without("fc_norm.1.weight"), ("fc_norm.1.weight is missing", "[64]", "export the drafter")),
    "no q_proj": ({}, without(Q_PROJ), ("layers.0.self_attn.q_proj.weight is missing", "[64, 128]", "export the")),
    "no norm": ({}, without("norm.weight"), ("tensor norm.weight is missing", "[64]", "export the drafter again")),
    "wrong shape": ({}, put("fc.weight", torch.zeros(64, 191)), ("[64, 191]", "expected [64, 192]", "correct config")),
    "whole numbers as weights": (
        {},
        put("fc.weight", torch.zeros(64, 192, dtype=torch.int8)),
        ("fc.weight is int8", "BF16 or F16 or F32", "convert it"),
    ),
    "float d2t": (PRUNED, put("d2t", torch.zeros(32)), ("d2t is F32", "expected I64", "convert it")),
    "t2d of numbers": (PRUNED, put("t2d", torch.zeros(96)), ("t2d is F32", "expected BOOL", "convert it")),
    "unknown tensor": ({}, put("extra.weight", torch.zeros(3)), ("extra.weight [3]", "not part", "remove it")),
    "model. prefix": ({}, tensors(prefixed), ("is missing", "more; see `eyas check")),
    "a tensor twice": ({}, tensors(twice), ("hidden_norm.weight", "twice with different values", "keep one")),
    "fc_norm beside a false flag": (V31, configure(fc_norm=False), ("fc_norm.0.weight", "fc_norm is false", "to true")),
    "input_norm beside a false flag": (
        {"norm_before_fc": True},
        configure(norm_before_fc=False),
        ("input_norm.weight [192]", "norm_before_fc is false", "set it to true"),
    ),
    "no d2t": (PRUNED, without("d2t"), ("d2t is missing", "32 is below vocab_size 96", "export the drafter again")),
    "d2t out of range": (
        PRUNED,
        put("d2t", lambda stored: stored["d2t"].index_fill(0, torch.tensor([31]), 65)),
        ("target id 96", "0..95", "rebuild d2t"),
    ),
    "d2t absolute": (
        PRUNED,
        put("d2t", lambda stored: stored["d2t"] + torch.arange(32)),
        ("absolute target ids", "must hold offsets", "subtract arange"),
    ),
    "d2t with doubles": (
        PRUNED,
        put("d2t", lambda _: torch.arange(32).flip(0)),
        ("31 draft ids", "must be unique", "rebuild d2t"),
    ),
    "d2t of a full vocabulary": (
        {},
        put("d2t", torch.zeros(96, dtype=torch.int64)),
        ("d2t [96]", "equals vocab_size 96", "remove it"),
    ),
    "t2d disagrees": (
        PRUNED,
        put("t2d", lambda stored: ~stored["t2d"]),
        ("disagrees with d2t on 96 target ids", "rebuild t2d"),
    ),
    "weights of NaN": (
        {},
        put("norm.weight", torch.full((64,), math.nan)),
        ("norm.weight holds 64 values", "not finite", "use an earlier step"),
    ),
    "ids unsorted": (
        {},
        configure(**{IDS_KEY: [3, 1, 2]}, eagle_config={}),
        ("[3, 1, 2]", "not strictly ascending", "sort the ids"),
    ),
    "ids contradict": (
        {},
        configure(eagle_config={IDS_KEY: [1, 2, 4]}),
        ("[1, 2, 3] at top level but [1, 2, 4]", "in both"),
    ),
    "ids are words": ({}, configure(**{IDS_KEY: ["a"]}), ("['a']", "whole numbers", "correct it")),
    "id below zero": ({}, configure(**{IDS_KEY: [-2, 1, 2]}, eagle_config={}), ("[-2, 1, 2]", "from 0", "correct")),
    "number of states": ({}, configure(num_aux_hidden_states=4), ("[1, 2, 3]", "num_aux_hidden_states is 4", "agree")),
    "unknown key": ({}, configure(norm_ouput=True), ("'norm_ouput'", "value True", "did you mean 'norm_output'?")),
    "unknown eagle_config key": (
        {},
        configure(eagle_config={"use_aux_hidden_states": True}),
        ("'use_aux_hidden_states' in eagle_config", "did you mean 'use_aux_hidden_state'?"),
    ),
    "eagle_config is a list": ({}, configure(eagle_config=[1]), ("eagle_config is [1]", "object or absent")),
    "last state only": (
        {},
        configure(eagle_config={"use_aux_hidden_state": False}),
        ("use_aux_hidden_state is False", "behind the target's last state", "use one"),
    ),
    "gelu": ({}, configure(hidden_act="gelu"), ("'gelu'", "'silu'", "use such a one")),
    "quantised": (
        {},
        configure(quantization_config={"bits": 4}),
        ("quant_method None", "compressed-tensors", "bfloat16"),
    ),
    "dynamic rope": (
        {},
        configure(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        ("'dynamic'", "default, linear, llama3, yarn", "re-express"),
    ),
    "rope without its factor": ({}, configure(rope_parameters={"rope_type": "linear"}), ("'linear' lacks", "add it")),
    "rope is a word": ({}, configure(rope_parameters="yarn"), ("rope_parameters is 'yarn'", "must be an object")),
    "sliding attention": (
        {},
        configure(layer_types=["sliding_attention"]),
        ("sliding_attention", "'full_attention'", "use such a one"),
    ),
    "draft vocabulary too large": (
        {},
        configure(draft_vocab_size=97),
        ("draft_vocab_size 97", "vocab_size 96", "at most that"),
    ),
    "no hidden_size": ({}, configure(drop=("hidden_size",)), ("lacks hidden_size", "add what")),
    "width of zero": ({}, configure(hidden_size=0), ("hidden_size is 0", "whole number from 1", "correct it")),
    "a billion layers": (
        {},
        configure(num_hidden_layers=10**9),
        ("num_hidden_layers is 1000000000", "from 1 to 256", "correct it"),
    ),
    "heads as a word": (
        {},
        configure(drop=("head_dim",), num_attention_heads="two"),
        ("num_attention_heads is 'two'", "whole number from 1", "correct it"),
    ),
    "heads do not divide": ({}, configure(num_key_value_heads=3), ("2 is not a multiple", "3", "correct one")),
    "eps of infinity": ({}, configure(rms_norm_eps=math.inf), ("rms_norm_eps is inf", "above 0", "correct it")),
    "unknown dtype": ({}, configure(torch_dtype="int4"), ("'int4'", "bfloat16", "set it")),
    "flag as a word": ({}, configure(fc_norm="yes"), ("fc_norm is 'yes'", "true or false", "config.json")),
    "provenance is a word": ({}, configure(eyas_source="me"), ("eyas_source is 'me'", "object", "remove it")),
    "no embeddings at another width": (
        {"hidden_size": 32, "shipped": True},
        without("embed_tokens.weight"),
        ("embed_tokens.weight is missing", "[96, 32]", "export the drafter with its own"),
    ),
    "no head of a pruned vocabulary": (
        PRUNED,
        without("lm_head.weight"),
        ("lm_head.weight is missing", "[32, 64]", "export the drafter with its own"),
    ),
    "speculators without norm_before_residual": (
        SPECULATORS,
        configure(drop=("norm_before_residual",)),
        ("norm_before_residual is missing", "vLLM would assume true", "write the value"),
    ),
    "speculators with norm_before_residual null": (
        SPECULATORS,
        configure(norm_before_residual=None),
        ("norm_before_residual is missing", "write the value"),
    ),
    "speculators of another kind": (
        SPECULATORS,
        configure(speculators_model_type="hydra"),
        ("'hydra'", "'eagle3'", "use such a one"),
    ),
    "speculators without a layer": (
        SPECULATORS,
        configure(transformer_layer_config=None),
        ("transformer_layer_config is None", "as an object", "export it again"),
    ),
    "speculators of qwen3 without its norms": (
        SPECULATORS,
        configure_layer(model_type="qwen3"),
        ("self_attn.q_norm.weight is missing", "export the drafter again"),
    ),
    "speculators with an unknown key": (
        SPECULATORS,
        configure_layer(attention_biases=True),
        ("'attention_biases' in transformer_layer_config", "did you mean 'attention_bias'?"),
    ),
}


@each("name", FOLDERS)
def test_convert_refuses_a_broken_drafter(run: Run, save: Save, name: str, tmp_path: Path, contents: Contents) -> None:
    made, damage, parts = FOLDERS[name]
    broken = save(inside=tmp_path, **made)
    damage(broken)
    before = contents(tmp_path)
    run("convert", broken, "--out", tmp_path / "deep" / "out", "--to", "vllm").assert_refused(str(broken), *parts)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [broken.name]


@each("name", FOLDERS)
def test_check_finds_a_broken_drafter(run: Run, save: Save, name: str, tmp_path: Path, contents: Contents) -> None:
    made, damage, parts = FOLDERS[name]
    broken = save(inside=tmp_path, **made)
    damage(broken)
    before = contents(tmp_path)
    outcome = run("check", broken)
    if outcome.out:
        errors = [line for line in outcome.out.splitlines() if line.startswith("error")]
        parts = tuple(part for part in parts if not part.startswith("more; see"))
        assert any(all(part in line for part in parts) for line in errors), outcome.out
        assert (outcome.code, outcome.err) == (2, "")
        assert outcome.out.splitlines()[-1].startswith("verdict      will NOT work")
    else:
        outcome.assert_refused(*parts)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("made", [{}, V31, PRUNED, SPECULATORS, {"hidden_size": 32, "shipped": True}], ids=str)
def test_the_same_drafters_unbroken_are_taken(run: Run, save: Save, tmp_path: Path, made: dict[str, Any]) -> None:
    folder = save(**made)
    assert run("check", folder).code == 0
    assert run("convert", folder, "--out", tmp_path / "out", "--to", "vllm").code == 0


def test_a_prefix_is_named_with_its_fix(run: Run, save: Save) -> None:
    folder = save()
    tensors(prefixed)(folder)
    errors = [line for line in run("check", folder).out.splitlines() if "model.fc.weight" in line]
    assert len(errors) == 1
    assert "no 'model.' prefix: strip it" in errors[0]


# --- sources that are no folder --------------------------------------------------------------------------------


@each("command", ["check", "convert"])
@each(
    ("source", "parts"),
    [
        ("./nowhere", ("./nowhere does not exist", "give a drafter's folder or a hub id")),
        ("nowhere", ("nowhere does not exist", "give a drafter's folder")),
        ("/no/such/folder", ("/no/such/folder does not exist", "give a drafter's folder")),
        ("a-file", ("a-file is a file", "give the folder")),
        ("a-file/inside", ("a-file/inside", "give a folder")),
        ("x" * 300, ("File name too long", "check the path")),
        ("nobody-at-all/no-such-drafter", ("nobody-at-all/no-such-drafter", "the hub", "give a folder")),
    ],
)
def test_a_source_that_is_no_folder_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, source: str, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "a-file").write_text("text")
    more = ["--out", "out", "--to", "vllm"] if command == "convert" else []
    run(command, source, *more).assert_refused(*parts)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


# --- pairs that do not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        ({"aux_layer_ids": (1, 2, 5)}, ("layer id 5", "0..4", "choose that one")),
        ({"vocab_size": 95, "draft_vocab_size": 95}, ("vocab_size 95", "target's 96", "choose that one")),
        (
            {"hidden_size": 32, "target_hidden_size": 32},
            ("target_hidden_size 32", "target's hidden_size 64", "choose that one"),
        ),
    ],
    ids=["ids outside", "vocabulary", "width"],
)
def test_a_drafter_of_another_target_is_an_error(
    run: Run, save: Save, target: Path, made: dict[str, Any], parts: tuple[str, ...]
) -> None:
    outcome = run("check", save(shipped=True, **made), "--target", target)
    errors = [line for line in outcome.out.splitlines() if line.startswith("error")]
    assert (outcome.code, outcome.err, len(errors)) == (2, "", 1)
    assert all(part in errors[0] for part in parts), errors
    assert f"will NOT work with {target}" in outcome.out


@pytest.mark.parametrize(
    ("name", "parts"),
    [("nowhere/at/all", ("nowhere/at/all", "check the path")), ("drafter/config.json", ("is a file", "give a model"))],
)
def test_a_target_that_is_none_is_refused(
    run: Run, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    run("check", save(), "--target", name).assert_refused(*parts)


def test_a_target_with_damaged_weights_is_refused(run: Run, save: Save, target: Path) -> None:
    (target / WEIGHTS).write_bytes(b"garbage" * 100)
    run("check", save(shipped=True), "--target", target).assert_refused(WEIGHTS, "fetch or export the target again")


# --- destinations and formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "layout", "parts"),
    [
        ({"norm_before_residual": True}, "sglang", ("norm_before_residual is true", "SGLang", "serve it with vLLM")),
        ({"attention_bias": True}, "sglang", ("attention_bias is true", "serve it with vLLM")),
        ({"logit_scale": 2.0}, "sglang", ("logit_scale is 2.0", "serve with vLLM")),
        ({**V31, "norm_before_fc": True}, "speculators", ("fc_norm and norm_before_fc", "one of them", "--to vllm")),
        ({"hidden_size": 32, "shipped": True}, "speculators", ("hidden_size 32", "needs them equal", "--to vllm")),
    ],
)
def test_convert_refuses_what_the_format_cannot_say(
    run: Run, save: Save, tmp_path: Path, contents: Contents, made: dict[str, Any], layout: str, parts: tuple[str, ...]
) -> None:
    source = save(**made)
    before = contents(tmp_path)
    run("convert", source, "--out", tmp_path / "deep" / "out", "--to", layout).assert_refused(*parts)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize(
    ("destination", "reason"),
    [("a-file/out", "Not a directory"), ("a-file/deep/out", "Not a directory"), ("x" * 300, "File name too long")],
)
def test_convert_names_a_destination_that_cannot_be(
    run: Run, save: Save, tmp_path: Path, contents: Contents, destination: str, reason: str
) -> None:
    source = save()
    (tmp_path / "a-file").write_text("text")
    before = contents(tmp_path)
    outcome = run("convert", source, "--out", tmp_path / destination, "--to", "vllm")
    outcome.assert_refused(destination, "cannot write", reason, "choose another destination")
    assert contents(tmp_path) == before


def test_convert_names_a_parent_that_cannot_be_written(
    run: Run, save: Save, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    source = save()
    before = contents(tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", forbidden)
    outcome = run("convert", source, "--out", tmp_path / "deep" / "out", "--to", "vllm")
    outcome.assert_refused("deep/out", "Permission denied", "choose another destination")
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a limit on file sizes")
def test_a_full_disk_leaves_nothing_behind(save: Save, tmp_path: Path, contents: Contents) -> None:
    """For real: the system refuses to let files grow."""
    source, destination = save(), tmp_path / "deep" / "out"
    before = contents(tmp_path)
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from eyas.cli.app import main; main()"
    )
    arguments = ["convert", str(source), "--out", str(destination), "--to", "sglang"]
    done = subprocess.run([sys.executable, "-B", "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    assert done.stderr.startswith(f"eyas: cannot write {destination}: ")
    assert "File too large" in done.stderr
    assert "free space or choose another destination" in done.stderr
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


# --- every value of every key ----------------------------------------------------------------------------------

VALUES = (None, "x", "", [], ["x"], [[1]], {}, {"x": 1}, -1, 0, 1.5, True, math.inf, math.nan, 10**400)


def mutations(raw: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The same config with one value replaced or removed, at every depth."""
    for key, value in raw.items():
        yield (*path, key, "absent"), {k: v for k, v in raw.items() if k != key}
        for other in VALUES:
            yield (*path, key, repr(other)), {**raw, key: other}
        if isinstance(value, dict):
            for where, inner in mutations(value, (*path, key)):
                yield where, {**raw, key: inner}


def taken_whole(folder: Path, raw: dict[str, Any]) -> bool:
    """Whether a folder can be checked and its config written in some format; refusals are UserErrors."""
    try:
        report = check(str(folder))
    except UserError:
        return False
    json.dumps(report.as_json())
    config, extras = LAYOUTS[report.layout].read_config(raw)
    for layout in LAYOUTS.values():
        with suppress(UserError):
            layout.write_config(config, extras)
    return True


@each("layout", ["vllm", "sglang", "speculators"])
def test_no_value_in_a_config_leads_to_anything_but_a_line(tmp_path: Path, layout: str) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    config = drafter_config(rope_parameters=yarn, num_hidden_layers=2)
    source = {"eyas_source": {"speculators_config": {"verifier": {}}}, "bos_token_id": 1, "layer_types": []}
    folder = tmp_path / "it"
    write_checkpoint(checkpoint_of(random_drafter(config)), folder, layout=layout)
    raw = LAYOUTS[layout].write_config(config, source)
    outcomes = []
    for where, changed in mutations(raw):
        (folder / CONFIG).write_text(json.dumps(changed))
        try:
            outcomes.append(taken_whole(folder, changed))
        except Exception as error:
            pytest.fail(f"{where}: {error!r}")
    assert 100 < sum(outcomes) < len(outcomes) - 100
