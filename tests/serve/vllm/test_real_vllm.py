"""`eyas serve --engine vllm` with the real vLLM on this machine, beside eyas' own engine: `make vllm-engine`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = os.environ.get("EYAS_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="needs the real vLLM 0.32: run `make vllm-engine`"),
]
KEY, DEPTH = "a-key", 3
CONFIG = json.dumps({"model": "smollm2-eagle3.1", "method": "eagle3", "num_speculative_tokens": DEPTH})
COMMON = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--speculative-config", CONFIG]
NEAR_TIE = 2e-3
"""Of two log probabilities: what two orders of float32 sums may turn round."""
LONGEST_DIFFERENCE = 0.03
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about an eagle that learns to fish.",
    "Explain how a refrigerator works.",
    "List five uses of olive oil.",
    "Write a Python function that reverses a string.",
    "What is 12 times 7, and why?",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Translate to French: the cat sleeps on the chair.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write an e-mail that asks a colleague for a meeting.",
    "Name three birds of prey and what they eat.",
]


class Server:
    """A started `eyas serve`."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.process = url, process

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                text = reply.read().decode()
                return reply.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def chat(self, content: str, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64, **fields}
        status, reply = self.ask("/v1/chat/completions", body)
        assert status == 200, reply
        return reply


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[Server]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyas", "serve", "--port", "0", "--api-key", KEY, *COMMON, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        deadline = time.monotonic() + 900
        while (found := re.search(r"^at +(\S+)/v1", log.read_text(), re.M)) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield Server(found[1], process)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("own") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("vllm") / "log", "--engine", "vllm", "--", "--enforce-eager") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        sessions = {int(pid) for pid in children}
        yield server
    deadline = time.monotonic() + 10
    while left := [one.name for one in Path("/proc").glob("[0-9]*") if session_of(one) in sessions]:
        assert time.monotonic() < deadline, f"{left} outlive eyas"
        time.sleep(0.1)


def session_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return -1


def test_greedy_text_is_the_same_but_for_near_ties_and_so_is_acceptance(own: Server, vllm: Server) -> None:
    counts = {"own": [0, 0], "vllm": [0, 0]}
    ties = []
    for prompt in PROMPTS:
        replies = {name: server.chat(prompt, logprobs=True, top_logprobs=2, return_token_ids=True)
                   for name, server in (("own", own), ("vllm", vllm))}  # fmt: skip
        for name, reply in replies.items():
            told = reply["usage"]["speculative"]
            counts[name][0] += told["accepted_tokens"]
            counts[name][1] += told["drafts"]
        ours, theirs = (reply["choices"][0] for reply in replies.values())
        place = next(
            (i for i, (a, b) in enumerate(zip_longest(ours["token_ids"], theirs["token_ids"])) if a != b), None
        )
        if place is None:
            assert ours["message"] == theirs["message"]
            assert ours["finish_reason"] == theirs["finish_reason"]
            continue
        first, second = (one["logprob"] for one in ours["logprobs"]["content"][place]["top_logprobs"])
        ties.append((prompt, place, first - second))
    lengths = {name: 1 + accepted / drafts for name, (accepted, drafts) in counts.items()}
    print(f"\nacceptance length at depth {DEPTH}: {lengths}; partings: {ties}")
    assert all(gap < NEAR_TIE for _, _, gap in ties), ties
    assert lengths["vllm"] == pytest.approx(lengths["own"], rel=LONGEST_DIFFERENCE)
    assert counts["vllm"][1] > 100


def test_the_api_is_the_same(own: Server, vllm: Server) -> None:
    question = PROMPTS[0]
    assert vllm.ask("/v1/models", key="wrong")[0] == 401
    for fields in (
        {"stop": ["Paris"]},
        {"stop": ["capital"], "include_stop_str_in_output": True},
        {"max_tokens": 5, "n": 2},
        {"max_tokens": 12, "ignore_eos": True},
        {"max_tokens": 16, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"max_tokens": 16, "min_tokens": 14},
        {"max_tokens": 6, "allowed_token_ids": list(range(300, 900))},
        {"max_tokens": 24, "stop_token_ids": [30]},
    ):
        ours, theirs = own.chat(question, **fields), vllm.chat(question, **fields)
        assert [one["message"] for one in theirs["choices"]] == [one["message"] for one in ours["choices"]], fields
        assert [one["stop_reason"] for one in theirs["choices"]] == [one["stop_reason"] for one in ours["choices"]]
        assert theirs["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"]
    body = {"prompt": "The falcon is a", "max_tokens": 4, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    (_, ours), (_, theirs) = own.ask("/v1/completions", body), vllm.ask("/v1/completions", body)
    for name in ("token_logprobs", "tokens", "text_offset"):
        told = theirs["choices"][0]["logprobs"][name], ours["choices"][0]["logprobs"][name]
        assert told[0] == (pytest.approx(told[1], abs=1e-3) if name == "token_logprobs" else told[1])
    for row, other in zip(ours["choices"][0]["prompt_logprobs"], theirs["choices"][0]["prompt_logprobs"], strict=True):
        assert (row is None) == (other is None)
        assert row is None or {token: one["rank"] for token, one in row.items()} == {
            token: one["rank"] for token, one in other.items()
        }
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    said = vllm.chat("Make up a person.", response_format=format_, max_tokens=64)["choices"][0]["message"]["content"]
    assert set(json.loads(said)) == {"name", "age"}
    assert "\n" not in said
    for choice in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "(yes|no)"}):
        assert vllm.chat("Is water wet?", **choice)["choices"][0]["message"]["content"] in ("yes", "no")


def test_what_vllm_cannot_do_is_refused(vllm: Server) -> None:
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    refused = {"bad_words": ["a"], "logit_bias": {"5": 1}, "speculative": {"mode": "off"}, "temperature": 1}
    for field, value in refused.items():
        status, reply = vllm.ask("/v1/completions", body | {field: value})
        assert (status, reply["error"]["param"]) == (400, field)


def test_without_a_drafter_it_draws_and_a_seed_decides(tmp_path: Path) -> None:
    plain = ("--speculative-config", "none", "--engine", "vllm", "--", "--enforce-eager")
    with started(tmp_path / "log", *plain) as server:
        ways = [{"seed": 1}, {"seed": 1}, {"seed": 2}, {"min_p": 0.1}, {"top_k": 5}, {"logit_bias": {"57": 100}}]
        drawn = [server.chat("Say something.", temperature=1, max_tokens=12, **way) for way in ways]
        texts = [reply["choices"][0]["message"]["content"] for reply in drawn]
        assert texts[0] == texts[1] != texts[2]
        assert len(set(texts[-1])) == 1
        assert drawn[0]["usage"]["speculative"]["drafts"] == 0


def test_a_client_that_leaves_frees_its_place(vllm: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{vllm.url}/v1/completions", json.dumps(body).encode(), headers)
    stream = urllib.request.urlopen(request, timeout=60)
    stream.readline()
    assert vllm.ask("/status")[1]["load"]["running"] == 1
    stream.close()
    deadline = time.monotonic() + 20
    while vllm.ask("/status")[1]["load"]["running"]:
        assert time.monotonic() < deadline, "vLLM still answers"
        time.sleep(0.2)


def test_status_and_metrics_tell_vllms_counts(vllm: Server) -> None:
    before = vllm.ask("/status")[1]
    reply = vllm.chat(PROMPTS[1])
    after = vllm.ask("/status")[1]
    assert after["served"]["engine"].startswith("vLLM 0.32")
    assert after["counts"]["drafts"] - before["counts"]["drafts"] == reply["usage"]["speculative"]["drafts"]
    text = vllm.ask("/metrics")[1]
    assert f"eyas_spec_decode_num_drafts_total {after['counts']['drafts']}.0" in text
    assert "vllm:spec_decode_num_drafts_total" in text


def test_the_bench_measures_it(vllm: Server, tmp_path: Path) -> None:
    from eyas.cli.app import app

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[:4]))
    words = ["bench", "--url", vllm.url, "--api-key", KEY, "--workload", str(prompts), "--users", "1,4"]
    words += ["--repetitions", "1", "--max-tokens", "32", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert [(row["mode"], row["users"], row["failed"]) for row in rows] == [
        ("speculative", 1, 0),
        ("speculative", 4, 0),
    ]
    assert all(row["acceptance"]["drafts"] for row in rows)
