"""`eyas data answer --server` against the real vLLM: the tokens that it tells are those that the engine generates.

In float32, greedily. Where two answers part, the target must have been undecided between both tokens.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from default_drafter import training_prompts
from eyas.cli.app import main
from eyas.remote import completions
from eyas.target.locate import DEFAULT_TARGET, locate
from eyas.target.model import Target

pytestmark = pytest.mark.parity

NEAR_TIE = 1e-3
"""Between the logits of the two best tokens, where float32 sums in another order may decide."""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(folder: str, log: Path) -> Iterator[str]:
    """The real `vllm serve` in float32, ready."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{found.getsockname()[1]}"
    program = str(Path(sys.executable).with_name("vllm"))
    options = ["--served-model-name", "smollm2", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command = [program, "serve", folder, *options, "--port", url.rpartition(":")[2]]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **VLLM}) as server:
        try:
            deadline = time.monotonic() + 900
            while not _ready(url):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(1)
            yield url
        finally:
            server.terminate()


def _ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def answer(monkeypatch: pytest.MonkeyPatch, prompts: Path, out: Path, *options: str) -> dict[int, Any]:
    command = ["eyas", "data", "answer", str(prompts), "--out", str(out), "--max-tokens", "32", "--json", *options]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    rows = {row["id"]: row for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    for row in rows.values():
        row.pop("target_fingerprint", None)
    return rows


def test_vllm_writes_the_engines_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"turns": [text, "Say that in one word."]} for text in training_prompts()[:12]]
    prompts.write_text("\n".join(map(json.dumps, asked)))
    ours = answer(monkeypatch, prompts, tmp_path / "ours", "--dtype", "float32")
    with serving(locate(DEFAULT_TARGET), tmp_path / "vllm.log") as url:
        theirs = answer(monkeypatch, prompts, tmp_path / "theirs", "--server", url)
        told_otherwise = []
        for number, way in enumerate(completions.WAYS[1:]):
            monkeypatch.setattr(completions, "WAYS", (way,))
            told_otherwise.append(answer(monkeypatch, prompts, tmp_path / f"way{number}", "--server", url))
    target = Target.load(DEFAULT_TARGET, dtype="float32")
    parted = [number for number in ours if ours[number] != theirs[number]]
    for number in parted:
        _require_near_tie(target, ours[number]["samples"], theirs[number]["samples"])
    print(f"{len(ours) - len(parted)} of {len(ours)} conversations are the same, {len(parted)} part at a near-tie")
    assert sorted(ours) == sorted(theirs) == list(range(12))
    # What logprobs tell is the same, or nothing.
    assert told_otherwise[0] == theirs
    assert len(told_otherwise[1]) > 6
    for number, row in told_otherwise[1].items():
        assert row["samples"] == theirs[number]["samples"][: len(row["samples"])]


def _require_near_tie(target: Target, ours: list[Any], theirs: list[Any]) -> None:
    """The first tokens that differ are the two best ones, and nearly as good."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine == other:
            continue
        assert mine["prompt_token_ids"] == other["prompt_token_ids"]
        a, b = mine["token_ids"], other["token_ids"]
        place = next(i for i in range(min(len(a), len(b))) if a[i] != b[i])
        ids = torch.tensor([mine["prompt_token_ids"] + a[:place]])
        best = target.forward(ids, (0,)).logits_BTV[0, -1].topk(2)
        assert set(best.indices.tolist()) == {a[place], b[place]}
        assert float(best.values[0] - best.values[1]) < NEAR_TIE
        return
    raise AssertionError("the tokens are the same and the records are not")
