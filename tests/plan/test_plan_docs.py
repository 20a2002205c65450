"""Tables and examples of docs/plan.md are those of the code; tests/test_docs.py runs its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from each import each
from eyas.cli.app import app
from eyas.plan.cards import CARDS
from eyas.plan.families import FAMILIES
from eyas.plan.measured import read_measured

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "plan.md").read_text(encoding="utf-8")


def test_the_steps_on_the_page_can_be_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.S | re.M)
    (tmp_path / "steps.json").write_text(block)
    assert len(read_measured(tmp_path / "steps.json").steps) == 2


def test_the_table_of_cards_is_that_of_the_code() -> None:
    told = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d,]+) \| ([\d. /]+) \| ([\d]+) \|", PAGE, re.M)
    assert [name for name, *_ in told] == list(CARDS)
    for name, memory, bandwidth, flops, link in told:
        card = CARDS[name]
        assert float(memory) == pytest.approx(card.memory / 2**30, abs=0.06)
        assert float(bandwidth.replace(",", "")) * 1e9 == card.bandwidth
        assert float(link) * 1e9 == card.link
        assert [float(x) * 1e12 for x in flops.split("/")] == pytest.approx(list(card.flops.values()))


def test_architectures_and_measured_rows_are_those_of_the_code() -> None:
    said = re.search(r"for every\s+architecture: (.*?)\.", PAGE, re.S)
    assert said is not None
    assert "".join(said[1].split()).split(",") == list(FAMILIES)
    words = "plan --gpu cpu --memory 24 --bandwidth 25 --tflops 0.1 --json --measured"
    result = CliRunner().invoke(app, [*words.split(), str(DOCS / "plan-cpu.json")])
    for step in json.loads(result.stdout)["calibration"]["steps"]:
        if step["speedup"] is not None:
            row = re.escape(f"| {step['users']}, {step['depth']:g} |")
            predicted = re.escape(f"{step['predicted_speedup']:.2f}x ({step['speedup_error']:+.1%})")
            assert re.search(f"{row}.*{predicted}", PAGE), row


@each(("name", "cards"), [("kimi-k2", 8), ("qwen3-235b-a22b", 8), ("llama-3.3-70b", 2)])
def test_rows_of_large_targets_are_those_of_the_code(name: str, cards: int) -> None:
    config = Path(__file__).parent / "configs" / f"{name}.json"
    words = ["plan", str(config), "--gpu", "h200", "--tensor-parallel-size", str(cards), "--json"]
    plan = json.loads(CliRunner().invoke(app, [*words, "--users", "16"]).stdout)
    at = {(one["users"], one["depth"]): one for one in plan["expected"]}
    plain, best, memory = at[16, 0], at[16, plan["recommended_depth"]], plan["memory"]
    row = (
        f"| {name} | {cards} | {memory['weights'] / 2**30:.1f} GiB | {memory['kv_per_token'] / 1024:.1f} KiB | "
        f"{plan['users_fit']:,} | {plain['step_seconds'] * 1e3:.1f} ms, {plain['tokens_per_second']:,.0f} | "
        f"depth {best['depth']}: {best['tokens_per_second']:,.0f}, {best['speedup']:.2f}x |"
    )
    assert row in PAGE
    run = json.loads(CliRunner().invoke(app, [*words, "--train", "500M", "--trainers", "8"]).stdout)
    found = {figure["name"]: figure["value"] for figure in run["figures"]}
    row = (
        f"| {name} | {run['memory'] / 2**30:.1f} GiB | {found['a trainer']:,.0f} | {found['the target']:,.0f} | "
        f"{run['servers']} of {cards} | {run['tokens_per_second']:,.0f} | "
        f"{found['states over the network'] / 1e9:.1f} GB/s | {found['a cache on disk'] / 2**40:.1f} TiB | "
        f"{run['hours'] * 60:.0f} min |"
    )
    assert row in PAGE
