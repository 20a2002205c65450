"""Long context benchmark: growth, memory, and a small run on a CPU."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import long_context
import pytest
import torch
from long_context import Context, line_of, with_growth
from memory_floor import step_bytes
from random_models import LONGEST, random_drafter, random_target, write_configs

from each import each
from eyas.drafter.layouts import LAYOUTS


def row(context: int, users: int, ms: float, floor: float, held: int | None = None, depth: int = 0) -> dict[str, Any]:
    return {
        "context": context,
        "users": users,
        "depth": depth,
        "ms_per_step": ms,
        "floor_ms": floor,
        "held_bytes": held,
        "peak_bytes": held,
        "planned_bytes": 2**30,
        "tokens_per_second": 1.0,
        "acceptance_length": 1.0,
        "device_ms": {"verify": 1.5},
        "graphs": 1,
        "graph_mebibytes": 1,
    }


def test_growth_is_against_the_shortest_context_of_as_many_users() -> None:
    rows = [row(1024, 1, 5.0, 4.0), row(1024, 8, 6.0, 4.5), row(32768, 8, 18.0, 12.5), row(32768, 8, 9.0, 8.0, depth=3)]
    grown = with_growth(rows)
    assert [one["growth"] for one in grown] == [None, None, 1.5, None]  # 12 ms more, where the memory takes 8
    assert [one["floor_share"] for one in grown[:2]] == [0.8, 0.75]
    assert "growth  1.50" in line_of(grown[2])


def test_held_memory_is_compared_with_the_plan() -> None:
    (grown,) = with_growth([row(1024, 1, 5.0, 4.0, held=2**29)])
    assert grown["held_ratio"] == 0.5
    assert "held 0.50 GiB, planned 1.00: 0.500" in line_of(grown)


@each("words", ["1024", "1024:", "1024:0", "x:1", "0:1"])
def test_invalid_contexts_are_refused(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        Context.parse(words)


def test_a_drafter_with_a_window_reads_no_more_than_that() -> None:
    target = random_target("tiny", torch.float32, torch.device("cpu"))
    drafter = random_drafter("tiny", target)

    def drafts(context: int, seen: int | None = None) -> int:
        sizes = {"users": 2, "context": context}
        with_drafts = step_bytes(target, drafter, **sizes, depth=3, drafter_context=seen)
        return with_drafts - step_bytes(target, drafter, **sizes, depth=0)

    assert drafts(1000, 100) == drafts(100) < drafts(1000)
    assert drafts(50, 100) == drafts(50)


def test_long_contexts_have_scaled_rotations_in_both_models(tmp_path: Path) -> None:
    target = random_target("tiny", torch.float32, torch.device("cpu"), 131072)
    drafter = random_drafter("tiny", target)
    assert target.facts.max_position_embeddings == drafter.config.max_position_embeddings == 131072
    assert drafter.config.rope_parameters == target.model.config.rope_parameters
    assert drafter.config.rope_parameters["rope_type"] == "llama3"
    folders = write_configs("tiny", target.facts.default_aux_layer_ids(), "float32", tmp_path, 131072)
    own, small = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert own["rope_parameters"] == target.model.config.rope_parameters
    assert LAYOUTS["vllm"].read_config(small)[0].rope_parameters == drafter.config.rope_parameters
    short = random_target("tiny", torch.float32, torch.device("cpu"))
    assert (short.facts.max_position_embeddings, short.model.config.rope_parameters["rope_type"]) == (
        LONGEST,
        "default",
    )


def test_every_prompt_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long.json"
    words = "--shape tiny --device cpu --contexts 32:2 200:1,2 --drafter-window 64 --steps 4"
    monkeypatch.setattr(sys, "argv", ["long_context", *words.split(), "--out", str(out)])
    long_context.main()
    record = json.loads(out.read_text())
    cells = [(row["context"], row["users"], row["depth"]) for row in record["rows"]]
    assert cells == [(32, 2, 0), (32, 2, 3), (200, 1, 0), (200, 1, 3), (200, 2, 0), (200, 2, 3)]
    assert [row["growth"] is None for row in record["rows"]] == [True] * 4 + [False] * 2
    assert all(row["missed_blocks"] == 0 and row["ms_per_step"] > 0 for row in record["rows"])
    assert all(row["held_bytes"] is None and row["planned_bytes"] > 0 for row in record["rows"])
    assert record["notes"] == []
    assert capsys.readouterr().out.count("200 context") == 8  # as they come, and in the table


def test_a_run_out_of_time_has_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape tiny --device cpu --contexts 32:1 --steps 2 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["long_context", *words.split()])
    long_context.main()
    assert "note: context 32: left out, --seconds 0 are over" in capsys.readouterr().out
