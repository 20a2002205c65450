"""Constants are found again from steps that were made with them, and the error that is told is one of rows unseen."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.plan.calibrate import MeasuredStep, calibrate, check, choose_overlap
from eyas.plan.cards import find_card
from eyas.plan.decoder import read_decoder
from eyas.plan.measured import read_measured
from eyas.plan.quantisation import parse_quantisation
from eyas.plan.resolve import DEFAULT_CONFIG, drafter_shape
from eyas.plan.roofline import Pair, Speed, speed_of

PAIR = Pair(
    decoder=read_decoder(DEFAULT_CONFIG, "smollm2"),
    drafter=drafter_shape("smollm2-eagle3.1"),
    quantisation=parse_quantisation("float32"),
)
START = speed_of(find_card("cpu", memory=24, bandwidth=40, tflops=0.2), PAIR.quantisation)
TRUE = START.scaled((1.7, 0.6, 2.5, 0.4))
LENGTHS = {0: 1.0, 1: 1.6, 3: 2.2, 5: 2.5}


def steps(speed: Speed, noise: float = 0.0) -> list[MeasuredStep]:
    chance = random.Random(0)
    made = []
    for users in (1, 4, 16):
        for depth, length in LENGTHS.items():
            step = MeasuredStep(users=users, depth=depth, length=length, seconds=1.0, context=100.0 * users)
            seconds = speed.seconds(*step.works(PAIR)) * (1 + chance.uniform(-noise, noise))
            made.append(MeasuredStep(**{**vars(step), "seconds": seconds}))
    return made


def test_constants_are_found_again() -> None:
    found = calibrate(PAIR, START, steps(TRUE))
    for step in steps(TRUE):
        assert found.seconds(*step.works(PAIR)) == pytest.approx(step.seconds, rel=0.02)
    assert all(part >= 0 for part in found.parts)


@pytest.mark.parametrize("overlap", [1.0, 1.5, 3.0])
def test_the_overlap_that_steps_were_made_with_is_chosen(overlap: float) -> None:
    true = replace(TRUE, overlap=overlap)
    assert choose_overlap(PAIR, START, steps(true, noise=0.01)).overlap == overlap
    assert choose_overlap(PAIR, START, steps(true)[:7]) is START, "too few to tell"


def test_one_row_moves_the_constants_towards_it_and_keeps_them_sane() -> None:
    (row,) = [step for step in steps(TRUE) if step.users == 1 and step.depth == 0]
    found = calibrate(PAIR, START, [row])
    assert found.seconds(*row.works(PAIR)) == pytest.approx(row.seconds, rel=0.05)
    for start, end in zip(START.parts, found.parts, strict=True):
        assert 0.2 * start < end < 5 * start


def test_rows_left_out_are_predicted_and_noise_shows_in_the_error() -> None:
    exact = check(PAIR, START, steps(TRUE))
    noisy = check(PAIR, START, steps(TRUE, noise=0.2))
    assert max(abs(one.error) for one in exact) < 0.03
    assert max(abs(one.speedup_error) for one in exact if one.speedup_error is not None) < 0.05
    assert max(abs(one.error) for one in noisy) > 0.05, "a machine of moods is not said to be predictable"
    assert all((one.speedup is None) == (one.step.depth == 0) for one in exact)


def test_the_error_of_a_row_does_not_come_from_the_row_itself() -> None:
    made = steps(TRUE)
    odd = MeasuredStep(**{**vars(made[-1]), "seconds": 3 * made[-1].seconds})
    assert check(PAIR, START, [*made[:-1], odd])[-1].error == pytest.approx(1 / 3 - 1, abs=0.05)


def write(path: Path, rows: object) -> Path:
    path.write_text(json.dumps({"target": "smollm2", "quantisation": "float32", "steps": rows}))
    return path


def test_a_bench_is_read(tmp_path: Path) -> None:
    rows = [
        {"users": 2, "depth": 0, "tokens_per_second": 50, "context": 100},
        {"users": 2, "depth": 3, "length": 2.0, "tokens_per_second": 80, "context": 100, "accepted": [0.6, 0.3, 0.1]},
    ]
    bench = read_measured(write(tmp_path / "bench.json", rows))
    assert [step.seconds for step in bench.steps] == pytest.approx([0.04, 0.05])
    assert bench.profile is not None
    assert bench.profile.length(3) == pytest.approx(2.0)


def bench_row(**changes: object) -> dict[str, object]:
    drafted = {"drafts": 50, "drafted_tokens": 150, "accepted_tokens": 60, "by_depth": [0.7, 0.4, 0.1]}
    return {
        "server": "one",
        "mode": "speculative",
        "users": 2,
        "requests": 4,
        "failed": 0,
        "output_tokens": 110,
        "prompt_tokens": 400,
        "time_per_output_token_ms": {"mean": 25.0},
        "acceptance": drafted,
        **changes,
    }


def test_a_record_of_eyas_bench_is_read(tmp_path: Path) -> None:
    plain = bench_row(mode="plain", acceptance={"drafts": 0, "drafted_tokens": 0, "accepted_tokens": 0, "by_depth": []})
    others = [bench_row(server="two"), bench_row(users=None, rate=2.0), bench_row(failed=1)]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"schema": "eyas.bench/1", "rows": [bench_row(), plain, *others]}))
    bench = read_measured(path)
    drafted, undrafted = bench.steps
    assert (drafted.depth, drafted.length) == (3.0, 110 / 50)
    assert drafted.seconds == pytest.approx(0.025 * 2.2), "a step gives 2.2 tokens to every user"
    assert drafted.context == pytest.approx(100 + 110 / 4 / 2)
    assert (undrafted.depth, undrafted.length, undrafted.seconds) == (0.0, 1.0, 0.025)
    assert bench.profile is not None
    assert bench.profile.length(3) == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"schema": "eyas.bench/2", "rows": []}, "eyas.bench/2"),
        ({"schema": "eyas.bench/1", "rows": []}, "no row"),
        ({"schema": "eyas.bench/1", "rows": [bench_row(output_tokens="x")]}, "output_tokens 'x'"),
        ({"schema": "eyas.bench/1", "rows": [bench_row(output_tokens=60)]}, "60 accepted tokens among 60"),
        ([], "holds a list"),
    ],
)
def test_other_records_are_refused(tmp_path: Path, record: object, said: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=said):
        read_measured(path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "holds no steps"),
        ("x", "holds no steps"),
        ([3], "step 1 .* must be an object"),
        ([{"users": 0, "depth": 0, "tokens_per_second": 5, "context": 1}], "users 0"),
        ([{"users": 1, "depth": 0, "context": 1}], "tokens_per_second None"),
        ([{"users": 1, "depth": 3, "tokens_per_second": 5, "context": 1}], "length None"),
        ([{"users": 1, "depth": 3, "length": 4.5, "tokens_per_second": 5, "context": 1}], "4.5 at depth 3"),
        (
            [{"users": 1, "depth": 1, "length": 1.5, "tokens_per_second": 5, "context": 1, "accepted": [2]}],
            r"accepted \[2\]",
        ),
    ],
)
def test_a_bench_that_says_something_else_is_refused(tmp_path: Path, rows: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_measured(write(tmp_path / "bench.json", rows))


def test_a_file_that_is_no_bench_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read --measured"):
        read_measured(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_measured(tmp_path / "bad.json")
