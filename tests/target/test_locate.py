"""Names of targets resolve to folders or hub ids, or to an error of one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from each import each
from eyas.errors import UserError
from eyas.target.facts import TargetFacts, facts_of, read_facts
from eyas.target.locate import locate


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == str(tmp_path)


def test_a_hub_id_is_left_to_transformers() -> None:
    assert locate("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert locate("gpt2") == "gpt2"


@each(
    ("source", "message"),
    [
        ("./nowhere", "no folder './nowhere' and it is not a hub id"),
        ("/no/such/folder", "no folder '/no/such/folder'"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("", "name of the target is empty"),
        ("missing.gguf", "no GGUF file missing.gguf"),
    ],
)
def test_a_name_that_is_nothing_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        locate(source)


def test_a_folder_without_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a model: the folder has no config\.json"):
        locate(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UserError, match=r"is a file but not a \.gguf file"):
        locate(str(path))


def test_an_unknown_hub_id_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as raised:
        read_facts("nobody-at-all/no-such-model-0")
    assert "no folder 'nobody-at-all/no-such-model-0'" in str(raised.value)
    assert "check the name and the network" in str(raised.value)
    assert "\n" not in str(raised.value)


@each("text", ["{ not json", '{"model_type": "no-such-type"}', "{}"])
def test_a_config_that_cannot_be_read_is_one_line_that_names_the_folder(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as raised:
        read_facts(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def facts(layers: int) -> TargetFacts:
    return TargetFacts(
        source="x",
        model_type="llama",
        num_hidden_layers=layers,
        hidden_size=8,
        vocab_size=9,
        max_position_embeddings=None,
    )


def test_default_auxiliary_layers_are_low_middle_and_high() -> None:
    assert facts(30).default_aux_layer_ids() == (2, 15, 27)
    assert facts(7).default_aux_layer_ids() == (2, 3, 4)


@each("layers", [1, 4, 6])
def test_a_target_with_too_few_layers_must_name_its_auxiliary_layers(layers: int) -> None:
    with pytest.raises(UserError, match=f"has {layers} layers.*need at least 7"):
        facts(layers).default_aux_layer_ids()


def test_facts_describe_the_text_model_inside_a_larger_one() -> None:
    from transformers import Gemma3Config

    config = Gemma3Config(text_config={"num_hidden_layers": 5, "hidden_size": 40, "vocab_size": 77})
    described = facts_of(config, "g")
    assert (described.num_hidden_layers, described.hidden_size, described.vocab_size) == (5, 40, 77)


def test_an_encoder_decoder_is_not_a_target() -> None:
    from transformers import T5Config

    with pytest.raises(UserError, match="not a causal language model"):
        facts_of(T5Config(), "t5")


def test_facts_and_locate_can_be_imported_without_torch() -> None:
    program = "import sys, eyas.target.facts, eyas.target.locate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
