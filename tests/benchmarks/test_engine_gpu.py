"""GPU benchmark: the table of both engines, and a small run on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import engine_gpu
import pytest
import torch
from engine_gpu import line_of, row_of
from memory_floor import bandwidth, step_bytes
from random_models import random_drafter, random_target
from tossed_engine import chance_of

from each import each
from eyas.target.model import Target


def run(tokens: int, seconds: float, ms: float = 1.0) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "steps": 8, "ms_per_step": ms}


@pytest.fixture(scope="module")
def tiny() -> Target:
    return random_target("tiny", torch.float32, torch.device("cpu"))


def test_ratios_are_of_the_same_round() -> None:
    # The machine is twice as slow in the second round; ours is 1.5 times as fast in all of them.
    row = row_of(
        4,
        0,
        [run(300, 1.0, 2.0), run(300, 2.0, 4.0), run(300, 1.0, 2.0)],
        [run(200, 1.0), run(200, 2.0), run(200, 1.0)],
        0.5,
    )
    assert row["ratios"] == [pytest.approx(1.5)] * 3
    assert (row["ratio"], row["tokens_per_second"], row["vllm_tokens_per_second"]) == (pytest.approx(1.5), 300.0, 200.0)
    assert (row["floor_share"], row["vllm_floor_share"]) == (0.25, 0.5)
    assert "1.500" in line_of(row)


def test_without_vllm_its_columns_are_empty() -> None:
    row = row_of(1, 3, [run(100, 1.0)], [], 0.1)
    assert row["ratio"] is row["vllm_tokens_per_second"] is row["vllm_floor_share"] is None
    assert "vLLM -" in line_of(row)


def test_a_step_reads_weights_once_and_the_keys_of_all_requests(tiny: Target) -> None:
    drafter = random_drafter("tiny", tiny)
    weights = sum(p.nbytes for p in tiny.model.parameters())  # tied: the head is the table, and is read
    keys = 2 * 8 * 2 * 32 * 4  # of a token: both, layers, heads, their width, bytes
    buffers = sum(b.nbytes for b in tiny.model.buffers())
    plain = step_bytes(tiny, drafter, users=3, context=10, depth=0)
    assert plain - step_bytes(tiny, drafter, users=3, context=0, depth=0) == 30 * keys
    assert weights <= plain - 30 * keys <= weights + buffers
    once, deeper = (step_bytes(tiny, drafter, users=3, context=10, depth=depth) - plain for depth in (1, 3))
    assert once > 0
    assert deeper == 3 * once - 2 * drafter.fc.weight.nbytes  # only the first pass reads the target's states
    assert bandwidth(torch.device("cpu")) > 1e8


def test_keys_in_8_bits_are_a_byte_each(tiny: Target) -> None:
    drafter = random_drafter("tiny", tiny)
    wide, narrow = (
        step_bytes(tiny, drafter, users=3, context=10, depth=1, kv_cache_dtype=kept)
        - step_bytes(tiny, drafter, users=3, context=0, depth=1)
        for kept in ("auto", "fp8")
    )
    assert wide == 4 * narrow > 0, "float32 has four"


def test_a_step_reads_only_the_chosen_experts() -> None:
    target = random_target("tiny-experts", torch.float32, torch.device("cpu"))
    experts = sum(p.nbytes for p in target.model.parameters() if p.ndim == 3)
    one, two, many = (step_bytes(target, None, users=users, context=0, depth=0) for users in (1, 2, 500))
    assert many - one == pytest.approx(experts * 6 / 8, rel=1e-6)  # two of eight
    assert many - two == pytest.approx(experts * (6 / 8) ** 2, rel=1e-6)


@each(("length", "depth"), [(1.0, 3), (2.5, 3), (4.0, 3), (1.5, 1)])
def test_the_coin_gives_the_acceptance_length(length: float, depth: int) -> None:
    chance = chance_of(length, depth)
    assert sum(chance**d for d in range(depth + 1)) == pytest.approx(length)


@pytest.mark.slow
def test_both_engines_are_measured_in_turn(
    vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    words = "--shape tiny --device cpu --dtype float32 --users 1 --users 2 --prompt 4 --new 6 --rounds 2 --warm-ups 0"
    monkeypatch.setattr(sys, "argv", ["engine_gpu", *words.split(), "--vllm-python", vllm_python, "--out", str(out)])
    engine_gpu.main()
    record = json.loads(out.read_text())
    plain = [row for row in record["rows"] if row["depth"] == 0]
    assert [row["users"] for row in plain] == [1, 2]
    assert all(len(row["ratios"]) == 2 and row["vllm_steps"] == [6, 6] for row in plain)
    drafted = [row for row in record["rows"] if row["depth"] == 3]
    assert [row["ratio"] for row in drafted] == [None, None]  # the toy knows no drafts, and that is told
    assert "no drafts here" in record["notes"][0]
    printed = capsys.readouterr().out
    assert "no drafts here" in printed
    assert printed.count("users  depth 0") == 4  # as they come, and in the table


def test_a_run_out_of_time_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    words = "--shape tiny --device cpu --dtype float32 --users 1 --depth 0 --prompt 4 --new 4 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["engine_gpu", *words.split(), "--out", str(out)])
    engine_gpu.main()
    assert not out.exists()


def test_forced_acceptance_of_trees_follows_first_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "gpu.json"
    words = "--shape tiny --device cpu --dtype float32 --users 1 --depth 1 --tree 1x3x3 --length 2 --prompt 4 --new 17"
    monkeypatch.setattr(
        sys, "argv", ["engine_gpu", *words.split(), "--rounds", "1", "--warm-ups", "0", "--out", str(out)]
    )
    engine_gpu.main()
    (row,) = json.loads(out.read_text())["rows"]
    # One deep, where the first candidate is always kept: deeper, random weights may keep none of its children.
    assert row["acceptance_length"] == pytest.approx(2.0)
