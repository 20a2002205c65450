"""Whether requests are looked up, by what that did to the engine's speed."""

import random

import pytest

from eyas.engine.suffix.lookup_gate import ENOUGH, LONGEST, SETTLING, LookupGate


def rounds_with(gate: LookupGate, speed_with: float, rounds: int, *, rows: int = 4, seed: int = 0) -> float:
    """The share of rounds with look-ups where these give so many times the speed, give or take a fifth each time."""
    draw, looked_up = random.Random(seed), 0
    for _ in range(rounds):
        now = gate.is_open(rows)
        looked_up += now
        seconds = 1e-3 * draw.uniform(0.8, 1.2) / (speed_with if now else 1.0)
        gate.observe(rows, looked_up=now, tokens=rows, seconds=seconds)
    return looked_up / rounds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("speed", "least", "most"), [(0.9, 0.0, 0.02), (1.1, 0.98, 1.0)])
def test_the_faster_way_runs_nearly_always(speed: float, least: float, most: float, seed: int) -> None:
    gate = LookupGate()
    rounds_with(gate, speed, 3000, seed=seed)
    assert least <= rounds_with(gate, speed, 3 * LONGEST, seed=seed + 100) <= most


@pytest.mark.parametrize("speed", [0.5, 0.9])
def test_what_loses_costs_little_from_the_beginning(speed: float) -> None:
    assert rounds_with(LookupGate(), speed, 3000) < 0.06


def test_traffic_that_begins_to_repeat_is_found_out() -> None:
    gate = LookupGate()
    assert rounds_with(gate, 0.9, 5000) < 0.1
    assert rounds_with(gate, 3.0, 4 * LONGEST) > 0.5
    assert rounds_with(gate, 3.0, LONGEST) > 0.95


def test_tokens_count_as_much_as_seconds() -> None:
    gate = LookupGate()
    for _ in range(4000):
        now = gate.is_open(1)
        gate.observe(1, looked_up=now, tokens=3 if now else 1, seconds=2e-3 if now else 1e-3)
    assert rounds_with(gate, 1.5, 500, rows=1) > 0.9


def test_numbers_of_requests_are_judged_apart() -> None:
    gate = LookupGate()
    for _ in range(4):
        rounds_with(gate, 0.8, 600, rows=16)
        rounds_with(gate, 2.0, 600, rows=1)
    assert rounds_with(gate, 0.8, 400, rows=16) < 0.1
    assert rounds_with(gate, 2.0, 400, rows=1) > 0.9
    report = gate.report()
    assert [report[rows]["looked_up"] for rows in (1, 16)] == [True, False]
    assert report[1]["tokens_per_second"] == pytest.approx(2 * report[1]["tokens_per_second_without"], rel=0.05)


def test_rounds_of_the_window_before_count_for_neither() -> None:
    gate = LookupGate()
    for _ in range(SETTLING + ENOUGH):
        assert gate.is_open(2)
        gate.observe(2, looked_up=True, tokens=2, seconds=1e-3)
    assert not gate.is_open(2)
    for _ in range(100):
        gate.observe(2, looked_up=True, tokens=100, seconds=1e-3)  # launched before
    assert not gate.is_open(2)
