"""Learning benchmark: a paused learner loses no time, and the verdict on the bound."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from learning import ALONE, BESIDE, Window, table
from learning_process import Gate
from pairs import interval

from eyas.train.pace import Pace


class Held:
    """An order to hold that lasts for some seconds of a clock that moves by itself alone."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def is_set(self) -> bool:
        return not self._seconds

    def wait(self) -> None:
        self.now, self._seconds = self.now + self._seconds, 0.0


def test_a_paused_learner_stops_its_clock_and_reports_its_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Held(400.0)
    monkeypatch.setattr("learning_process.time", time)
    gate = Gate()
    gate._open = time  # type: ignore[assignment]
    gate.pace = pace = Pace(0.5, clock=gate.clock, sleep=gate.sleep)
    time.sleep(2.0)
    pace.rest()
    assert time.now == 404.0
    assert (gate.clock(), pace.seconds_worked(), pace.taken) == (4.0, 2.0, 0.5)
    (told,) = capsys.readouterr().out.splitlines()
    assert json.loads(told) == {"held": True, "worked": 2.0, "let": 2.25, "steps": 0}


def record_of(*ratios: float) -> dict[str, Any]:
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


def test_the_verdict_depends_on_the_whole_interval() -> None:
    for ratios, words in (
        ((0.92, 0.91, 0.93), "bound 0.88: held\n"),
        ((0.92, 0.80, 0.93), "bound 0.88: held by the median alone"),
        ((0.82, 0.80, 0.93), "bound 0.88: missed"),
    ):
        assert words in table(record_of(*ratios))
