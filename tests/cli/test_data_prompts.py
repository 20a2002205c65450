"""`eyas data prompts` writes what `eyas data answer` reads, goes on where it was, and refuses what gives nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_targets import FAMILIES, save_target

Run = Callable[..., Any]


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(FAMILIES["qwen3"], tmp_path_factory.mktemp("asked") / "t")


def rows(out: Path) -> dict[int, str]:
    return {row["id"]: row["prompt"] for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}


def test_prompts_are_drawn_gone_on_with_and_answered(folder: Path, tmp_path: Path, run: Run) -> None:
    out, whole = tmp_path / "prompts.jsonl", tmp_path / "whole.jsonl"
    common = ["--target", folder, "--max-tokens", 12, "--dtype", "float32", "--device", "cpu"]
    outcome = run("data", "prompts", 20, "--out", out, *common, "--json")
    assert outcome.code == 0, outcome
    counts = json.loads(outcome.out)
    assert (
        counts["asked"]
        == sum(counts[name] for name in ("written", "cut", "unfit", "evaluated", "duplicate", "failed"))
        == 20
    )
    assert (counts["written"], counts["failed"]) == (len(rows(out)), 0)
    assert counts["written"] > 3
    assert not any(token in prompt for prompt in rows(out).values() for token in FAMILIES["qwen3"].special)
    outcome = run("data", "prompts", 40, "--out", out, *common)
    assert outcome.code == 0, outcome
    assert f"earlier        {counts['written']:>12,}" in outcome.out
    assert run("data", "prompts", 40, "--out", whole, *common).code == 0
    assert rows(out) == rows(whole)
    outcome = run("data", "prompts", 40, "--out", out, *common, "--system", "be brief")
    assert outcome.code == 2
    assert "was begun with system None and this run has 'be brief'" in outcome.err
    fewer = run("data", "prompts", 40, "--out", tmp_path / "fewer.jsonl", *common, "--eval", whole, "--json")
    assert (json.loads(fewer.out)["evaluated"], rows(tmp_path / "fewer.jsonl")) == (len(rows(whole)), {})
    answers = tmp_path / "answers.jsonl"
    limits = ["--max-thinking-tokens", 4, "--max-length", 64]
    outcome = run("data", "answer", out, "--out", answers, *common, *limits, "--json")
    assert outcome.code == 0, outcome
    assert json.loads(outcome.out)["total"] == len(rows(out))


def test_what_gives_no_prompts_is_refused(folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "prompts.jsonl"
    command = ["data", "prompts", 5, "--out", out, "--target", folder]
    run("data", "prompts", 0, "--out", out).assert_refused("COUNT is 0")
    run(*command, "--temperature", 0).assert_refused("--temperature 0", "again and again")
    run("data", "prompts", 5, "--out", out, "--server", "http://127.0.0.1:9").assert_refused("--target")
    run(*command, "--server", "http://127.0.0.1:9", "--dtype", "float32").assert_refused("--dtype float32")
    outcome = run(*command, "--chat-template", "{{ messages[0].content }}")
    assert outcome.code == 2
    assert "writes nothing before a user's words" in outcome.err
    assert not out.exists()
