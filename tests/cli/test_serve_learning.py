"""`eyas serve --learn`: what it refuses, and the way from questions over HTTP to an adapted drafter."""

import inspect
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.cli.serve import serve
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint
from eyas.serve.learning.learner import LearnerSettings

Run = Callable[..., Any]
ANSWERS = 36


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--learn-key", "a"], ["--learn-key", "add --learn"]),
        (["--learn", "kept", "--api-key", "a"], ["none of the 1 has", "--learn-key"]),
        (["--learn", "kept", "--api-key", "a", "--learn-key", "b"], ["SHA-256 begins with", "--api-key"]),
        (["--learn", "kept", "--host", "0.0.0.0"], ["everybody who can reach it", "--learn-key '*'"]),
        (["--learn", "kept", "--learn-bytes", "1000"], ["--learn-bytes", "1048576"]),
        (["--learn", "open"], ["open to other users", "chmod 700 open"]),
        (["--learn", "file"], ["file", "--learn"]),
        (["--learn-share", "0.1"], ["--learn-share is 0.1", "add --learn"]),
        (["--learn", "kept", "--learn-share", "0.1", "--engine", "vllm"], ["vLLM keeps the one", "leave it out"]),
        (["--learn", "kept", "--learn-share", "0.1", "--speculative-config", "none"], ["there is none", "name one"]),
        (["--learn", "kept", "--learn-share", "0.1", "--revision", "main"], ["revision main", "serve a folder"]),
        (["--learn", "kept", "--learn-share", "0.1", "--learn-answers", "3"], ["--learn-answers is 3", "64 at least"]),
        (["--learn", "kept", "--learn-share", "0.1", "--learn-options", "'"], ["--learn-options", "command line"]),
        (["--learn", "kept", "--learn-share", "0.1", "--learn-options", "--bogus 3"], ["--learn-options", "--bogus"]),
        (["--learn", "kept", "--learn-share", "0.1", "--learn-options", "--minutes x"], ["--learn-options", "number"]),
        (["--learn", "kept", "--learn-share", "2"], ["--learn-share", "equal to 1"]),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_loaded(
    run: Run, arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "file").touch(mode=0o600)
    run("serve", *arguments, "--port", 0).assert_refused(*parts)
    assert not (tmp_path / "kept").exists()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target that chats in bytes, and a random drafter for it."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny.target_config(vocab_size=264, max_position_embeddings=2048)).save_pretrained(
        folder / "target"
    )
    chat_tokenizer(CHATML).save_pretrained(folder / "target")
    config = tiny.drafter_config(vocab_size=264, draft_vocab_size=264, fc_norm=True, norm_output=True)
    write_checkpoint(checkpoint_of(tiny.random_drafter(config, own_embedding=False)), folder / "drafter")
    return folder


@contextmanager
def serving(pair: Path, *words: object, keys: str = "") -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server of this pair's target, its URL, and what it said at its start."""
    command = [sys.executable, "-m", "eyas", "serve", pair / "target", *words, "--port", 0, "--max-model-len", 256]
    command += ["--max-num-seqs", 4, "--device", "cpu", "--memory-gib", 0.1]
    environment = os.environ | ({"EYAS_API_KEY": keys} if keys else {})
    server = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    watchdog = threading.Timer(240, server.kill)
    watchdog.start()
    try:
        said: list[str] = []
        while not (said and said[-1].startswith("at ")):
            said.append(server.stderr.readline())
            assert said[-1], said
        yield server, said[-1].split()[1].rstrip(","), said
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
        server.stderr.close()


def stop(server: subprocess.Popen[str]) -> str:
    """End it by SIGTERM; what it said since."""
    assert server.stderr is not None
    server.send_signal(signal.SIGTERM)
    rest = server.stderr.read()
    assert server.wait(30) == 0, rest
    return rest


@pytest.mark.slow
def test_answers_that_a_server_kept_adapt_its_drafter(pair: Path, tmp_path: Path, run: Run) -> None:
    kept = tmp_path / "kept"
    with serving(pair, "--learn", kept, "--learn-key", "yes", keys="yes no") as (server, url, said):
        assert any(line.startswith("learning  ") and str(kept) in line for line in said), said
        for number in range(ANSWERS):
            for key in ("no", "yes"):
                body = {"messages": [{"role": "user", "content": f"{key} {number}"}], "max_tokens": 12, "seed": number}
                reply = httpx2.post(
                    f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
                )
                assert reply.status_code == 200, reply.text
        stop(server)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    records = [json.loads(line) for file in sorted(kept.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert [record["messages"][0]["content"] for record in records] == [f"yes {number}" for number in range(ANSWERS)]
    given = ["adapt", pair / "drafter", kept, "--target", pair / "target", "--out", tmp_path / "adapted"]
    given += ["--device", "cpu", "--dtype", "float32", "--depth", 3, "--epochs", 1, "--no-doctor", "--json"]
    sets = ("data.workers=1", "train.depths=3", "data.max_length=128", "data.pack_length=128")
    adapted = run(*given, *(word for one in sets for word in ("--set", one)))
    assert adapted.code in (0, 1), adapted  # kept or not: a random target says nothing to learn
    data = json.loads(adapted.out)["data"]
    assert data["conversations"] == ANSWERS - 16
    tokens = sum(len(record["samples"][0]["token_ids"]) for record in records[: ANSWERS - 16])
    assert data["trained_on"] == tokens, data


@pytest.mark.slow
def test_a_server_learns_by_itself_and_its_gate_refuses_what_nobody_can_foretell(pair: Path, tmp_path: Path) -> None:
    """Poisoned traffic: tokens drawn at random from a random target. The whole loop, with `eyas adapt` itself."""
    kept, config = tmp_path / "kept", json.dumps({"model": str(pair / "drafter"), "method": "eagle3"})
    sets = ("data.workers=1", "train.depths=2", "data.max_length=128", "data.pack_length=128")
    options = " ".join(["--epochs 0.5", *(f"--set {one}" for one in sets)])
    words = ["--learn", kept, "--learn-share", 1, "--learn-answers", 64, "--learn-interval", 0, "--dtype", "float32"]
    with serving(pair, *words, "--speculative-config", config, f"--learn-options={options}") as (server, url, said):
        assert any(line.startswith("learner   ") and "100% of the device's time" in line for line in said), said
        status = _answered(url, 64)
        deadline = time.monotonic() + 120
        while status["learner"]["last"] is None:
            assert time.monotonic() < deadline, (status, (kept / "learner.log").read_text())
            time.sleep(0.5)
            status = _answered(url, 1)
        last = status["learner"]["last"]
        assert last["outcome"] == "not_better", (last, (kept / "learner.log").read_text())
        assert "the old drafter stays" in last["reason"]
        assert last["gate"]["gain"]["low"] <= 0
        assert not (kept / "adaptation").exists()
        rest = stop(server)
    assert "adaptation 1 begins: 6" in rest, rest


def _answered(url: str, count: int) -> dict[str, Any]:
    """Ask for so many random answers; what /status says of learning then."""
    with httpx2.Client(timeout=60) as client:
        for number in range(count):
            body = {"prompt": f"say {number}", "max_tokens": 12, "seed": number, "temperature": 2, "ignore_eos": True}
            reply = client.post(f"{url}/completions", json=body)
            assert reply.status_code == 200, reply.text
        told: dict[str, Any] = client.get(f"{url.removesuffix('/v1')}/status").json()["learning"]
        return told


def test_the_command_has_the_defaults_of_the_library() -> None:
    command = {name: one.default for name, one in inspect.signature(serve).parameters.items()}
    library = {one.name: one.default for one in fields(LearnerSettings)}
    for name in ("answers", "interval", "resume"):
        assert command[f"learn_{name}"] == library[name]
