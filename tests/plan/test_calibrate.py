"""The fit recovers known constants, keeps factors by tokens, and reports errors of rows left out."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from each import each
from eyas.errors import UserError
from eyas.plan.calibrate import MeasuredStep, StepWork, calibrate, check, choose_overlap, find_calibration
from eyas.plan.cards import find_card
from eyas.plan.decoder import read_decoder
from eyas.plan.measured import read_measured
from eyas.plan.quantisation import parse_quantisation
from eyas.plan.request import measured_pair
from eyas.plan.resolve import DEFAULT_CONFIG, drafter_shape
from eyas.plan.roofline import AS_FITTED, Factors, Pair, PassFactors, Speed, speed_of

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
            seconds = step.work(PAIR).seconds(speed) * (1 + chance.uniform(-noise, noise))
            made.append(MeasuredStep(**{**vars(step), "seconds": seconds}))
    return made


def works(made: list[MeasuredStep]) -> list[StepWork]:
    return [step.work(PAIR) for step in made]


def test_the_fit_recovers_constants() -> None:
    found = calibrate(START, works(steps(TRUE)))
    for work in works(steps(TRUE)):
        assert found.seconds(work.verify, work.drafts) == pytest.approx(work.step.seconds, rel=0.02)
    assert all(part >= 0 for part in found.parts)


@each("overlap", [1.0, 1.5, 3.0])
def test_the_fit_chooses_the_true_overlap(overlap: float) -> None:
    true = replace(TRUE, overlap=overlap)
    assert choose_overlap(START, works(steps(true, noise=0.01))).overlap == overlap
    assert choose_overlap(START, works(steps(true)[:7])) is START, "too few to tell"


def test_a_fit_to_one_row_stays_near_the_start() -> None:
    (row,) = works([step for step in steps(TRUE) if step.users == 1 and step.depth == 0])
    found = calibrate(START, [row])
    assert found.seconds(row.verify) == pytest.approx(row.step.seconds, rel=0.05)
    for start, end in zip(START.parts, found.parts, strict=True):
        assert 0.2 * start < end < 5 * start


def test_left_out_rows_are_predicted_and_noise_raises_the_error() -> None:
    exact = check(START, works(steps(TRUE)))
    noisy = check(START, works(steps(TRUE, noise=0.2)))
    assert max(abs(one.error) for one in exact) < 0.03
    assert max(abs(one.speedup_error) for one in exact if one.speedup_error is not None) < 0.05
    assert max(abs(one.error) for one in noisy) > 0.05, "a machine of moods is not said to be predictable"
    assert all((one.speedup is None) == (one.step.depth == 0) for one in exact)


def test_the_error_of_a_row_is_independent_of_the_row() -> None:
    made = steps(TRUE)
    odd = MeasuredStep(**{**vars(made[-1]), "seconds": 3 * made[-1].seconds})
    assert check(START, works([*made[:-1], odd]))[-1].error == pytest.approx(1 / 3 - 1, abs=0.05)


STAIR = PassFactors(
    verify=Factors(points=((4, 1.0), (5, 1.4), (16, 1.1), (96, 0.9))),
    first_draft=Factors(points=((1, 1.5), (16, 1.1))),
    further_drafts=Factors(points=((1, 0.6), (16, 1.2))),
)


def stairs(users: tuple[int, ...] = (1, 2, 4, 8, 16)) -> list[MeasuredStep]:
    """Steps of a machine whose kernels change with the tokens of a pass."""
    true = replace(TRUE, factors=STAIR)
    made = []
    for count in users:
        for depth, length in {**LENGTHS, 2: 2.0, 4: 2.4, 7: 2.6}.items():
            step = MeasuredStep(users=count, depth=depth, length=length, seconds=1.0, context=100.0)
            verify, first, further = step.work(PAIR).parts(true)
            drafts = (first, further) if depth else None
            made.append(replace(step, seconds=verify + first + further, draft_seconds=drafts))
    return made


def test_measured_steps_are_reproduced_and_others_interpolated() -> None:
    made = stairs()
    found = calibrate(START, works(made))
    constants = replace(found, factors=AS_FITTED)
    off = [abs(work.seconds(constants) / work.step.seconds - 1) for work in works(made)]
    assert max(off) > 0.1, "four constants do not follow a stair"
    for work in works(made):
        assert work.seconds(found) == pytest.approx(work.step.seconds, rel=0.02)
    for work in works(stairs((3, 6, 12))):
        assert work.seconds(found) == pytest.approx(work.step.seconds, rel=0.04)
    alone = 5  # tokens that one row alone verifies: nothing tells the jump there
    gains = {one.step.verified: one.speedup_error or 0 for one in check(START, works(made))}
    assert abs(gains.pop(alone)) > 0.1
    assert max(abs(gain) for gain in gains.values()) < 0.1


def test_untimed_drafts_have_no_factors() -> None:
    made = [replace(step, draft_seconds=None) for step in stairs()]
    found = calibrate(START, works(made))
    assert found.factors.first_draft == found.factors.further_drafts == Factors()
    assert [tokens for tokens, _ in found.factors.verify.points] == sorted({step.verified for step in made})


def test_another_pair_gets_constants_without_factors() -> None:
    found = find_calibration(PAIR, START, stairs((1, 4)))
    assert found.apply(START, PAIR).factors == found.factors != AS_FITTED
    other = found.apply(START, replace(PAIR, drafter=None))
    assert other.factors == AS_FITTED
    assert other == replace(START.scaled(found.constants), overlap=found.overlap)


def test_step_times_without_factors_follow_the_constants() -> None:
    verify = TRUE.seconds(PAIR.verify(rows=4, tokens=16, context=500))
    draft = TRUE.seconds(PAIR.draft(rows=4, passes=3, tokens=16, context=500))
    assert PAIR.step_seconds(TRUE, rows=4, drafts=12, reads=2.0, context=500) == pytest.approx(verify + draft)
    plain = TRUE.seconds(PAIR.verify(rows=4, tokens=4, context=500))
    assert PAIR.step_seconds(TRUE, rows=4, drafts=0, reads=2.0, context=500) == plain


def test_factors_are_interpolated_and_constant_outside() -> None:
    factors = Factors(points=((2, 1.0), (8, 2.0)))
    assert [factors.at(count) for count in (1, 2, 4, 8, 100)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0])
    assert Factors().at(3) == 1


@each(("users", "told"), [(4, False), (1, True)])
def test_speedups_are_predicted_without_the_plain_step_except_for_the_fewest_users(users: int, told: bool) -> None:
    made = stairs((1, 4))
    odd = [replace(one, seconds=2 * one.seconds) if (one.users, one.depth) == (users, 0) else one for one in made]
    before, after = (
        {(one.step.users, one.step.depth): one.predicted_speedup for one in check(START, works(each))}
        for each in (made, odd)
    )
    was, now = before[users, 3], after[users, 3]
    assert was is not None
    assert now is not None
    assert (now > 1.5 * was) == told
    assert told or now == pytest.approx(was, rel=0.01)


RECORDED = Path(__file__).parent / "calibrations"


def test_a_recorded_calibration_predicts_left_out_and_new_rows_within_10_percent() -> None:
    """The default target as it is stored, on one Neoverse-N1 core, in processor time (docs/plan.md)."""
    bench = read_measured(RECORDED / "n1-one-core.json")
    pair = measured_pair(bench, "cpu")
    start = speed_of(find_card("cpu", memory=24, bandwidth=20, tflops=0.1), pair.quantisation)
    found = find_calibration(pair, start, bench.steps)
    errors = [abs(one.speedup_error) for one in found.checked if one.speedup_error is not None]
    assert len(errors) == 22
    assert max(errors) < 0.1
    assert sum(errors) / len(errors) < 0.03
    speed = found.apply(start, pair)
    others = read_measured(RECORDED / "n1-one-core-others.json").steps
    seen = {(step.users, step.depth) for step in bench.steps if step.depth}
    plain = {step.users: step for step in others if not step.depth}
    for step in others:
        if step.depth:
            assert (step.users, step.depth) not in seen
            now = plain[step.users]
            predicted = now.work(pair).seconds(speed) / step.work(pair).seconds(speed)
            assert predicted == pytest.approx(now.seconds / step.seconds, rel=0.1), (step.users, step.depth)


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


@each(
    ("record", "said"),
    [
        ({"schema": "eyas.bench/2", "rows": []}, "eyas.bench/2"),
        ({"schema": "eyas.bench/1", "rows": []}, "no row"),
        ({"schema": "eyas.bench/1", "rows": [bench_row(output_tokens="x")]}, "output_tokens 'x'"),
        ({"schema": "eyas.bench/1", "rows": [bench_row(output_tokens=60)]}, "60 accepted tokens among 60"),
        ([], "holds a list"),
    ],
)
def test_wrong_bench_records_are_refused(tmp_path: Path, record: object, said: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=said):
        read_measured(path)


STEP = {"users": 1, "depth": 1, "length": 1.5, "tokens_per_second": 5, "context": 1}
BAD_DRAFT_SECONDS = (3, [], [0.1], [0.1, -1], [0, 0], [0.1, "x"], [0.1, True], [0.2, 0.1], [float("nan"), 0])


@each(
    ("rows", "said"),
    [
        ([], "holds no steps"),
        ("x", "holds no steps"),
        ([3], "step 1 .* must be an object"),
        ([{**STEP, "users": 0}], "users 0"),
        ([{**STEP, "tokens_per_second": None}], "tokens_per_second None"),
        ([{**STEP, "length": None}], "length None"),
        ([{**STEP, "depth": 3, "length": 4.5}], "4.5 at depth 3"),
        ([{**STEP, "accepted": [2]}], r"accepted \[2\]"),
        *(([{**STEP, "draft_seconds": seconds}], "draft_seconds") for seconds in BAD_DRAFT_SECONDS),
    ],
)
def test_wrong_steps_are_refused(tmp_path: Path, rows: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_measured(write(tmp_path / "bench.json", rows))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read --measured"):
        read_measured(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_measured(tmp_path / "bad.json")
