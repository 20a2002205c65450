"""`eyas serve --learn`: what it refuses, and the way from questions over HTTP to an adapted drafter."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from chat_tokenizer import CHATML, chat_tokenizer
from eyas.drafter.checkpoint import checkpoint_of, write_checkpoint

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


def test_answers_that_a_server_kept_adapt_its_drafter(pair: Path, tmp_path: Path, run: Run) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "eyas", "serve", pair / "target", "--learn", kept, "--learn-key", "yes"]
    command += [
        "--port",
        "0",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--device",
        "cpu",
        "--memory-gib",
        "0.1",
    ]
    server = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env={**os.environ, "EYAS_API_KEY": "yes no"}
    )
    assert server.stderr is not None
    watchdog = threading.Timer(120, server.kill)
    watchdog.start()
    try:
        said: list[str] = []
        while not (said and said[-1].startswith("at ")):
            said.append(server.stderr.readline())
            assert said[-1], said
        assert any(line.startswith("learning  ") and str(kept) in line for line in said), said
        url = said[-1].split()[1].rstrip(",")
        for number in range(ANSWERS):
            for key in ("no", "yes"):
                body = {"messages": [{"role": "user", "content": f"{key} {number}"}], "max_tokens": 12, "seed": number}
                reply = httpx2.post(
                    f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
                )
                assert reply.status_code == 200, reply.text
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        assert server.wait(30) == 0, rest
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
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
