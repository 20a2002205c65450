"""Training keeps to its share of the device, whatever the pieces of work are."""

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

import tiny
from each import each
from eyas.errors import UserError
from eyas.target.model import Target
from eyas.train.pace import (
    LONGEST_PIECE,
    SHORTEST_PIECE,
    Pace,
    PacedSource,
    PacedSources,
    rests_between_modules,
    threads_of,
)
from eyas.train.schedule import RunLength
from eyas.train.sources.live import LiveSource
from train.test_loop import Diary, corpus_of, loop_config_of, packs_of, train_state_of


class Time:
    """Clock that moves with work and sleep, and records the work."""

    def __init__(self) -> None:
        self.now, self.work, self.slept = 100.0, list[tuple[float, float]](), list[float]()

    def __call__(self) -> float:
        return self.now

    def works(self, seconds: float) -> None:
        self.work.append((self.now, self.now + seconds))
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def worked_within(self, begin: float, end: float) -> float:
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.work)


@each("share", [0.05, 0.1, 0.5, 0.9])
def test_work_in_any_window_is_bounded_by_the_share(share: float) -> None:
    time, draw = Time(), Random(7)
    pace = Pace(share, clock=time, sleep=time.sleep)
    pieces = [draw.choice([0.004, 0.03, 0.2, 1.5]) * draw.random() for _ in range(400)]
    for piece in pieces:
        time.works(piece)
        pace.rest()
    longest = max(pieces) + SHORTEST_PIECE
    edges = [edge for span in time.work for edge in span]
    for _ in range(600):
        begin, end = sorted(draw.sample(edges, 2))
        assert time.worked_within(begin, end) <= share * (end - begin) + (1 - share) * longest + 1e-9
    assert pace.taken == pytest.approx(share, rel=0.02), "and it takes what it may"
    assert pace.seconds_worked() == pytest.approx(sum(pieces))


def test_a_jump_of_the_clock_is_neither_work_nor_rest() -> None:
    time = Time()
    pace = Pace(0.5, clock=time, sleep=time.sleep)
    time.works(1.0)
    time.now += 3600  # suspended in the middle of a piece
    pace.rest()
    assert sum(time.slept) == pytest.approx(LONGEST_PIECE)
    time.now += 3600  # slept longer than requested
    time.works(0.0)
    time.slept.clear()
    pace.rest()
    before = sum(time.slept)
    time.works(2.0)
    pace.rest()
    assert sum(time.slept) - before == pytest.approx(2.0), "what was slept too much is not made up for"


def test_work_includes_queued_work_of_the_device() -> None:
    time = Time()
    pace = Pace(0.25, clock=time, sleep=time.sleep, synchronize=lambda: time.works(2.0))
    time.works(0.02)
    pace.rest()
    assert sum(time.slept) == pytest.approx(3 * 2.02)


def test_earlier_work_is_followed_by_its_rest() -> None:
    time = Time()
    pace = Pace(0.25, before=3.0, clock=time, sleep=time.sleep)
    time.works(1.0)
    pace.rest()
    assert sum(time.slept) == pytest.approx(3 * 4.0)
    assert pace.taken == pytest.approx(0.25)


def test_the_work_clock_stops_during_a_rest() -> None:
    time, told = Time(), list[float]()

    def sleep(seconds: float) -> None:
        told.append(pace.seconds_worked())
        time.sleep(seconds)

    pace = Pace(0.5, clock=time, sleep=sleep)
    time.works(1.0)
    pace.rest()
    assert len(told) == 4
    assert set(told) == {1.0}


def test_a_stopping_run_cuts_its_rest_short() -> None:
    time = Time()
    pace = Pace(0.01, clock=time, sleep=time.sleep, hurry=lambda: len(time.slept) >= 2)
    time.works(1.0)
    pace.rest()
    assert len(time.slept) == 2
    assert sum(time.slept) < 1


def test_a_share_of_one_has_no_rests() -> None:
    time = Time()
    pace = Pace(1.0, clock=time, sleep=time.sleep, synchronize=lambda: pytest.fail("nobody waits"))
    time.works(500.0)
    pace.rest()
    assert time.slept == []
    assert (pace.seconds_worked(), pace.taken) == (500.0, 1.0)


@each("share", [0.0, -0.1, 1.01])
def test_an_invalid_share_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=rf"the share of the device is {share:g}, and must be above 0 and at most 1"):
        Pace(share)


def test_threads_are_a_share_and_at_least_one() -> None:
    assert [threads_of(0.1, most) for most in (1, 2, 16, 64)] == [1, 1, 1, 6]
    assert threads_of(0.5, 2) == 1
    assert threads_of(1.0, 2) == 2


@pytest.mark.slow
def test_paced_training_learns_the_same_in_the_same_work_time(
    tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from eyas.train.loop import train

    def learnt(pace: Pace, time: Time) -> dict[str, Tensor]:
        state = train_state_of(tiny_target)
        live = LiveSource(tiny_target, tiny.AUX_IDS)

        def source(batch):  # type: ignore[no-untyped-def]
            time.works(5.0)
            return live(batch)

        plan = loop_config_of(tmp_path_factory.mktemp("run"), length=RunLength(minutes=0.5))
        with rests_between_modules(pace):
            found = train(
                [state],
                packs_of(corpus_of(24)),
                [],
                PacedSource(source, pace),
                plan,
                observer=Diary(),
                clock=pace.seconds_worked,
            )
        assert found.step == 3
        assert found.seconds == pytest.approx(30.0)
        return {name: weight.detach().clone() for name, weight in state.master_weights.items()}

    time, slow = Time(), Time()
    fast = learnt(Pace(1.0, clock=time), time)
    paced = learnt(Pace(0.1, clock=slow, sleep=slow.sleep), slow)
    assert all(torch.equal(fast[name], paced[name]) for name in fast)
    assert (time.now - 100, sum(slow.slept)) == (30.0, pytest.approx(270.0))


def test_rests_lie_between_modules_forwards_and_backwards_and_between_depths(tiny_target: Target) -> None:
    class Counted(Pace):
        rests = 0

        def rest(self) -> None:
            self.rests += 1

    pace = Counted(0.5)
    state, (planned, *_) = train_state_of(tiny_target), packs_of(corpus_of(4)).epoch(0)
    opened = PacedSources(open_source=lambda ids, *, compiled: LiveSource(tiny_target, ids), pace=pace)
    batch = planned.build()
    seen = []
    with rests_between_modules(pace):
        features = opened(tiny.AUX_IDS, compiled=False)(batch)
        seen.append(pace.rests)
        scores = state._forward_loss(batch, features, [1.0, 1.0, 1.0])
        seen.append(pace.rests)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        seen.append(pace.rests)
    layers = tiny_target.facts.num_hidden_layers
    assert seen[0] > layers
    assert all(later - earlier > 10 for earlier, later in pairwise(seen))
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert pace.rests == seen[-1], "nothing is left behind"
