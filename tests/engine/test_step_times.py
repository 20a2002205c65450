"""Whole steps are timed; untimed ones are estimated from a rehearsal or from their neighbours."""

import pytest

from eyas.engine.speculation.step_report import Rehearsal
from eyas.engine.speculation.step_times import WINDOW, StepTimes


def timed(rehearsed: dict[tuple[int, int], float], *steps: tuple[int, int, float]) -> StepTimes:
    times = StepTimes()
    times.rehearse(Rehearsal(steps=dict(rehearsed)))
    for rows, depth, seconds in steps:
        for _ in range(3):
            times.observe(rows, depth, seconds)
    return times


LINES = {(1, 0): 1.0, (1, 1): 1.4, (1, 3): 2.0, (16, 0): 2.0, (16, 1): 3.0, (16, 3): 5.0}


def test_without_times_there_is_no_estimate() -> None:
    assert StepTimes().at(1, 0) is None
    assert timed({}, (1, 0, 1.0)).at(1, 2) is None, "no draft was timed"


def test_between_rehearsed_rows_and_depths_time_is_linear() -> None:
    times = timed(LINES)
    assert times.at(1, 2) == pytest.approx(1.7)
    assert times.at(16, 2) == pytest.approx(4.0)
    assert times.at(6, 0) == pytest.approx(1 + 5 / 15)
    assert times.at(1, 5) == pytest.approx(2.6), "as from 1 to 3"
    assert times.at(31, 0) == pytest.approx(3.0)


def test_delays_of_plain_steps_against_the_rehearsal_apply_to_others_too() -> None:
    times = timed(LINES, (1, 0, 1.3), (16, 0, 3.0))
    assert times.at(1, 3) == pytest.approx(2.3)
    assert times.at(16, 3) == pytest.approx(6.0)
    assert times.at(8, 0) == pytest.approx(1 + 7 / 15 + 0.3 + 0.7 * 7 / 15), "delays are interpolated between rows"


def test_a_rehearsal_on_a_busy_machine_is_corrected_by_larger_steps_and_by_the_first_plain_one() -> None:
    late = timed(LINES | {(1, 0): 9.0, (1, 1): 7.0})
    assert late.at(1, 0) == late.at(1, 1) == 2.0, "a depth of 3 took no longer"
    late = timed({key: 4 * seconds for key, seconds in LINES.items()})
    late.observe(1, 0, 1.0)
    assert late.at(1, 0) == 1.0, "a step may be late, but never early"
    assert late.at(1, 3) == pytest.approx(2.0), "all steps were equally late"


def test_an_estimate_keeps_the_order_of_measured_times() -> None:
    times = timed(LINES, (1, 1, 3.0))
    assert times.at(1, 3) == 3.0, "at least the time of a shallower draft"
    assert timed(LINES, (1, 3, 1.2)).at(1, 1) == 1.2


def test_late_steps_do_not_count_and_early_ones_show_that_steps_became_faster() -> None:
    times = timed(LINES)
    for number in range(2 * WINDOW):
        times.observe(1, 0, 9.0 if number % 3 == 0 else 1.1)
    assert times.at(1, 0) == 1.1
    times.observe(1, 0, 0.5)
    assert times.at(1, 0) == 0.5
    for _ in range(2):
        times.observe(1, 0, 0.9)
    assert times.at(1, 0) == 0.9, "a single early outlier is soon outvoted"


def test_a_single_time_does_not_replace_a_rehearsal() -> None:
    times = timed(LINES)
    times.observe(1, 1, 30.0)
    assert times.at(1, 1) == pytest.approx(1.4)


def test_without_a_rehearsal_two_depths_make_a_line() -> None:
    times = timed({}, (4, 0, 1.0), (4, 2, 1.6))
    assert times.at(4, 1) == pytest.approx(1.3)
    assert times.at(4, 4) == pytest.approx(2.2)
    assert timed({}, (4, 0, 1.0), (8, 0, 1.5), (4, 2, 1.6)).at(8, 2) == pytest.approx(2.4), "relative to plain steps"


def test_times_of_drafts_that_are_not_used_are_dropped() -> None:
    times = timed(LINES, (1, 3, 9.0))
    for _ in range(2000):
        times.observe(1, 0, 1.0)
    assert times.at(1, 3) == pytest.approx(2.0)
