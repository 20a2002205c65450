"""Suffix drafts are verified where they are likely and cheap, and left where they are not."""

import random
from dataclasses import replace

import pytest

from eyas.engine.speculation.acceptance import Acceptance
from eyas.engine.speculation.captured_plan import CapturedShapes
from eyas.engine.speculation.cost_model import CostModel
from eyas.engine.speculation.observations import DraftTiming, RoundOutcome
from eyas.engine.speculation.policy import POLICY
from eyas.engine.speculation.suffix_acceptance import SuffixAcceptance, SuffixOffer
from eyas.engine.speculation.suffix_choice import DecodingBatch, DrafterPromise, SuffixChoice

ONE = DecodingBatch(rows=1, context=100, drafting=1)


def offer(tokens: int = 8, match: int = 8, votes: int = 1, voters: int = 1, *, shared: bool = False) -> SuffixOffer:
    return SuffixOffer(tuple(range(tokens)), match, (votes,) * tokens, (voters,) * tokens, shared)


def costs(per_token: float, plain: float = 1.0, counts: tuple[int, ...] = (1, 2, 4, 8, 16, 24)) -> CostModel:
    """Passes that take a second, and so much more for every further token."""
    made = CostModel()
    for count in counts:
        for _ in range(5):
            made.verify.observe(count, plain + per_token * (count - 1))
    return made


def promise(chance: float, *, rate: float = 0.0) -> DrafterPromise:
    acceptance = Acceptance(7)
    for _ in range(200):
        acceptance.observe(RoundOutcome(key=0, drafted=1, accepted=int(random.Random(_).random() < chance)))
    acceptance.refresh()
    return DrafterPromise(acceptance=acceptance, deepest=7, rate=rate)


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


def test_what_follows_a_chain_that_went_another_way_is_judged_by_its_like() -> None:
    """A drafter is asked where the text promises little: what is found behind its drafts is right less often."""
    acceptance = SuffixAcceptance()
    behind = replace(offer(1, 8), behind=True)
    for _ in range(40):
        acceptance.observe(1, offer(1, 8), [0])
        acceptance.observe(2, behind, [7])
    acceptance.forget(1)
    acceptance.forget(2)
    assert acceptance.chances(3, offer(1, 8))[0] > 0.9
    assert acceptance.chances(3, behind)[0] < 0.2
    assert behind.cut(1).behind


def test_an_offer_agrees_with_a_chain_as_far_as_both_go() -> None:
    assert offer(3).agrees((0, 1))
    assert offer(1).agrees((0, 9, 9))
    assert not offer(3).agrees((0, 9))
    assert not offer(3).agrees(())


# --- the choice --------------------------------------------------------------------------------------------------


def test_nothing_is_verified_before_anything_was_timed() -> None:
    assert SuffixChoice(CostModel()).take(ONE, {0: [0.99] * 8}) == {}


def test_where_drafts_are_free_all_likely_ones_are_verified() -> None:
    assert SuffixChoice(costs(0.0)).take(ONE, {0: [0.9, 0.8, 0.7, 0.6]}) == {0: 4}


def test_where_a_draft_costs_more_than_it_gives_none_is_verified() -> None:
    assert SuffixChoice(costs(1.0)).take(ONE, {0: [0.9, 0.8, 0.7, 0.6]}) == {}


def test_the_number_verified_is_the_one_with_the_best_rate() -> None:
    survivals = [0.9**depth for depth in range(1, 17)]
    for per_token in (0.02, 0.05, 0.1, 0.2, 0.4):
        taken = SuffixChoice(costs(per_token, counts=tuple(range(1, 18)))).take(ONE, {0: survivals})
        rates = [(1 + sum(survivals[:count])) / (1 + per_token * count) for count in range(17)]
        best = max(rates)
        assert rates[taken.get(0, 0)] == pytest.approx(best, rel=0.02)


def test_unlikely_drafts_are_left_to_the_drafter_and_likely_ones_are_not() -> None:
    known = costs(0.02)
    for _ in range(5):
        known.observe_draft(DraftTiming(passes=4, tokens=5, seconds=0.4, first=(2, 0.1)))
    choice = SuffixChoice(known)
    assert choice.take(ONE, {0: [0.5, 0.25]}, drafter=promise(0.8)) == {}
    assert choice.take(ONE, {0: [0.95] * 12}, drafter=promise(0.8)) == {0: 12}
    assert choice.take(ONE, {0: [0.5, 0.25]}, drafter=promise(0.02)) == {0: 2}


def test_what_is_bound_is_verified_whatever_it_costs() -> None:
    assert SuffixChoice(CostModel()).take(ONE, {0: [0.01] * 3, 1: [0.9]}, bound={0}) == {0: 3}
    assert SuffixChoice(costs(2.0)).take(ONE, {0: [0.01] * 3, 1: [0.9]}, bound={0}) == {0: 3}


def test_of_many_requests_the_likeliest_drafts_are_verified() -> None:
    many = DecodingBatch(rows=8, context=100)
    survivals = {key: [0.1 * (key + 1)] * 2 for key in range(8)}
    taken = SuffixChoice(costs(0.05, counts=tuple(range(1, 30)))).take(many, survivals)
    assert taken
    assert set(taken) == set(range(8 - len(taken), 8)), "those behind the least likely taken"


def test_passes_of_unknown_cost_are_tried_a_few_times_where_drafts_are_likely() -> None:
    choice = SuffixChoice(costs(0.1, counts=(1,)))
    assert choice.take(ONE, {0: [0.2] * 8}) == {}
    tried = [choice.take(ONE, {0: [0.9] * 8}) for _ in range(POLICY.suffix_trials + 5)]
    assert tried[: POLICY.suffix_trials] == [{0: POLICY.suffix_trial_tokens}] * POLICY.suffix_trials
    assert tried[POLICY.suffix_trials :] == [{}] * 5


ROUNDS = CapturedShapes(rows=(1, 2, 4), depths=(1, 3, 7), most_tokens=64)


def captured(per_token: float) -> CostModel:
    made = costs(per_token, counts=tuple(range(1, 33)))
    made.shapes = ROUNDS
    for count in range(1, 17):
        for _ in range(5):
            made.verify_alone.observe(count, 1.0 + per_token * (count - 1))
    return made


@pytest.mark.parametrize("rows", [1, 2])
def test_a_round_is_as_deep_as_gives_the_most_tokens_per_second(rows: int) -> None:
    batch, survivals = DecodingBatch(rows=rows, context=9), [[0.9**depth for depth in range(1, 8)]] * rows
    for per_token in (0.0, 0.03, 0.1, 0.3, 2.0):
        depth = SuffixChoice(captured(per_token)).round_depth(batch, ROUNDS, survivals, 0.0)
        rates = {
            depth: (rows + rows * sum(survivals[0][:depth])) / (1 + per_token * (rows * (1 + depth) - 1))
            for depth in (0, 1, 3, 7)
        }
        assert rates[depth] >= 0.97 * max(rates.values())
    assert SuffixChoice(captured(2.0)).round_depth(batch, ROUNDS, survivals, 0.0) == 0


def test_a_round_of_suffix_drafts_must_beat_the_drafters_plan() -> None:
    batch, survivals = DecodingBatch(rows=1, context=9), [[0.9] * 7]
    choice = SuffixChoice(captured(0.0))
    assert choice.round_depth(batch, ROUNDS, survivals, 5.0) == 7
    assert choice.round_depth(batch, ROUNDS, survivals, 7.0) == 0
    assert choice.round_depth(batch, ROUNDS, [[]], 0.0) == 0, "what is in flight uses the offer up"
    assert choice.round_depth(DecodingBatch(rows=1, context=9), replace(ROUNDS, depths=()), survivals, 0.0) == 0


DEEP = replace(ROUNDS, offered=(15,))


def test_few_requests_may_have_deeper_rounds_of_suffix_drafts() -> None:
    assert [DEEP.offered_for(rows) for rows in (1, 4)] == [[1, 3, 7, 15]] * 2
    assert replace(DEEP, rows=(1, 8)).offered_for(5) == [1, 3, 7]
    assert replace(DEEP, most_tokens=8).offered_for(1) == [1, 3, 7]
    assert [DEEP.depth_for(depth) for depth in (0, 2, 7, 8, 13)] == [0, 3, 7, 15, 15]
    sure = [[0.99**depth for depth in range(1, 16)]]
    assert SuffixChoice(captured(0.0)).round_depth(DecodingBatch(rows=1, context=9), DEEP, sure, 0.0) == 15


def test_a_round_goes_beyond_the_drafters_chains_where_that_pays() -> None:
    batch, likely, unlikely = DecodingBatch(rows=1, context=9), [[0.5] * 12], [[0.01] * 12]
    cheap, dear = SuffixChoice(captured(0.01)), SuffixChoice(captured(2.0))
    assert cheap.round_beyond(batch, DEEP, 3, likely, 1.0) == 15
    assert cheap.round_beyond(batch, DEEP, 3, unlikely, 1.0) == 3
    assert dear.round_beyond(batch, DEEP, 3, likely, 1.0) == 3
    assert cheap.round_beyond(batch, ROUNDS, 3, likely, 1.0) == 3, "there are no deeper passes"
    assert SuffixChoice(CostModel()).round_beyond(batch, DEEP, 3, likely, 1.0) == 3, "nothing was timed"


def test_rounds_of_unknown_cost_are_tried_a_few_times() -> None:
    known = CostModel()
    known.shapes = ROUNDS
    for _ in range(5):
        known.verify_alone.observe(1, 1.0)
    choice, batch = SuffixChoice(known), DecodingBatch(rows=1, context=9)
    assert choice.round_depth(batch, ROUNDS, [[0.2] * 7], 0.0) == 0
    tried = [choice.round_depth(batch, ROUNDS, [[0.9] * 7], 0.0) for _ in range(POLICY.suffix_trials + 3)]
    assert tried == [3] * POLICY.suffix_trials + [0] * 3


def test_a_chain_is_continued_as_far_as_that_pays() -> None:
    choice = SuffixChoice(costs(0.1, counts=tuple(range(1, 20))))
    assert choice.extend(ONE, 3, [0.9, 0.8, 0.01], rate=1.0) == 2
    assert choice.extend(ONE, 3, [0.9, 0.8, 0.01], rate=20.0) == 0
    assert choice.extend(ONE, 3, [], rate=1.0) == 0


def test_nothing_is_looked_up_where_the_surest_drafts_would_not_pay() -> None:
    counts = tuple(range(1, 30))
    assert SuffixChoice(costs(0.3, counts=counts)).may_pay(ONE, 24, 0.0)
    assert not SuffixChoice(costs(1.1, counts=counts)).may_pay(ONE, 24, 0.0)
    four = DecodingBatch(rows=4, context=100)
    assert not SuffixChoice(costs(0.9, counts=counts)).may_pay(four, 24, 0.0), "a draft takes as long as a request"
    assert SuffixChoice(costs(0.1, counts=counts)).may_pay(four, 24, 0.0)
    assert not SuffixChoice(costs(0.1, counts=counts)).may_pay(four, 24, 20.0), "the drafter gives more"
    assert SuffixChoice(costs(1.1, counts=(1,))).may_pay(ONE, 24, 0.0), "nobody knows"
