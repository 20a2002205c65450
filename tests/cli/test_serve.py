"""`eyas serve`: what it refuses before anything is loaded, and a whole server from start to SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from each import each
from eyas.engine.suffix.config import SuffixConfig
from eyas.errors import UserError
from eyas.serve.speculative_config import read_speculative_config

Run = Callable[..., Any]


@each(
    ("arguments", "parts"),
    [
        (["--speculative-config", "{"], ["no JSON", "eagle3"]),
        (["--speculative-config", "[]"], ["no JSON object"]),
        (["--speculative-config", '{"modle": "x"}'], ["modle", "did you mean model"]),
        (["--speculative-config", '{"method": "ngram"}'], ["ngram", "eagle3"]),
        (["--speculative-config", '{"method": "suffix", "model": "d"}'], ["'d'", "suffix drafts have none"]),
        (["--speculative-config", '{"method": "eagle3", "suffix_decoding_max_tree_depth": 9}'], ["eagle3", "auto"]),
        (["--speculative-config", '{"suffix_decoding_max_tree_depth": true}'], ["max_tree_depth", "whole number"]),
        (["--speculative-config", '{"suffix_decoding_max_tree_depth": 1}'], ["max_tree_depth is 1", "2 to 48"]),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], ["0 tokens", "1 to 48", "leave it out for auto"]),
        (["--speculative-config", '{"num_speculative_tokens": 100}'], ["100 tokens", "1 to 48"]),
        (["--speculative-config", '{"num_speculative_tokens": ' + "9" * 5001 + "}"], ["no JSON", "..."]),
        (["--speculative-config", "[" * 50_000], ["no JSON", "..."]),
        (["--speculative-config", '{"suffix_decoding_max_age_seconds": 1' + "0" * 400 + "}"], ["max_age_seconds"]),
        (["--speculative-config", '{"model": "none", "num_speculative_tokens": 3}'], ["model none", "name a drafter"]),
        (["--speculative-config", '{"model": "none", "method": "eagle3"}'], ["model none", "method eagle3"]),
        (["--speculative-config", '{"model": 3}'], ["model 3"]),
        (["somewhere", "--speculative-config", '{"num_speculative_tokens": 3}'], ["somewhere", "add one"]),
        (["--host", "nowhere.invalid"], ["nowhere.invalid", "--host"]),
        (["--chat-template", "nowhere.jinja"], ["--chat-template nowhere.jinja", "No such file"]),
        (["--gpu-memory-utilization", "1.5"], ["gpu_memory_utilization is 1.5", "at most 1"]),
        (["--gpu-memory-utilization", "0.5", "--memory-gib", "1"], ["give one of them"]),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], ["runs on cpu", "--memory-gib"]),
        (["--revision", "v1"], ["--revision v1", "smollm2"]),
        (["--ssl-certfile", "nowhere.pem"], ["--ssl-certfile nowhere.pem", "No such file"]),
        (["--ssl-keyfile", "nowhere.key"], ["--ssl-keyfile nowhere.key", "--ssl-certfile"]),
        (["--root-path", "a b"], ["--root-path", "/eyas"]),
        (["--log-level", "loud"], ["--log-level", "'debug', 'info', 'warning', 'error'"]),
        (["--request-seconds", "0"], ["request_seconds", "above 0"]),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    run: Run, arguments: list[str], parts: list[str]
) -> None:
    run("serve", *arguments).assert_refused(*parts)


@each(
    ("text", "target", "drafter", "depth"),
    [
        (None, "smollm2", "smollm2-eagle3.1", None),
        (None, "somewhere", None, None),
        ("none", "smollm2", None, None),
        ('{"model": "none"}', "smollm2", None, None),
        ('{"method": "eagle3"}', "smollm2", "smollm2-eagle3.1", None),
        ('{"model": "d", "method": "eagle3", "num_speculative_tokens": 3}', "somewhere", "d", 3),
    ],
)
def test_the_config_means_what_it_means_to_vllm(text: str, target: str, drafter: str | None, depth: int | None) -> None:
    config = read_speculative_config(text, target)
    assert (config.drafter, config.depth) == (drafter, depth)
    assert config.speculation.mode == ("auto" if depth is None else "fixed")


@each(
    ("text", "target", "drafter", "method", "suffix"),
    [
        (None, "smollm2", "smollm2-eagle3.1", "auto", SuffixConfig()),
        (None, "somewhere", None, "auto", SuffixConfig()),
        ("none", "smollm2", None, "auto", None),
        ('{"model": "none"}', "smollm2", None, "auto", None),
        ('{"method": "auto", "model": "none"}', "smollm2", None, "auto", SuffixConfig()),
        (
            '{"model": "none", "suffix_decoding_max_tree_depth": 8}',
            "smollm2",
            None,
            "auto",
            SuffixConfig(max_tree_depth=8),
        ),
        ('{"method": "auto"}', "somewhere", None, "auto", SuffixConfig()),
        ('{"model": "d"}', "somewhere", "d", "auto", SuffixConfig()),
        ('{"method": "eagle3"}', "smollm2", "smollm2-eagle3.1", "eagle3", None),
        ('{"method": "suffix"}', "smollm2", None, "suffix", SuffixConfig()),
        (
            '{"method": "suffix", "num_speculative_tokens": 9, "suffix_decoding_max_tree_depth": 32, '
            '"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.2, '
            '"suffix_decoding_max_cached_requests": 0}',
            "somewhere",
            None,
            "suffix",
            SuffixConfig(
                num_speculative_tokens=9,
                max_tree_depth=32,
                max_spec_factor=2,
                min_token_prob=0.2,
                max_cached_requests=0,
            ),
        ),
    ],
)
def test_the_config_says_who_drafts(
    text: str | None, target: str, drafter: str | None, method: str, suffix: SuffixConfig | None
) -> None:
    config = read_speculative_config(text, target)
    assert (config.drafter, config.method, config.suffix) == (drafter, method, suffix)
    assert config.speculation.method == method
    assert config.depth is None


def test_a_fixed_depth_is_the_drafters() -> None:
    config = read_speculative_config('{"num_speculative_tokens": 3}', "smollm2")
    assert (config.depth, config.suffix) == (3, SuffixConfig())
    assert config.speculation.by_drafter
    assert not config.speculation.by_suffix


def test_vllm_drafts_by_eagle3_alone() -> None:
    assert read_speculative_config(None, "smollm2", with_table=True).suffix is None
    assert read_speculative_config('{"num_speculative_tokens": 3}', "smollm2", with_table=True).method == "eagle3"
    for method in ("suffix", "auto"):
        with pytest.raises(UserError, match=f"{method}.*vLLM"):
            read_speculative_config(json.dumps({"method": method}), "smollm2", with_table=True)


def test_how_deep_vllm_may_draft_is_its_own_business() -> None:
    assert read_speculative_config('{"num_speculative_tokens": 100}', "smollm2", with_table=True).depth == 100
    with pytest.raises(UserError, match="0 tokens; give 1 or more"):
        read_speculative_config('{"num_speculative_tokens": 0}', "smollm2", with_table=True)


def test_text_that_is_no_config_is_told_of_in_few_words() -> None:
    for text in ('{"num_speculative_tokens": ' + "9" * 5001 + "}", "[" * 50_000, '"' + "a" * 50_000 + '"'):
        with pytest.raises(UserError, match=r"--speculative-config .* is no JSON") as refused:
            read_speculative_config(text, "smollm2")
        assert len(str(refused.value)) < 600


def test_booleans_are_no_depths() -> None:
    with pytest.raises(UserError, match="True tokens"):
        read_speculative_config('{"num_speculative_tokens": true}', "smollm2")


@pytest.mark.slow
@pytest.mark.default
def test_the_default_serves_and_stops_when_told() -> None:
    command = [sys.executable, "-m", "eyas", "serve", "--port", "0", "--max-model-len", "512", "--max-num-seqs", "4"]
    environment = {**os.environ, "EYAS_API_KEY": "secret-key"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    watchdog = threading.Timer(120, server.kill)
    watchdog.start()
    try:
        said = []
        while not (said and said[-1].startswith("at ")):
            line = server.stderr.readline()
            assert line, said
            said.append(line)
        banner = "".join(said)
        for part in (
            "serving   smollm2",
            "smollm2-eagle3.1, as deep as pays",
            "blocks of 16 tokens",
            "device    ",
            "API keys: 1",
        ):
            assert part in banner
        assert "secret-key" not in banner
        url = said[-1].split()[1].rstrip(",")
        name, page = server.stderr.readline().split()
        assert name == "page"
        assert "<title>eyas</title>" in httpx2.get(page).text
        body = {"messages": [{"role": "user", "content": "Name a bird of prey."}], "max_tokens": 24, "temperature": 0}
        body |= {"ignore_eos": True}
        keyed = {"authorization": "Bearer secret-key"}
        path = f"{url}/chat/completions"
        whole = httpx2.post(path, json=body, headers=keyed, timeout=60).json()["choices"][0]["message"]["content"]
        with httpx2.stream("POST", path, json=body | {"stream": True}, headers=keyed, timeout=60) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            events = [json.loads(next(lines))]
            server.send_signal(signal.SIGTERM)
            *others, last = lines
        assert last == "[DONE]"
        events += map(json.loads, others)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole
        rest = server.stderr.read()
        assert server.wait(30) == 0
    finally:
        watchdog.cancel()
        server.kill()
        server.wait()
    logged = [json.loads(text) for text in rest.splitlines()]  # nothing but JSON once it serves
    assert [line["event"] for line in logged] == ["request", "notice", "request"]
    assert "stopping: 1 answers" in logged[1]["message"]
    assert [logged[i]["completion_tokens"] for i in (0, 2)] == [24, 24]
    assert "bird" not in rest
