"""Suffix drafts are verified where they are likely and cheap, and left where they are not."""

import random
from dataclasses import replace

import pytest

from each import each
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.step_report import Arm, Rehearsal
from eyas.engine.speculation.step_times import StepTimes
from eyas.engine.speculation.suffix_acceptance import RoundOffer, SuffixAcceptance
from eyas.engine.speculation.suffix_choice import SuffixChoice
from eyas.plan.shapes import offered


def offer(tokens: int = 8, match: int = 8, votes: int = 1, voters: int = 1, *, shared: bool = False) -> RoundOffer:
    drafts = tuple(range(tokens))
    said = (votes,) * tokens, (voters,) * tokens
    return RoundOffer(known=0, most=tokens, tokens=drafts, match=match, votes=said[0], voters=said[1], shared=shared)


# --- acceptance --------------------------------------------------------------------------------------------------


def test_longer_matches_and_larger_shares_are_believed_likelier() -> None:
    acceptance = SuffixAcceptance()
    by_match = [acceptance.chances(0, offer(1, match))[0] for match in (2, 4, 8, 16, 24)]
    assert by_match == sorted(by_match)
    assert len(set(by_match)) == 5
    by_share = [acceptance.chances(0, offer(1, 8, votes, 8))[0] for votes in (2, 5, 7, 8)]
    assert by_share == sorted(by_share)


def test_what_matches_grows_by_every_token() -> None:
    chances = SuffixAcceptance().chances(0, offer(20, 2))
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_the_estimate_comes_to_what_happens() -> None:
    acceptance, source = SuffixAcceptance(), random.Random(1)
    for key in range(400):
        came = [0 if source.random() < 0.2 else 9]
        acceptance.observe(key, offer(1, 8), came)
        acceptance.forget(key)
    assert acceptance.chances(-1, offer(1, 8)) == pytest.approx([0.2], abs=0.07)
    untouched = SuffixAcceptance().chances(-1, offer(1, 8, shared=True))
    assert acceptance.chances(-1, offer(1, 8, shared=True)) == pytest.approx(untouched), (
        "earlier answers are another matter"
    )


def test_a_request_that_copies_is_told_from_one_that_does_not() -> None:
    acceptance = SuffixAcceptance()
    for _ in range(12):
        acceptance.observe(1, offer(2, 8), [0, 1, 2])
        acceptance.observe(2, offer(2, 8), [7])
    (copies, _), (new, _), (other, _) = (acceptance.chances(key, offer(2, 8)) for key in (1, 3, 2))
    assert copies > new + 0.1 > other + 0.2
    acceptance.forget(1)
    assert acceptance.chances(1, offer(2, 8))[0] == new


def test_of_tokens_behind_the_first_wrong_one_nothing_is_learnt() -> None:
    acceptance = SuffixAcceptance()
    before = acceptance.chances(9, offer(3, 2))
    acceptance.observe(0, offer(3, 2), [5, 1, 2])
    after = acceptance.chances(9, offer(3, 2))
    assert after[0] < before[0]
    assert after[2] == before[2]
    acceptance.observe(0, offer(3, 2), [])
    assert acceptance.chances(9, offer(3, 2)) == after


# --- the choice --------------------------------------------------------------------------------------------------

SHAPES = CapturedShapes(rows=(1, 2, 4), depths=(1, 3, 7), most_tokens=64)
DEEP = replace(SHAPES, offered=(15,))
EXACT = CapturedShapes(rows=tuple(range(1, 17)), depths=tuple(range(1, 8)), offered=(15,), most_tokens=512)


def taking(per_token: float, shapes: CapturedShapes = SHAPES, *, exact: bool = False) -> SuffixChoice:
    """A choice where steps were rehearsed: a second, and so much more for every further token."""
    times, steps = StepTimes(), dict[tuple[int, Arm], float]()
    times.bucket = shapes.rows_for
    for rows in shapes.rows:
        steps[rows, 0] = 1.0 + per_token * (rows - 1)
        for depth in shapes.offered_for(rows):
            steps[rows, offered(depth)] = 1.0 + per_token * (rows * (1 + depth) - 1)
    times.rehearse(Rehearsal(steps=steps))
    return SuffixChoice(times, shapes, exact=exact)


def untimed(shapes: CapturedShapes = SHAPES, *, exact: bool = False) -> tuple[SuffixChoice, StepTimes]:
    """A choice where only plain steps were timed: a second each."""
    times = StepTimes()
    times.bucket = shapes.rows_for
    for _ in range(3):
        for rows in shapes.rows:
            times.observe(rows, 0, 1.0)
    return SuffixChoice(times, shapes, exact=exact), times


def test_nothing_is_verified_before_a_plain_step_was_timed() -> None:
    assert SuffixChoice(StepTimes(), SHAPES, exact=False).round_depth(1, [[0.99] * 7], 0.0) == 0


@each("exact", [False, True])
@each("rows", [1, 2])
def test_a_round_is_as_deep_as_gives_the_most_tokens_per_second(rows: int, exact: bool) -> None:
    survivals, shapes = [[0.9**depth for depth in range(1, 8)]] * rows, EXACT if exact else SHAPES
    for per_token in (0.0, 0.03, 0.1, 0.3, 2.0):
        depth = taking(per_token, shapes, exact=exact).round_depth(rows, survivals, 0.0)
        plain = 1 + per_token * (rows - 1)
        rates = {
            depth: (rows + rows * sum(survivals[0][:depth])) / (plain + per_token * rows * min(depth, 7))
            for depth in (0, *shapes.offered_for(rows))
        }
        assert rates[depth] >= 0.97 * max(rates.values())
    assert taking(2.0, shapes, exact=exact).round_depth(rows, survivals, 0.0) == 0


def test_a_round_of_suffix_drafts_must_beat_the_drafters_plan() -> None:
    survivals, choice = [[0.9] * 7], taking(0.0)
    assert choice.round_depth(1, survivals, 5.0) == 7
    assert choice.round_depth(1, survivals, 7.0) == 0
    assert choice.round_depth(1, [[]], 0.0) == 0, "what is in flight uses the offer up"
    assert taking(0.0, replace(SHAPES, depths=())).round_depth(1, survivals, 0.0) == 0


def test_few_requests_may_have_deeper_rounds_of_suffix_drafts() -> None:
    assert [DEEP.offered_for(rows) for rows in (1, 4)] == [[1, 3, 7, 15]] * 2
    assert replace(DEEP, rows=(1, 8)).offered_for(5) == [1, 3, 7]
    assert replace(DEEP, most_tokens=8).offered_for(1) == [1, 3, 7]
    assert [DEEP.depth_for(depth) for depth in (0, 2, 7, 8, 13)] == [0, 3, 7, 15, 15]
    sure = [[0.99**depth for depth in range(1, 16)]]
    assert taking(0.0, DEEP).round_depth(1, sure, 0.0) == 15


@each("exact", [False, True])
def test_a_round_goes_beyond_the_drafters_chains_where_that_pays(exact: bool) -> None:
    likely, unlikely = [[0.5] * 12], [[0.001] * 12]
    cheap, dear = (taking(per_token, DEEP, exact=exact) for per_token in (0.01, 2.0))
    assert cheap.round_beyond(1, 3, likely, 1.0) == 15
    assert cheap.round_beyond(1, 3, unlikely, 1.0) == 3
    assert dear.round_beyond(1, 3, likely, 1.0) == 3
    assert taking(0.01, replace(SHAPES, depths=(1, 3)), exact=exact).round_beyond(1, 3, likely, 1.0) == 3, "none deeper"
    assert cheap.round_beyond(1, 3, likely, 100.0) == 3, "a second is worth many tokens"


def test_what_was_never_timed_is_tried_once_and_judged_by_what_it_took() -> None:
    choice, _ = untimed()
    sure = [[0.9] * 7]
    assert choice.round_depth(1, sure, 0.0) == 7
    choice.observe(1, 7, 7, 50.0)
    assert choice.round_depth(1, sure, 0.0) == 3, "shallower ones may still be free"
    choice.observe(1, 3, 3, 50.0)
    choice.observe(1, 1, 1, 50.0)
    assert choice.round_depth(1, sure, 0.0) == 0


def test_a_deeper_round_is_never_taken_to_be_quicker_than_a_shallower_one() -> None:
    choice, _ = untimed()
    choice.observe(1, 1, 1, 50.0)
    assert choice.round_depth(1, [[0.9] * 7], 0.0) == 0


def test_where_passes_are_as_large_as_what_is_live_a_draft_costs_the_same_whosever_it_is() -> None:
    """One of eight requests has drafts: they cost what they would cost it alone."""
    choice, alone = (taking(0.1, EXACT, exact=True) for _ in range(2))
    row = [0.9**depth for depth in range(1, 8)]
    extra = choice.seconds(8, 7, [row]) - choice.seconds(8, 0, ())
    assert extra == pytest.approx(alone.seconds(1, 7, [row]) - alone.seconds(1, 0, ()))
    padded = taking(0.1, replace(SHAPES, rows=(1, 8)))
    assert padded.seconds(8, 7, [row]) - padded.seconds(8, 0, ()) == pytest.approx(8 * extra)


def test_the_time_of_a_few_drafts_among_many_requests_tells_of_more() -> None:
    choice, _ = untimed(EXACT, exact=True)
    for _ in range(3):
        choice.observe(8, 7, 4, 1.4)  # seven deep, but four drafts in all
    assert choice.seconds(8, 1, [[0.5]] * 8) == pytest.approx(1.8)
    assert choice.seconds(8, 1, [[0.5]] * 2) == pytest.approx(1.2)
