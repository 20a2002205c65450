"""The demo answers with and without drafts, and the text is the same."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from each import each

Run = Callable[..., Any]


@pytest.mark.default
def test_drafts_change_the_speed_and_not_the_text(run: Run) -> None:
    outcome = run("demo", "Name three birds of prey.", "--max-tokens", "24", "--depth", "3", "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    (row,) = told["prompts"]
    assert row["same"]
    assert 0 < row["tokens"] <= 24
    assert row["accepted"] > 0
    assert row["acceptance_length"] == 1 + row["accepted"] / row["drafts"]
    for figures in (row, told["all"]):
        assert figures["speedup"] == pytest.approx(row["plain_seconds"] / row["drafted_seconds"])


@pytest.mark.default
def test_people_see_both_speeds(run: Run) -> None:
    outcome = run("demo", "Say hello.", "--max-tokens", "6", "--depth", "2")
    assert outcome.code == 0, outcome.err
    assert "plain" in outcome.out
    assert "acceptance length" in outcome.out


@each(
    ("arguments", "parts"),
    [
        (["--target", "somewhere"], ["somewhere", "--drafter"]),
        (["--drafter", "none"], ["smollm2", "--drafter"]),
        (["--depth", "0"], ["--depth 0", "auto"]),
        (["--depth", "deep"], ["--depth deep", "auto"]),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(
    run: Run, arguments: list[str], parts: list[str]
) -> None:
    outcome = run("demo", *arguments)
    assert outcome.code != 0
    assert "loading" not in outcome.err
    for part in parts:
        assert part in outcome.err
