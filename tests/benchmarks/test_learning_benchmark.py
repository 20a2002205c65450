"""The benchmark of learning beside serving: a learner that is held loses no time, and a bound is held or missed."""

import threading
import time
from typing import Any

import pytest
from learning import ALONE, BESIDE, Window, table
from learning_process import Gate

from eyas.train.pace import Pace


def test_a_held_learner_lies_still_with_its_clock_and_says_how_much_it_worked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = Gate()
    gate.pace = pace = Pace(0.5, clock=gate.clock, sleep=gate.sleep)
    gate._open.clear()
    threading.Timer(0.4, gate._open.set).start()
    before, really = gate.clock(), time.monotonic()
    time.sleep(0.05)
    pace.rest()
    assert time.monotonic() - really >= 0.4
    assert gate.clock() - before < 0.3, "0.1 s, and what a busy machine adds"
    assert 0.04 < pace.seconds_worked() < 0.2
    assert '"held": true' in capsys.readouterr().out


def record_of(*ratios: float) -> dict[str, Any]:
    from dataclasses import asdict

    from pairs import interval

    def window(speed: float) -> dict[str, Any]:
        return asdict(Window(tokens=round(100 * speed), seconds=100.0, step_p50=0.01, step_p99=0.02))

    return {
        "arguments": {"target": "t"},
        "device": "cpu",
        "users": 2,
        "seconds": 9.0,
        "share": 0.1,
        "share_taken": 0.09,
        "steps_learnt": 3,
        "bound": 0.88,
        "ratio": asdict(interval(ratios)),
        "pairs": [{ALONE: window(50.0), BESIDE: window(50 * ratio)} for ratio in ratios],
    }


def test_the_bound_is_held_by_the_whole_interval_or_it_is_said() -> None:
    for ratios, words in (
        ((0.92, 0.91, 0.93), "bound 0.88: held\n"),
        ((0.92, 0.80, 0.93), "bound 0.88: held by the median alone"),
        ((0.82, 0.80, 0.93), "bound 0.88: missed"),
    ):
        assert words in table(record_of(*ratios))
