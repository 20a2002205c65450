"""Real acceptance before and after a swap: who is worse is seen, who is as good is left alone, within a bound."""

from __future__ import annotations

from random import Random

import pytest

from eyas.engine.output import OutputDelta
from eyas.serve.learning.round_tally import RoundLog, RoundTally
from eyas.serve.learning.watch import (
    ERROR,
    FIRST_LOOK,
    LAST_LOOK,
    LEAST_REQUESTS,
    LOOKS,
    LengthEstimate,
    SwapWatch,
    estimate_length,
    lengths_of,
)

ROUNDS = 20
RUNS = 20


def requests(
    count: int, draw: Random, chance: float, *, spread: float = 0.15, rounds: int = ROUNDS
) -> list[RoundTally]:
    """Requests that differ: each has a chance of its own, the same at all positions."""
    made = []
    for _ in range(count):
        own = min(0.98, max(0.02, draw.gauss(chance, spread)))
        tally = RoundTally()
        for _ in range(rounds):
            accepted = 0
            while accepted < 3 and draw.random() < own:
                accepted += 1
            tally.count(delta(3, accepted))
        made.append(tally)
    return made


def delta(drafted: int, accepted: int, suffix: int = 0) -> OutputDelta:
    return OutputDelta(0, (1,) * (accepted + 1), (), (), drafted, accepted, suffix)


def test_a_tally_counts_drafts_behind_accepted_ones_and_none_of_the_suffix_index() -> None:
    tally = RoundTally()
    for drafted, accepted, suffix in ((3, 1, 0), (3, 3, 0), (2, 0, 0), (0, 0, 0), (5, 4, 3), (2, 2, 2)):
        tally.count(delta(drafted, accepted, suffix))
    # Of (5, 4, 3) two are the drafter's, both accepted; (2, 2, 2) are none of its own.
    assert (tally.passes, tally.tries, tally.hits) == (6, [4, 3, 1], [3, 2, 1])


def test_of_a_tree_first_candidates_count_as_if_they_had_been_a_chain() -> None:
    tally = RoundTally()
    for ranks, accepted in (((1, 1, 1), 3), ((1, 2, 1), 3), ((0,), 0), ((3, 1), 2)):
        tree = delta(9, accepted)
        tree.ranks = ranks
        tally.count(tree)
    assert (tally.passes, tally.tries, tally.hits) == (4, [4, 2, 1], [2, 1, 1])


def test_requests_under_way_at_a_swap_count_for_neither_drafter() -> None:
    log = RoundLog()
    log.begin("old")
    log.observe("old", [delta(3, 1)])
    log.begin("read")
    log.begin_anew()
    assert (log.passes, log.tallies) == (0, [])
    log.observe("old", [delta(3, 1), delta(3, 1)])
    log.observe("read", [delta(3, 1)])
    for name in ("new", "undrafted"):
        log.begin(name)
    log.observe("new", [delta(3, 2)])
    log.observe("undrafted", [delta(0, 0)])
    assert (log.passes, [tally.hits for tally in log.tallies]) == (2, [[1, 1, 0], [0, 0, 0]])
    log.end("old")
    log.begin("old")
    log.observe("old", [delta(3, 1)])
    assert log.passes == 3, "a name that comes again is another request"


def test_the_length_is_that_of_chains_and_its_error_that_of_requests() -> None:
    draw = Random(1)
    alike, unlike = (requests(400, draw, 0.6, spread=spread) for spread in (0.0, 0.25))
    expected = 1 + 0.6 + 0.6**2 + 0.6**3
    estimate = estimate_length(alike, 3)
    assert estimate.acceptance_length == pytest.approx(expected, abs=3 * estimate.error)
    assert estimate.rounds == 400 * ROUNDS
    assert estimate_length(unlike, 3).error > 2 * estimate.error, "rounds of one request are not independent"
    many = [estimate_length(requests(100, draw, 0.6), 3) for _ in range(60)]
    mean = sum(one.acceptance_length for one in many) / 60
    spread = (sum((one.acceptance_length - mean) ** 2 for one in many) / 59) ** 0.5
    assert spread == pytest.approx(sum(one.error for one in many) / 60, rel=0.35), "and it is what it is called"


def test_it_does_not_matter_how_deep_is_drafted() -> None:
    """The controller drafts less deep with a drafter that it does not know, and that is no fault of the drafter."""
    draw = Random(2)
    deep = requests(200, draw, 0.6, spread=0.0)
    shallow = []
    for tally in requests(200, draw, 0.6, spread=0.0):
        shallow.append(RoundTally(passes=tally.passes, tries=[*tally.tries[:2], 0], hits=[*tally.hits[:2], 0]))
    before, after = lengths_of(deep), lengths_of(shallow)
    assert (len(before), len(after)) == (3, 2)
    assert before[1].acceptance_length == pytest.approx(after[1].acceptance_length, abs=0.1)


def watched(before: list[LengthEstimate], draw: Random, chance: float) -> tuple[str, int]:
    """The result of a watch over a drafter, and after how many passes."""
    watch, log = SwapWatch(before), list[RoundTally]()
    passes = 0
    while True:
        log += requests(1, draw, chance)
        passes += ROUNDS
        if watch.due(passes):
            seen = watch.look(log, passes)
            if watch.over:
                assert seen is not None
                return seen.verdict, passes


def test_a_worse_drafter_is_seen_within_the_looks_and_one_that_is_as_good_hardly_ever_sent_back() -> None:
    draw = Random(3)
    verdicts: dict[float, list[tuple[str, int]]] = {}
    for loss in (0.0, 0.1, 0.3):
        verdicts[loss] = []
        for _ in range(RUNS):
            before = lengths_of(requests(200, draw, 0.6))
            verdicts[loss].append(watched(before, draw, 0.6 - loss))
    assert max(passes for runs in verdicts.values() for _, passes in runs) < LAST_LOOK + ROUNDS
    worse = {loss: sum(verdict == "worse" for verdict, _ in runs) / RUNS for loss, runs in verdicts.items()}
    assert worse[0.0] <= 2 * ERROR
    assert worse[0.1] >= 0.95, "a sixth of the acceptance"
    assert worse[0.3] == 1
    assert max(passes for _, passes in verdicts[0.3]) <= 1024, "half of it"


def test_a_watch_has_eight_looks_and_says_nothing_of_too_few_requests() -> None:
    draw = Random(4)
    before = lengths_of(requests(50, draw, 0.6))
    watch, log = SwapWatch(before), requests(200, draw, 0.6, spread=0.0)
    looks = 0
    for passes in range(1, LAST_LOOK + 1):
        if watch.due(passes):
            looks += 1
            watch.look([], passes)
    assert (looks, watch.over, watch.next_look) == (LOOKS, False, 2 * LAST_LOOK)
    assert watch.look(log[: LEAST_REQUESTS - 1], 3 * LAST_LOOK) is None
    assert watch.look(log, 4 * LAST_LOOK) is not None
    assert watch.over, "the last look is made up for as soon as there is something to see"
    assert not SwapWatch(before).due(FIRST_LOOK - 1)


def test_a_drafter_that_is_hardly_drafted_with_is_told_from_traffic_that_never_was() -> None:
    draw = Random(6)
    often, seldom = requests(50, draw, 0.6), requests(50, draw, 0.6, rounds=1)
    for tally in seldom:
        tally.passes = 200
    plain = [RoundTally(passes=LAST_LOOK)]
    watch = SwapWatch(lengths_of(often))
    assert watch.given_up(plain, LAST_LOOK - 1) is None, "not before the last look"
    assert "0 rounds in 8192 passes" in (watch.given_up(plain, LAST_LOOK) or "")
    assert SwapWatch(lengths_of(seldom)).given_up([*plain, *requests(4, draw, 0.6, rounds=9)], LAST_LOOK) is None


def test_a_baseline_comes_back_from_a_record() -> None:
    before = lengths_of(requests(20, Random(5), 0.5))
    again = [LengthEstimate.from_json(one.as_json()) for one in before]
    for old, new in zip(before, again, strict=True):
        assert new.acceptance_length == pytest.approx(old.acceptance_length, abs=1e-4)
        assert (new.requests, new.rounds) == (old.requests, old.rounds)


def test_where_nothing_is_known_of_the_drafter_before_the_last_look_ends_the_watch() -> None:
    after, watch = requests(50, Random(7), 0.5), SwapWatch([])
    assert watch.look(after, FIRST_LOOK) is None
    assert not watch.over
    assert watch.look(after, LAST_LOOK) is None
    assert watch.given_up(after, LAST_LOOK) is None
    assert watch.over


def test_how_often_a_drafter_is_drafted_with_is_of_the_requests_that_are_remembered() -> None:
    """Passes of all requests since the swap would make it look ever rarer."""
    draw = Random(8)
    before = requests(50, draw, 0.6, rounds=1)
    after = requests(50, draw, 0.6, rounds=1)
    for tally in (*before, *after):
        tally.passes = 200
    assert SwapWatch(lengths_of(before)).given_up(after, 100 * LAST_LOOK) is None
