"""`eyas generate`: one prompt or many, and what it refuses before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from each import each

Run = Callable[..., Any]


@each(
    ("arguments", "parts"),
    [
        ([], ["a prompt or --file"]),
        (["hello", "--file", "prompts.jsonl"], ["a prompt or --file"]),
        (["hello", "--depth", "deep"], ["--depth deep", "auto"]),
        (["hello", "--drafter", "none", "--depth", "3"], ["--depth 3", "--drafter"]),
        (["hello", "--target", "t", "--tree", "5x4x24"], ["--tree 5x4x24", "--drafter"]),
        (["hello", "--drafter", "d", "--tree", "5x4"], ["--tree 5x4", "DEPTHxWIDTHxBUDGET"]),
        (["hello", "--drafter", "d", "--tree", "5x0x4"], ["width", "0", "1 or more"]),
        (["hello", "--temperature", "-1"], ["temperature -1"]),
        (["hello", "--kv-cache-dtype", "fp8_e5m2"], ["kv_cache_dtype is 'fp8_e5m2'", "auto, fp8, fp8_e4m3"]),
        (["hello", "--min-p", "2"], ["min_p 2", "0"]),
        (["--file", "nowhere.jsonl"], ["nowhere.jsonl"]),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_loaded(
    run: Run, arguments: list[str], parts: list[str]
) -> None:
    outcome = run("generate", *arguments)
    assert outcome.code != 0
    assert outcome.out == ""
    assert "loading" not in outcome.err
    for part in parts:
        assert part in outcome.err


def test_a_file_without_a_question_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "silent.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "Hello"}]}) + "\n")
    outcome = run("generate", "--file", path)
    assert outcome.code != 0
    assert str(path) in outcome.err


@pytest.mark.default
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Name a bird, number {i}."}) + "\n" for i in range(3)))
    options = ["--max-tokens", "6", "--temperature", "0.9", "--json"]
    batch = run("generate", "--file", path, *options)
    assert batch.code == 0, batch.err
    answers = [json.loads(line) for line in batch.out.splitlines()]
    assert [answer["tokens"] for answer in answers] == [6, 6, 6]
    for number, answer in enumerate(answers):
        alone = run("generate", f"Name a bird, number {number}.", *options, "--seed", str(number))
        assert json.loads(alone.out)["answer"] == answer["answer"]
