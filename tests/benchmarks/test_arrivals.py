"""Both clients' results become the same rows, and both servers get the same options."""

import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import arrivals
import pytest
from arrivals import commands, line_of, own_client, row_of_eyas, row_of_vllm, vllm_client

from eyas.bench.process import Command
from eyas.remote.address import Address
from fake_openai import Behaviour, Fake


def arguments(**changes: Any) -> Namespace:
    given: dict[str, Any] = {
        "target": "smollm2",
        "max_num_seqs": 8,
        "max_model_len": 512,
        "dtype": "float32",
        "device": "cpu",
        "eyas_options": "--port {port}",
        "vllm_options": "",
        "vllm_python": "/v/python",
        "depth": 0,
        "max_tokens": 8,
        "limit": 3,
    }
    return Namespace(**{**given, **changes})


def test_servers_are_started_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrivals, "locate", lambda name: tmp_path)
    assert list(commands(arguments(), with_vllm=False)) == ["eyas"]
    for command in commands(arguments(depth=3, out=tmp_path), with_vllm=True).values():
        words = Command.of(command).words
        assert words[words.index("--max-num-seqs") + 1] == "8"
        assert "--port" in words
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == 3
    assert (Path(config["model"]) / "config.json").exists()


def test_the_result_of_vllms_client_is_read() -> None:
    result = {"completed": 3, "median_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "p99_itl_ms": 5.0, "output_throughput": 99.5}
    row = row_of_vllm("vllm", 2.5, result)
    assert row["failed"] == 0
    assert line_of(row).split() == ["vllm", "2.5", "10.0", "20.0", "5.0", "99.5", "3", "0"]


def test_our_client_asks_every_prompt_at_the_rate(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    with Fake(Behaviour()) as fake:
        words = own_client(Address.of(fake.url).url, prompts, tmp_path / "out", ["--rate", "50"], 8)
        arrivals._client(words)
        assert len(fake.bodies) == 3
    row = row_of_eyas("eyas", json.loads((tmp_path / "out" / "bench.json").read_text()))
    assert (row["rate"], row["requests"], row["failed"]) == (50.0, 3, 0)
    assert row["first_ms_p99"] >= row["first_ms_p50"] > 0


def test_a_failing_client_is_an_error() -> None:
    with pytest.raises(arrivals.UserError, match="ended with 3: oh"):
        arrivals._client([sys.executable, "-c", "import sys; print('oh', file=sys.stderr); sys.exit(3)"])


def test_vllms_client_gets_the_rate_and_the_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrivals, "locate", lambda name: tmp_path)
    words = shlex.join(vllm_client("http://h:1", 2.5, tmp_path / "p.jsonl", tmp_path / "r.json", arguments()))
    assert "--request-rate 2.5" in words
    assert f"--dataset-path {tmp_path / 'p.jsonl'}" in words
    assert "--num-prompts 3" in words


def test_prompts_are_distinct(tmp_path: Path) -> None:
    prompts = tmp_path / "all.jsonl"
    prompts.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(14)))
    files = arrivals.prompt_files(arguments(prompts=prompts, rate=[1.0, 2.0], out=tmp_path))
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert [len(file.read_text().splitlines()) for file in files] == [arrivals.WARM_UP, 3, 3]
    assert len(set(lines)) == 14
    with pytest.raises(arrivals.UserError, match="lower --limit"):
        arrivals.prompt_files(arguments(prompts=prompts, rate=[1.0, 2.0, 3.0], out=tmp_path))
