"""A loaded target: forward pass, dtype, device and chat; an incomplete one is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from each import each
from eyas.errors import UserError
from eyas.target.chat_template import ChatFormat, ChatTemplateOptions
from eyas.target.locate import locate
from eyas.target.model import Target
from tiny_gguf import tiny_model, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target")
    return Path(locate(str(write_gguf(tiny_model(), place / "m.gguf")), cache=place / "cache"))


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_forward_gives_logits_and_states_of_the_same_pass(folder: Path) -> None:
    target = Target.load(str(folder), dtype="float32")
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    output = target.forward(ids_BT, (0, 2, 3))
    assert output.logits_BTV.shape == (1, 4, 264)
    assert output.aux_hidden_BTX.shape == (1, 4, 3 * 64)
    last_BTD = output.aux_hidden_BTX[..., 2 * 64 :]
    logits_BTV = target.model.get_decoder().norm(last_BTD) @ target.head().T  # type: ignore[no-untyped-call]
    assert torch.allclose(logits_BTV, output.logits_BTV, atol=1e-5)
    assert torch.equal(output.aux_hidden_BTX[..., :64], target.embedding()[ids_BT])


def test_the_device_is_logged(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, "eyas"):
        assert Target.load(str(folder), device="auto").device.type == "cpu"
    assert caplog.messages[0].startswith(f"loading {folder} on cpu (")


def test_a_cap_on_scores_is_honoured_whatever_transformers_would_choose(folder: Path, tmp_path: Path) -> None:
    def loaded(cap: float) -> Target:
        torch.manual_seed(0)
        place = copy_of(folder, tmp_path / str(cap))
        sizes: dict[str, int] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=cap))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(12)  # or scores are too small for a cap to matter
        model.save_pretrained(place)
        return Target.load(str(place), dtype="float32")

    narrow, wide = (loaded(cap).forward(torch.arange(12)[None], (1,)).logits_BTV for cap in (0.5, 1000.0))
    assert not torch.allclose(narrow, wide, atol=1e-2)


def test_states_can_be_trained_on(folder: Path) -> None:
    target = Target.load(str(folder), dtype="float32")
    states_BTX = target.forward(torch.tensor([[5, 6]]), (1,)).aux_hidden_BTX
    layer = torch.nn.Linear(64, 4)
    layer(states_BTX).sum().backward()
    assert layer.weight.grad is not None


@each("dtype", ["float32", "bfloat16", "float16"])
def test_a_named_dtype_is_honoured(dtype: str, folder: Path) -> None:
    target = Target.load(str(folder), dtype=dtype)
    assert target.dtype == getattr(torch, dtype)
    assert target.device == torch.device("cpu")
    assert not any(weight.requires_grad for weight in target.model.parameters())


@each(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_keeps_the_checkpoints_precision_only_where_the_processor_computes_in_it(
    supported: bool,
    expected: torch.dtype,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("eyas.target.model._computes", lambda dtype, device: supported)
    caplog.set_level(logging.INFO, logger="eyas")
    assert Target.load(str(folder)).dtype == expected
    assert any("bfloat16 arithmetic: using float32" in line for line in caplog.messages) == (not supported)


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Target.load(str(folder))
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path / "m")
    weights = load_file(place / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        Target.load(str(place))


@each("damage", ["cut weights", "no weights", "no tokenizer", "wrong shape"])
def test_a_damaged_folder_is_one_line_that_names_it(damage: str, folder: Path, tmp_path: Path) -> None:
    place = copy_of(folder, tmp_path / "m")
    weights = place / "model.safetensors"
    if damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "wrong shape":
        config = place / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 97'))
    else:
        (place / "tokenizer.json").unlink()
        (place / "tokenizer_config.json").unlink()
    with pytest.raises(UserError) as raised:
        Target.load(str(place))
    assert str(place) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_dtype_or_device_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="unknown dtype 'int8'; use one of auto, float32"):
        Target.load(str(folder), dtype="int8")
    with pytest.raises(UserError, match="device 'tpu9' cannot be used here"):
        Target.load(str(folder), device="tpu9")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="device 'cuda' cannot be used here"):
            Target.load(str(folder), device="cuda")


def test_chat_uses_the_targets_own_template_or_says_there_is_none(folder: Path) -> None:
    target = Target.load(str(folder))
    messages = [{"role": "user", "content": "the"}]
    assert target.tokenizer.decode(target.encode_chat(messages)) == "<|start|>the<|end|><|start|>"
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserError, match=r"refuses this conversation \(no system role\)"):
        target.encode_chat(messages)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"has no chat template.*--raw.*--chat-template FILE"):
        target.encode_chat(messages)


def test_variables_of_a_call_override_those_of_the_run(folder: Path) -> None:
    template = "{{ messages[0].content }}{{ mode }}{{ pace }}"
    chat_format = ChatFormat(template=template, variables={"mode": "the", "pace": "a"})
    target = Target.load(str(folder), chat_format=chat_format)
    messages, options = [{"role": "user", "content": "cat"}], ChatTemplateOptions(variables={"pace": "dog"})

    texts: list[str] = []
    target.encode_chat(messages, check_text=texts.append)
    target.encode_chat(messages, None, options, check_text=texts.append)
    assert texts == ["catthea", "catthedog"]


def test_a_target_without_a_template_reads_plain_text(folder: Path) -> None:
    target = Target.load(str(folder), chat_format=ChatFormat(raw=True))
    assert target.encode_chat([{"role": "user", "content": "the cat"}]) == target.tokenizer.encode("the cat")


def test_stop_ids_join_generation_config_and_tokenizer(folder: Path) -> None:
    target = Target.load(str(folder))
    assert target.stop_ids() == {0}
    generation: Any = target.model.generation_config
    generation.eos_token_id = [7, 9]
    assert target.stop_ids() == {0, 7, 9}
    generation.eos_token_id = None
    assert target.stop_ids() == {0}
