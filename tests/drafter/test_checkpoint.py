"""Drafters on disk: conversions lose nothing, formats have what their readers need, writes are whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_folders import config_of, contents, edit
from each import each
from eyas.atomic import new_folder
from eyas.drafter import checkpoint as checkpoint_module
from eyas.drafter.checkpoint import (
    Checkpoint,
    checkpoint_of,
    is_explicit,
    load_drafter,
    read_checkpoint,
    vllm_folder,
    write_checkpoint,
)
from eyas.drafter.layer_json import IDS_KEY, NORM_FLAGS
from eyas.errors import UserError
from oracle.dense import DenseAttention
from tiny import drafter_config, random_drafter

V31 = {"fc_norm": True, "norm_output": True}
TWO = {"num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle31": V31,
    "norm_before_fc": {"norm_before_fc": True, "norm_output": True},
    "pruned": {"draft_vocab_size": 32, **V31},
    "two_layers": TWO,
    "two_layers_without_ids": {**TWO, "aux_layer_ids": None},
    "one_state": {"num_aux_hidden_states": 1, "aux_layer_ids": (0,)},
    "five_states_without_ids": {"num_aux_hidden_states": 5, "aux_layer_ids": None},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
PROVENANCE = {
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    },
    "speculators_version": "0.4.0",
    "embed_requires_grad": False,
}


def checkpoint(*, extras: dict[str, Any] | None = None, shipped: bool = False, **changes: Any) -> Checkpoint:
    config = drafter_config(**changes)
    drafter = random_drafter(config, own_embedding=shipped).to(getattr(torch, config.dtype))
    return replace(checkpoint_of(drafter), extras=extras or {})


def save(folder: Path, layout: str = "vllm", **options: Any) -> Path:
    write_checkpoint(checkpoint(**options), folder, layout=layout)
    return folder


def convert(source: Path, destination: Path, layout: str) -> Path:
    write_checkpoint(read_checkpoint(str(source)), destination, layout=layout)
    return destination


# --- round trips -----------------------------------------------------------------------------------------------


@each("middle", ["sglang", "speculators", "vllm"])
@each("kind", KINDS)
@each("dtype", ["float32", "bfloat16"])
def test_a_round_trip_gives_the_same_bytes(tmp_path: Path, kind: str, middle: str, dtype: str) -> None:
    first = save(tmp_path / "first", dtype=dtype, **KINDS[kind])
    there = convert(first, tmp_path / "there", middle)
    back = convert(there, tmp_path / "back", "vllm")
    assert contents(back) == contents(first)
    assert contents(first).keys() == {"config.json", "model.safetensors"}
    spelt_alike = middle == "vllm" or (middle, kind) == ("sglang", "five_states_without_ids")
    assert (contents(there) == contents(first)) == spelt_alike


@each("middle", ["sglang", "speculators"])
@each(
    "options",
    [
        {"shipped": True},
        {"extras": {"transformers_version": "4.57.0", "bos_token_id": 1, "use_cache": True, "pretraining_tp": 1}},
        {"extras": {"eyas_source": PROVENANCE}},
        {"dtype": "float16"},
    ],
)
def test_a_round_trip_loses_no_extras(tmp_path: Path, middle: str, options: dict[str, Any]) -> None:
    first = save(tmp_path / "first", **options)
    back = convert(convert(first, tmp_path / "there", middle), tmp_path / "back", "vllm")
    assert contents(back) == contents(first)
    assert options.get("extras", {}).items() <= config_of(back).items()


@each("middle", ["sglang", "vllm"])
@each("kind", ["eagle31", "pruned", "two_layers"])
def test_a_round_trip_from_speculators_keeps_what_only_speculators_knows(
    tmp_path: Path, middle: str, kind: str
) -> None:
    first = save(tmp_path / "first", "speculators", extras={"eyas_source": PROVENANCE}, **KINDS[kind])
    raw = config_of(first)
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert "model_type" not in raw
    back = convert(convert(first, tmp_path / "there", middle), tmp_path / "back", "speculators")
    assert contents(back) == contents(first)


def test_other_files_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    first = save(tmp_path / "first")
    for name in ("LICENSE", "README.md", "tokenizer.json", "old.bin"):
        (first / name).write_bytes(name.encode())
    there = convert(first, tmp_path / "there", "sglang")
    assert contents(there).keys() == {"config.json", "model.safetensors", "LICENSE", "README.md", "tokenizer.json"}
    assert (there / "LICENSE").read_bytes() == b"LICENSE"


# --- reading ---------------------------------------------------------------------------------------------------


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_midlayer_and_layers_0_read_the_same(tmp_path: Path) -> None:
    first = save(tmp_path / "first")
    stored = load_file(first / "model.safetensors")
    assert "midlayer.hidden_norm.weight" in stored
    other = save(tmp_path / "other")
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in stored.items()}, other / "model.safetensors")
    assert_same(read_checkpoint(str(first)), read_checkpoint(str(other)))


@each(
    ("new", "old"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_type": "default", "rope_theta": 10000.0}, {}),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
        ),
    ],
)
def test_the_old_spelling_of_rope_reads_the_same(tmp_path: Path, new: dict[str, Any], old: dict[str, Any]) -> None:
    folder = save(tmp_path / "it")
    rope = ("rope_parameters", "rope_theta", "rope_scaling")
    edit(folder, drop=rope, rope_parameters=new)
    modern = read_checkpoint(str(folder)).config
    edit(folder, drop=rope, **old)
    assert read_checkpoint(str(folder)).config == modern
    assert modern.rope_parameters == new


def test_a_sharded_folder_reads_as_one_file(tmp_path: Path) -> None:
    whole, shards = save(tmp_path / "whole"), save(tmp_path / "shards")
    stored = load_file(shards / "model.safetensors")
    (shards / "model.safetensors").unlink()
    names = sorted(stored)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: stored[name] for name in chosen}, shards / file)
        weight_map |= dict.fromkeys(chosen, file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(read_checkpoint(str(whole)), read_checkpoint(str(shards)))
    assert contents(convert(shards, tmp_path / "out", "vllm")) == contents(whole)


def test_nested_only_ids_mean_finished_layers_to_vllm_and_layer_indices_to_sglang(tmp_path: Path) -> None:
    folder = save(tmp_path / "it")
    edit(folder, drop=(IDS_KEY,), eagle_config={"use_aux_hidden_state": True, IDS_KEY: [1, 2, 3]})
    assert read_checkpoint(str(folder)).config.aux_layer_ids == (1, 2, 3)
    assert read_checkpoint(str(folder), layout="sglang").config.aux_layer_ids == (2, 3, 4)


def test_ids_written_twice_are_read_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "it", "sglang")
    for layout in (None, "vllm", "sglang"):
        assert read_checkpoint(str(folder), layout=layout).config.aux_layer_ids == (1, 2, 3)
    assert read_checkpoint(str(folder)).layout == "sglang"


def test_eagle_config_decides_norm_before_fc(tmp_path: Path) -> None:
    folder = save(tmp_path / "it", norm_before_fc=True)
    edit(folder, norm_before_fc=False, eagle_config={"norm_before_fc": True})
    assert read_checkpoint(str(folder)).config.norm_before_fc is True


@each("kind", KINDS)
def test_a_loaded_drafter_computes_what_the_saved_one_did(tmp_path: Path, kind: str) -> None:
    config = drafter_config(**KINDS[kind])
    original = random_drafter(config)
    write_checkpoint(checkpoint_of(original), tmp_path / "it")
    loaded = load_drafter(str(tmp_path / "it"))
    aux = torch.randn(5, config.num_aux_hidden_states * 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for drafter in (original, loaded):
        hidden, attend = drafter.fuse(aux), DenseAttention()
        output = drafter.step(hidden, torch.arange(5), torch.arange(400, 405), attend)
        outputs.append((drafter.logits(output.normed), output.feedback))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert torch.equal(loaded.vocab().target_ids_W, original.vocab().target_ids_W)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())


def test_a_missing_t2d_is_made_from_d2t(tmp_path: Path) -> None:
    full = checkpoint(draft_vocab_size=32)
    without = replace(full, tensors={k: v for k, v in full.tensors.items() if k != "t2d"})
    write_checkpoint(without, tmp_path / "it")
    assert torch.equal(load_drafter(str(tmp_path / "it")).t2d, full.tensors["t2d"])


# --- what each format says -------------------------------------------------------------------------------------


@each("kind", ["eagle3", "eagle31", "norm_before_fc", "one_state"])
def test_the_vllm_layout_writes_every_flag_and_the_ids_in_all_three_places(tmp_path: Path, kind: str) -> None:
    raw = config_of(save(tmp_path / "it", **KINDS[kind]))
    config = drafter_config(**KINDS[kind])
    ids = list(config.aux_layer_ids or ())
    assert {flag: raw[flag] for flag in NORM_FLAGS} == {flag: getattr(config, flag) for flag in NORM_FLAGS}
    assert raw[IDS_KEY] == raw["eagle_config"][IDS_KEY] == ids
    assert raw["num_aux_hidden_states"] == len(ids)
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]


def test_the_sglang_layout_writes_nested_ids_one_lower(tmp_path: Path) -> None:
    raw = config_of(save(tmp_path / "it", "sglang"))
    assert raw[IDS_KEY] == [1, 2, 3]
    assert raw["eagle_config"][IDS_KEY] == [0, 1, 2]


def test_the_sglang_layout_stores_the_input_norm_of_later_layers_twice(tmp_path: Path) -> None:
    stored = load_file(save(tmp_path / "it", "sglang", num_hidden_layers=2) / "model.safetensors")
    assert torch.equal(stored["layers.1.hidden_norm.weight"], stored["layers.1.input_layernorm.weight"])
    assert not torch.equal(stored["layers.0.hidden_norm.weight"], stored["layers.0.input_layernorm.weight"])
    plain = load_file(save(tmp_path / "plain", "vllm", num_hidden_layers=2) / "model.safetensors")
    assert stored.keys() - plain.keys() == {"layers.1.hidden_norm.weight"}


@each(
    ("layout", "changes", "reason"),
    [
        ("sglang", {"norm_before_residual": True}, "norm_before_residual is true .* always adds the residual"),
        ("sglang", {"attention_bias": True}, "attention_bias is true .* no attention bias"),
        ("sglang", {"mlp_bias": True}, "mlp_bias is true .* no feed-forward bias"),
        ("sglang", {"logit_scale": 0.5}, "logit_scale is 0.5 and SGLang ignores it"),
        ("speculators", {"fc_norm": True, "norm_before_fc": True}, "both true; speculators allows one"),
        ("speculators", {"hidden_size": 32, "shipped": True}, "hidden_size 32 differs from target_hidden_size 64"),
    ],
)
def test_what_a_format_cannot_express_is_refused(
    tmp_path: Path, layout: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        save(tmp_path / "it", layout, **changes)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "it", "vllm", **changes)  # the vllm format can


def test_an_incomplete_drafter_is_not_written(tmp_path: Path) -> None:
    full = checkpoint(fc_norm=True)
    without = replace(full, tensors={k: v for k, v in full.tensors.items() if k != "fc_norm.1.weight"})
    with pytest.raises(UserError, match=r"refusing to write .*fc_norm.1.weight is missing"):
        write_checkpoint(without, tmp_path / "it")
    assert list(tmp_path.iterdir()) == []


# --- whole or not at all ---------------------------------------------------------------------------------------


@each("fault", [OSError(28, "No space left on device"), RuntimeError("bug"), KeyboardInterrupt()])
@each("replace_old", [False, True])
def test_an_interrupted_write_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, replace_old: bool
) -> None:
    place = tmp_path / "new" / "it"
    if replace_old:
        save(place)
    before = contents(tmp_path)

    def half_written(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise fault

    monkeypatch.setattr(checkpoint_module, "save_file", half_written)
    with pytest.raises((UserError, RuntimeError, KeyboardInterrupt)) as caught:
        write_checkpoint(checkpoint(**V31), place, replace=replace_old)
    assert contents(tmp_path) == before
    assert sorted(tmp_path.rglob("*.partial-*")) == []
    assert place.exists() == place.parent.exists() == replace_old
    if isinstance(fault, OSError):
        assert "No space left on device; nothing was left behind" in str(caught.value)


@each("fault", [OSError(13, "Permission denied"), KeyboardInterrupt()])
@each("which", ["first", "second"])
def test_a_failed_replacement_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, which: str
) -> None:
    place = save(tmp_path / "it")
    before = contents(tmp_path)
    rename, failing = Path.rename, ".partial-" if which == "second" else "it"

    def fail(self: Path, target: Path) -> Path:
        if failing in self.name and self.name != "old":
            raise fault
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((UserError, KeyboardInterrupt)):
        write_checkpoint(checkpoint(**V31), place, replace=True)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    place = save(tmp_path / "it")
    with pytest.raises(UserError, match=r"exists and would be overwritten; .*--force"):
        write_checkpoint(checkpoint(**V31), place)
    assert config_of(place)["fc_norm"] is False
    (place / "stale.txt").write_text("old")
    write_checkpoint(checkpoint(**V31), place, replace=True)
    assert config_of(place)["fc_norm"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert not (place / "stale.txt").exists()


@each("replace_old", [False, True])
def test_a_reader_never_sees_half_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace_old: bool) -> None:
    """Look at the folder at every moment of a write: it is the old one, the new one, or absent."""
    place = tmp_path / "it"
    old, new = {"a": b"old", "b": b"old"}, {"a": b"new", "b": b"new"}
    if replace_old:
        place.mkdir()
        for name, data in old.items():
            (place / name).write_bytes(data)
    sights: list[dict[str, bytes] | None] = []

    def look() -> None:
        sights.append(contents(place) if place.exists() else None)

    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        look()
        moved = rename(self, target)
        look()
        return moved

    monkeypatch.setattr(Path, "rename", watched)
    with new_folder(place, replace=True) as staging:
        look()
        (staging / "a").write_bytes(b"new")
        look()
        (staging / "b").write_bytes(b"new")
        look()
    look()
    start = old if replace_old else None
    assert all(sight in (start, None, new) for sight in sights)
    assert sights[:3] == [start] * 3
    assert sights[-1] == new


def test_a_new_folder_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with new_folder(tmp_path / "it"):
        pass
    assert (tmp_path / "it").stat().st_mode == (tmp_path / "plain").stat().st_mode


SHIPPED = "smollm2-eagle3.1"


def test_vllm_is_given_the_folder_of_an_explicit_drafter(tmp_path: Path) -> None:
    assert vllm_folder(SHIPPED, tmp_path) == read_checkpoint(SHIPPED).folder
    assert not list(tmp_path.iterdir())


@each("layout", ["speculators", "sglang"])
def test_for_vllm_a_drafter_of_another_layout_is_copied_once(tmp_path: Path, layout: str) -> None:
    original = read_checkpoint(SHIPPED)
    write_checkpoint(original, tmp_path / "other", layout=layout)
    folder = vllm_folder(str(tmp_path / "other"), tmp_path / "cache")
    again = vllm_folder(str(tmp_path / "other"), tmp_path / "cache")
    assert folder == again
    copy = read_checkpoint(str(folder))
    assert is_explicit(copy)
    assert copy.config == original.config


def test_for_vllm_a_drafter_with_missing_flags_is_copied(tmp_path: Path) -> None:
    write_checkpoint(read_checkpoint(SHIPPED), tmp_path / "silent")
    edit(tmp_path / "silent", drop=("norm_before_residual",))
    folder = vllm_folder(str(tmp_path / "silent"), tmp_path / "cache")
    assert "norm_before_residual" in config_of(folder)


def test_the_copy_for_vllm_is_written_to_the_given_folder(tmp_path: Path) -> None:
    assert vllm_folder(SHIPPED, tmp_path / "cache", tmp_path / "out") == tmp_path / "out"
    assert is_explicit(read_checkpoint(str(tmp_path / "out")))
