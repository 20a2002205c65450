"""docs/qwen3.md to its end: the real vLLM serves the drafter by the documented line, and drafts with it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import tiny_qwen3
from test_docs import PROMPTS, QWEN3, blocks, commands

pytestmark = pytest.mark.parity
PATIENCE = 600
"""Seconds for vLLM to load on a busy CPU."""


def test_vllm_serves_the_drafter_by_the_documented_line(tmp_path: Path) -> None:
    tiny_qwen3.save(tmp_path / "Qwen" / "Qwen3-8B")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "qwen3.toml").write_text(blocks("toml", [QWEN3])[0])
    for words in commands(QWEN3):
        if words[1] == "train" or words[1:3] == ["data", "answer"]:
            subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True)
    line = blocks("console", [QWEN3])[0].removeprefix("$ ").replace("\\\n", " ")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Not every processor computes in bfloat16.
    here = ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command = [str(Path(sys.executable).with_name("vllm")), *shlex.split(line)[1:], *here]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "vllm.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=os.environ | offline, stdout=log, stderr=log)
    try:
        base = f"http://127.0.0.1:{port}"
        await_health(base, server, tmp_path / "vllm.log")
        asked = {
            "model": "Qwen/Qwen3-8B",
            "messages": [{"role": "user", "content": PROMPTS[0]}],
            "max_tokens": 32,
            "temperature": 0,
        }
        answer = json.loads(fetch(f"{base}/v1/chat/completions", asked))
        assert answer["usage"]["completion_tokens"] > 1
        drafted = re.search(r"vllm:spec_decode_num_draft_tokens_total\{.*\} ([0-9.e+]+)", fetch(f"{base}/metrics"))
        assert drafted is not None
        assert float(drafted[1]) > 0
    finally:
        server.terminate()
        server.wait(60)


def await_health(base: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            fetch(f"{base}/health")
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"vLLM did not come up:\n{log.read_text()[-4000:]}")


def fetch(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=PATIENCE) as response:
        return str(response.read().decode())
