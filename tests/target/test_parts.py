"""Parts of a target equal those of the loaded one; its head gives its logits, and its norms identify it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from chat_tokenizer import letter_tokenizer
from each import each
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat
from eyas.target.facts import facts_of
from eyas.target.model import Target
from eyas.target.parts import TargetHead, TargetParts, fingerprint, read_head
from mxfp4_checkpoint import write_mxfp4
from target.test_capture import FAMILIES, some_ids, tiny
from target.test_quantised_checkpoint import LAYOUTS, write
from tiny_gguf import tiny_model, write_gguf


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


def test_missing_parts_are_refused_by_name(tmp_path: Path) -> None:
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


def test_without_the_norms_of_its_layers_there_is_no_fingerprint(tmp_path: Path) -> None:
    source = saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert TargetParts.load(source).fingerprint is None


def test_a_chat_format_replaces_the_tokenizers_template(tmp_path: Path) -> None:
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


SCALED: dict[str, dict[str, float]] = {
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0},
}


@torch.no_grad()
def target_of(family: str) -> Target:
    """Return a target with larger logits, random biases and norms, and a logit scale or cap if it has one."""
    model = tiny(family)
    model.get_output_embeddings().weight.mul_(20)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for key, value in SCALED.get(family, {}).items():
        setattr(model.config, key, value)
        if hasattr(model, key):  # Cohere keeps a copy
            setattr(model, key, value)
    return Target(
        facts=facts_of(model.config, family), model=model.requires_grad_(False), tokenizer=PreTrainedTokenizerBase()
    )


def states_and_scores(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = target.model
    with torch.no_grad():
        states = model.get_decoder()(input_ids=some_ids(), use_cache=False).last_hidden_state[0]
        return states, model(input_ids=some_ids(), use_cache=False).logits[0]


@each("family", [*FAMILIES, "granite", "cohere"])
def test_the_head_gives_the_targets_own_scores(family: str) -> None:
    target = target_of(family)
    states, theirs = states_and_scores(target)
    head = read_head(target)
    torch.testing.assert_close(head.scores(states), theirs, rtol=1e-5, atol=1e-5)
    chosen = torch.tensor([3, 7, 79])
    torch.testing.assert_close(head.only(chosen).scores(states), theirs[:, chosen], rtol=1e-5, atol=1e-5)


@each(
    ("family", "without"),
    [("granite", {"scale": 1.0}), ("cohere", {"scale": 1.0}), ("gemma2", {"cap": None}), ("phi", {"bias_V": None})],
)
def test_scale_cap_and_bias_of_the_head_matter(family: str, without: dict[str, Any]) -> None:
    target = target_of(family)
    states, theirs = states_and_scores(target)
    poorer: TargetHead = replace(read_head(target), **without)
    assert float((poorer.scores(states) - theirs).abs().max()) > 0.02 * float(theirs.abs().max())


def test_a_target_with_other_scores_than_its_heads_is_refused() -> None:
    target = target_of("llama")
    target.model.config.logit_scale = 2.0  # set, but not applied by the model
    with pytest.raises(UserError, match=r"scores of llama \(llama\) are not its head.*differ by .* not supported"):
        read_head(target)
    del target.model.config.logit_scale
    read_head(target)

    def sharpen(module: object, args: object, output: Any) -> Any:
        output.logits = output.logits * float("nan")
        return output

    hook = target.model.register_forward_hook(sharpen)
    with pytest.raises(UserError, match="not supported for training"):
        read_head(target)
    hook.remove()


@each("family", ["llama", "qwen3"])
def test_a_folder_and_gguf_files_of_one_model_agree_in_any_precision(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    ours = fingerprint(model)
    assert len(ours) == 16
    assert fingerprint(tiny_model(family).bfloat16()) == fingerprint(tiny_model(family).half()) == ours
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0):
        path = write_gguf(model, tmp_path / f"{kind.name}.gguf", kind=kind)
        assert fingerprint(Target.load(str(path), cache=tmp_path / "cache").model) == ours


def test_norms_stored_plus_one_have_the_same_fingerprint() -> None:
    gemma, stored = tiny_model("gemma2"), tiny_model("gemma2")
    with torch.no_grad():
        for each in (gemma, stored):
            for name, weight in each.named_parameters():
                if "norm" in name:
                    weight.sub_(1).mul_(torch.logspace(-9, 0, len(weight))).copy_(weight.bfloat16().float())
        for name, weight in stored.named_parameters():
            if "norm" in name:
                weight.add_(1).sub_(1)
    assert fingerprint(gemma) == fingerprint(stored)


@each("change", [{"num_hidden_layers": 4}, {"vocab_size": 300}, {"hidden_size": 128}])
def test_other_sizes_give_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(tiny_model(**change)) != fingerprint(tiny_model())


@each("norm", ["model.norm", "model.layers.1.input_layernorm"])
def test_one_changed_norm_weight_gives_another_fingerprint(norm: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(f"{norm}.weight")[7] *= 1.01
    assert fingerprint(model) != fingerprint(tiny_model())
