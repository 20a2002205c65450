"""Table of ratios, and a drafter at depth 0 that reads without drafting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_drafter, random_target
from ratio_table import BOTH, COLD, PLAIN, SUFFIX, VLLM_PLAIN, Outcome, draw, rows_of, table
from zero_tax import closed_loop

from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.sampling import Sampling


def outcome(speed: float) -> Outcome:
    return Outcome(tokens=100, seconds=100 / speed, steps=10, whole_speed=speed)


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    arguments = {"target": "t", "drafter": "d"}
    return {
        "arguments": arguments,
        "device": "cpu",
        "dtype": "float32",
        "seconds": 1.0,
        "notes": ["no vLLM"],
        "rows": rows,
    }


def test_ratios_are_within_a_round_and_vllms_depth_is_against_its_own_plain(tmp_path: Path) -> None:
    rounds = [
        {
            PLAIN: outcome(100 * mood),
            "auto": outcome(150 * mood),
            VLLM_PLAIN: outcome(50 * mood),
            "vLLM depth 3": outcome(60 * mood),
        }
        for mood in (1.0, 0.5, 2.0)
    ]
    rows = rows_of(4, rounds, [(outcome(110), outcome(100))])
    assert [row["mode"] for row in rows] == [PLAIN, "auto", COLD, VLLM_PLAIN, "vLLM depth 3"]
    found = {row["mode"]: row["ratio"] for row in rows}
    assert found["auto"]["median"] == pytest.approx(1.5)
    assert (found["auto"]["low"], found["auto"]["high"]) == (pytest.approx(1.5), pytest.approx(1.5))
    assert found[VLLM_PLAIN]["median"] == pytest.approx(0.5)
    assert found["vLLM depth 3"]["median"] == pytest.approx(1.2)
    assert (found[COLD]["median"], found[COLD]["low"]) == (pytest.approx(1.1), None)
    told = table(record([*rows, *rows_of(16, rounds[:1], [])]))
    assert "1.500 [1.500, 1.500]" in told
    assert "vLLM depth 3 / vLLM plain" in told
    assert "note: no vLLM" in told
    draw(record(rows), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_both_sources_are_compared_with_plain_and_with_the_drafter_alone(tmp_path: Path) -> None:
    round_ = {PLAIN: outcome(100), "auto": outcome(120), SUFFIX: outcome(110), BOTH: outcome(150)}
    rows = rows_of(1, [round_], [])
    ratios = {(row["mode"], row["against"]): row["ratio"]["median"] for row in rows}
    assert ratios[BOTH, PLAIN] == pytest.approx(1.5)
    assert ratios[BOTH, "auto"] == pytest.approx(1.25)
    assert ratios[SUFFIX, PLAIN] == pytest.approx(1.1)
    told = table(record(rows))
    assert "both / plain" in told
    assert "both / auto" in told
    draw(record(rows), tmp_path / "p.png")


def test_concurrency_is_limited_and_depth_0_reads_without_drafting() -> None:
    target = random_target("tiny", torch.float32, torch.device("cpu"))
    config = EngineConfig(max_num_seqs=4, max_model_len=128, memory=2**24)
    engine = Engine(target, random_drafter("tiny", target), config=config)
    read, running = [], []
    step = engine.step

    def watched() -> Any:
        pieces = step()
        running.append(len(engine.scheduler.running))
        read.extend(seq.drafter_length for seq in engine.scheduler.running)
        return pieces

    engine.step = watched  # type: ignore[method-assign]

    def requests(speculation: Speculation) -> list[Request]:
        prompts = [tuple(range(3 + i, 67 + i)) for i in range(5)]
        return [Request(prompt=p, sampling=Sampling(), max_new_tokens=6, speculation=speculation) for p in prompts]

    done = closed_loop(engine, requests(Speculation(mode="fixed", depth=0)), 2)
    assert (done.acceptance_length, engine.stats.drafts) == (None, 0)
    assert done.tokens == 24  # of 30: the fifth request had no other beside it
    assert max(running) == 2
    assert max(read) >= 60  # the drafter has read prompts
    read.clear()
    closed_loop(engine, requests(Speculation(mode="off")), 2)
    assert max(read) == 0
    cut = closed_loop(engine, requests(Speculation(mode="fixed", depth=2)), 2, steps=3)
    assert cut.steps == 3
    assert not engine.busy
    assert engine.block_manager.used == 0
