"""Suffix drafts are verified where they are likely and cheap, and not otherwise."""

import random
from dataclasses import replace
from math import sqrt

import pytest

from each import each
from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.probes import CREDIT, SHARE
from eyas.engine.speculation.step_report import Arm, Rehearsal
from eyas.engine.speculation.step_times import StepTimes
from eyas.engine.speculation.suffix_acceptance import RoundOffer, SuffixAcceptance
from eyas.engine.speculation.suffix_choice import SuffixChoice
from eyas.engine.suffix.lookup_gate import MOST_ROUNDS_OUT, LookupGate
from eyas.plan.shapes import offered


def offer(tokens: int = 8, match: int = 8, votes: int = 1, voters: int = 1, *, shared: bool = False) -> RoundOffer:
    drafts = tuple(range(tokens))
    said = (votes,) * tokens, (voters,) * tokens
    return RoundOffer(known=0, most=tokens, tokens=drafts, match=match, votes=said[0], voters=said[1], shared=shared)


# --- acceptance --------------------------------------------------------------------------------------------------


def test_longer_matches_and_larger_shares_are_more_likely() -> None:
    acceptance = SuffixAcceptance()
    by_match = [acceptance.chances(0, offer(1, match))[0] for match in (2, 4, 8, 16, 24)]
    assert by_match == sorted(by_match)
    assert len(set(by_match)) == 5
    by_share = [acceptance.chances(0, offer(1, 8, votes, 8))[0] for votes in (2, 5, 7, 8)]
    assert by_share == sorted(by_share)


def test_the_match_grows_with_every_token() -> None:
    chances = SuffixAcceptance().chances(0, offer(20, 2))
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_the_estimate_approaches_the_truth() -> None:
    acceptance, source = SuffixAcceptance(), random.Random(1)
    for key in range(400):
        came = [0 if source.random() < 0.2 else 9]
        acceptance.observe(key, offer(1, 8), came)
        acceptance.forget(key)
    assert acceptance.chances(-1, offer(1, 8)) == pytest.approx([0.2], abs=0.07)
    untouched = SuffixAcceptance().chances(-1, offer(1, 8, shared=True))
    assert acceptance.chances(-1, offer(1, 8, shared=True)) == pytest.approx(untouched), "other sources are separate"


def test_a_request_that_copies_is_distinguished_from_one_that_does_not() -> None:
    acceptance = SuffixAcceptance()
    for _ in range(12):
        acceptance.observe(1, offer(2, 8), [0, 1, 2])
        acceptance.observe(2, offer(2, 8), [7])
    (copies, _), (new, _), (other, _) = (acceptance.chances(key, offer(2, 8)) for key in (1, 3, 2))
    assert copies > new + 0.1 > other + 0.2
    acceptance.forget(1)
    assert acceptance.chances(1, offer(2, 8))[0] == new


def test_nothing_is_learned_from_tokens_behind_the_first_wrong_one() -> None:
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
    """A choice with rehearsed steps: one second, and `per_token` more for every further token."""
    times, steps = StepTimes(), dict[tuple[int, Arm], float]()
    times.bucket = shapes.rows_for
    for rows in shapes.rows:
        steps[rows, 0] = 1.0 + per_token * (rows - 1)
        for depth in shapes.offered_for(rows):
            steps[rows, offered(depth)] = 1.0 + per_token * (rows * (1 + depth) - 1)
    times.rehearse(Rehearsal(steps=steps))
    return SuffixChoice(times, shapes, exact=exact)


def untimed(shapes: CapturedShapes = SHAPES, *, exact: bool = False) -> tuple[SuffixChoice, StepTimes]:
    """A choice where only plain steps were timed, at one second each."""
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
def test_a_round_is_as_deep_as_yields_the_most_tokens_per_second(rows: int, exact: bool) -> None:
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
    assert choice.round_depth(1, [[]], 0.0) == 0, "the step in flight uses the offer up"
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
    assert taking(0.01, replace(SHAPES, depths=(1, 3)), exact=exact).round_beyond(1, 3, likely, 1.0) == 3, "no deeper"
    assert cheap.round_beyond(1, 3, likely, 100.0) == 3, "one second is worth many tokens"


def test_untimed_depths_are_tried_once_and_judged_by_their_time() -> None:
    choice, _ = untimed()
    sure = [[0.9] * 7]
    assert choice.round_depth(1, sure, 0.0) == 7
    choice.observe(1, 7, 7, 50.0)
    assert choice.round_depth(1, sure, 0.0) == 3, "shallower rounds may still be free"
    choice.observe(1, 3, 3, 50.0)
    choice.observe(1, 1, 1, 50.0)
    assert choice.round_depth(1, sure, 0.0) == 0


def test_a_deeper_round_is_never_assumed_to_be_faster_than_a_shallower_one() -> None:
    choice, _ = untimed()
    choice.observe(1, 1, 1, 50.0)
    assert choice.round_depth(1, [[0.9] * 7], 0.0) == 0


def test_in_exact_passes_a_draft_costs_the_same_in_any_batch() -> None:
    """One of eight requests has drafts: they cost what they would cost it alone."""
    choice, alone = (taking(0.1, EXACT, exact=True) for _ in range(2))
    row = [0.9**depth for depth in range(1, 8)]
    extra = choice.seconds(8, 7, [row]) - choice.seconds(8, 0, ())
    assert extra == pytest.approx(alone.seconds(1, 7, [row]) - alone.seconds(1, 0, ()))
    padded = taking(0.1, replace(SHAPES, rows=(1, 8)))
    assert padded.seconds(8, 7, [row]) - padded.seconds(8, 0, ()) == pytest.approx(8 * extra)


def test_the_time_of_a_few_drafts_among_many_requests_gives_that_of_more() -> None:
    choice, _ = untimed(EXACT, exact=True)
    for _ in range(3):
        choice.observe(8, 7, 4, 1.4)  # seven deep, but four drafts in total
    assert choice.seconds(8, 1, [[0.5]] * 8) == pytest.approx(1.8)
    assert choice.seconds(8, 1, [[0.5]] * 2) == pytest.approx(1.2)


PLAIN = 1e-2
"""Duration of a plain step in seconds."""


def looked_up(gate: LookupGate, saved: float, rounds: int, *, rows: int = 4) -> int:
    """Number of rounds that looked up, of so many, where each look-up saves (or loses) so many seconds."""
    count = 0
    for _ in range(rounds):
        if gate.is_open(rows, PLAIN):
            gate.book(rows, saved, PLAIN)
            count += 1
    return count


def test_look_ups_that_save_time_happen_in_every_round() -> None:
    assert looked_up(LookupGate(), 1e-4, 2000) == 2000


def test_look_ups_that_save_nothing_lose_a_few_plain_steps_and_a_small_share_of_the_time() -> None:
    for part in (0.005, 0.05, 0.2, 1.0):
        for rounds in (100, 1000, 20_000):
            lost = looked_up(LookupGate(), -part * PLAIN, rounds) * part
            overrun = part * (1 + sqrt(rounds) / 2)  # the last round of each stretch
            assert lost <= CREDIT + SHARE * rounds + overrun


def test_text_that_starts_or_stops_repeating_is_noticed() -> None:
    gate = LookupGate()
    assert looked_up(gate, -0.05 * PLAIN, 5000) < 500
    assert looked_up(gate, 0.5 * PLAIN, 1000) > 500
    assert looked_up(gate, 0.5 * PLAIN, 1000) == 1000
    looked_up(gate, -0.05 * PLAIN, 2000)
    assert looked_up(gate, -0.05 * PLAIN, 5000) < 500


def test_numbers_of_requests_have_separate_accounts() -> None:
    gate = LookupGate()
    looked_up(gate, -PLAIN, 500, rows=16)
    assert looked_up(gate, PLAIN, 500, rows=1) == 500
    report = gate.report()
    assert report[1]["looked_up"]
    assert report[1]["seconds_saved"] > 0 > report[16]["seconds_saved"]


# --- pauses of requests ------------------------------------------------------------------------------------------


def rounds_between_looks(gate: LookupGate, key: int, sent: list[bool]) -> list[int]:
    """Rounds that the request skipped before each look-up."""
    found = []
    for one in sent:
        out = 0
        while not gate.due(key):
            out += 1
        found.append(out)
        gate.note(key, sent=one)
    return found


def test_pauses_double_after_misses_and_end_with_a_hit() -> None:
    assert rounds_between_looks(LookupGate(), 1, [False] * 6) == [0, 1, 2, 4, 4, MOST_ROUNDS_OUT]
    sent = [False, False, False, True, True, False, False]
    assert rounds_between_looks(LookupGate(), 1, sent) == [0, 1, 2, 4, 0, 0, 1]


def test_requests_have_separate_pauses_that_end_with_them() -> None:
    gate = LookupGate()
    assert rounds_between_looks(gate, 1, [False] * 4) == [0, 1, 2, 4]
    assert gate.due(2)
    gate.forget(1)
    assert rounds_between_looks(gate, 1, [False] * 2) == [0, 1]
