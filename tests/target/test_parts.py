"""A target without its layers: what is read from files is what the loaded target has, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.model import Target
from eyas.target.parts import TargetParts
from mxfp4_checkpoint import write_mxfp4
from target.test_capture import FAMILIES, some_ids
from target.test_head import target_of
from target.test_quantised_checkpoint import LAYOUTS, write


def saved(family: str, folder: Path, **options: Any) -> str:
    """A target of a family on disk."""
    model: Any = target_of(family).model
    model.save_pretrained(folder, **options)
    letter_tokenizer().save_pretrained(folder)
    return str(folder)


def assert_same(read: TargetParts, loaded: TargetParts) -> None:
    assert (read.facts, read.stop_ids, read.fingerprint) == (loaded.facts, loaded.stop_ids, loaded.fingerprint)
    assert (read.dtype, read.device) == (loaded.dtype, loaded.device)
    assert torch.equal(read.embedding_VD, loaded.embedding_VD)
    assert torch.equal(read.head.weight_VD, loaded.head.weight_VD)
    assert (read.head.scale, read.head.cap) == (loaded.head.scale, loaded.head.cap)
    assert (read.head.bias_V is None) == (loaded.head.bias_V is None)
    if read.head.bias_V is not None and loaded.head.bias_V is not None:
        assert torch.equal(read.head.bias_V, loaded.head.bias_V)
    assert read.norm is not None
    assert loaded.norm is not None
    states_TD = torch.randn(5, read.facts.hidden_size, generator=torch.Generator().manual_seed(0)).to(read.dtype)
    with torch.no_grad():
        assert torch.equal(read.norm(states_TD), loaded.norm(states_TD))


@each("family", [*FAMILIES, "granite", "cohere", "phi"])
@each("shards", ["10GB", "20KB"])
def test_parts_read_from_files_are_those_of_the_loaded_target(family: str, shards: str, tmp_path: Path) -> None:
    source = saved(family, tmp_path, max_shard_size=shards)
    assert_same(TargetParts.load(source), TargetParts.of(Target.load(source)))


@each("dtype", ["float32", "bfloat16"])
def test_parts_are_in_the_precision_that_was_asked_for(dtype: str, tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    parts = TargetParts.load(source, dtype=dtype)
    assert parts.dtype == parts.head.weight_VD.dtype == getattr(torch, dtype)
    assert_same(parts, TargetParts.of(Target.load(source, dtype=dtype)))


@each("family", ["llama", "gemma2", "qwen3"])
def test_the_norm_and_the_head_over_the_last_layers_state_give_the_targets_scores(family: str, tmp_path: Path) -> None:
    source = saved(family, tmp_path)
    target, parts = Target.load(source, dtype="float32"), TargetParts.load(source, dtype="float32")
    output = target.forward(some_ids(), [target.facts.num_hidden_layers])
    assert parts.norm is not None
    with torch.no_grad():
        ours = parts.head.scores(parts.norm(output.aux_hidden_BTX[0]))
    torch.testing.assert_close(ours, output.logits_BTV[0], rtol=1e-4, atol=1e-4)


@each("layout", LAYOUTS)
@each("head", [False, True])
def test_parts_of_quantised_checkpoints_are_dequantised(layout: str, head: bool, tmp_path: Path) -> None:
    meant: dict[str, Tensor] = {}

    def quantise_the_head(tensors: dict[str, Tensor]) -> None:
        # Its sizes must be multiples of what layouts pack.
        stored, weight = LAYOUTS[layout][0](tensors.pop("lm_head.weight"))
        tensors |= {f"lm_head.{part}": tensor for part, tensor in stored.items()}
        meant["head"] = weight.dequantised()

    model: Any = write(tmp_path, layout, quantise_the_head if head else None)
    parts = TargetParts.load(str(tmp_path), dtype="float32")
    assert torch.equal(parts.embedding_VD, model.model.embed_tokens.weight)
    torch.testing.assert_close(parts.head.weight_VD, meant.get("head", model.lm_head.weight.data), rtol=1e-2, atol=1e-3)
    loaded = TargetParts.of(Target.load(str(tmp_path), dtype="float32"))
    torch.testing.assert_close(parts.head.weight_VD, loaded.head.weight_VD, rtol=0, atol=0)
    assert parts.fingerprint == loaded.fingerprint


def test_experts_in_mxfp4_leave_the_parts_alone(tmp_path: Path) -> None:
    write_mxfp4(tmp_path, dtype="float32")
    source = str(tmp_path)
    assert_same(TargetParts.load(source, dtype="float32"), TargetParts.of(Target.load(source, dtype="float32")))


@each("prefix", ["", "language_model.model.", "model.language_model."])
def test_a_decoder_under_another_name_is_found_beside_a_vision_tower(prefix: str, tmp_path: Path) -> None:
    source = saved("qwen3", tmp_path)
    expected = TargetParts.load(source)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: t for name, t in tensors.items()
    }
    renamed["vision_tower.norm.weight"] = torch.ones(7)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(TargetParts.load(source), expected)


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")

    def stored(**changes: Tensor | None) -> None:
        tensors = {name: t for name, t in {**whole, **changes}.items() if t is not None}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for changes, words in (
        ({"model.embed_tokens.weight": None}, r"embedding of .* is not in its weights by that name"),
        ({"lm_head.weight": None}, r"no weights of its head \(lm_head\)"),
        ({"model.norm.weight": None}, r"no tensor model\.norm\.weight"),
        ({"model.embed_tokens.weight": torch.zeros(3, 4)}, r"embedding of .* has the shape \(3, 4\)"),
        ({"lm_head.weight": torch.zeros(80, 32, dtype=torch.int8)}, r"lm_head\.weight .* is int8 and has no scales"),
    ):
        stored(**changes)
        with pytest.raises(UserError, match=words):
            TargetParts.load(source)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no file model\.safetensors"):
        TargetParts.load(source)


def test_without_the_norms_of_its_layers_nobody_knows_who_a_target_is(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert TargetParts.load(source).fingerprint is None


def test_a_chat_format_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    assert TargetParts.load(source, chat_format=ChatFormat(template="{{ messages }}")).tokenizer.chat_template == (
        "{{ messages }}"
    )


@pytest.mark.slow
@pytest.mark.default
def test_the_parts_of_the_default_target_are_its_own(default_target: Target) -> None:
    loaded = TargetParts.of(default_target)
    read = TargetParts.load("smollm2", dtype=str(loaded.dtype).removeprefix("torch."))
    assert_same(read, loaded)
