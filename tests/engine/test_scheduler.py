"""First come, first served, within budget and blocks; test_scheduler_random.py has everything at once."""

from collections.abc import Mapping
from typing import Any

import pytest

from each import each
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.errors import UserError
from eyas.sampling import Sampling

SIZE = 4
OFF = Speculation(mode="off")


def scheduler(blocks: int = 64, **changes: Any) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128} | changes
    return Scheduler(BlockManager(blocks, SIZE), **limits)


def seq(
    key: int,
    prompt: list[int] | int,
    *,
    new: int = 8,
    speculation: Speculation = OFF,
    cache_salt: str | None = None,
    priority: int = 0,
) -> SequenceState:
    """A request with a given prompt, or one of its own."""
    tokens = [1000 * key + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return SequenceState(
        key=key,
        arrival=key,
        request=Request(
            prompt=tuple(tokens),
            sampling=Sampling(),
            max_new_tokens=new,
            speculation=speculation,
            cache_salt=cache_salt,
            priority=priority,
        ),
    )


def added(made: Scheduler, *seqs: SequenceState) -> tuple[SequenceState, ...]:
    for one in seqs:
        made.add(one)
    return seqs


def step(made: Scheduler, wanted: Mapping[int, int] | None = None, *, accept: int = 0) -> SchedulerOutput:
    """Plan and commit; at most `accept` drafts of each row are accepted. Finish requests at their limit."""
    plan = made.plan(lambda _: wanted or {})
    for row in plan.rows:
        accepted = min(accept, row.drafts)
        made.commit(row.seq, read=row.count + accepted, new_tokens=[7] * (accepted + 1) if row.samples else [])
        if len(row.seq.tokens) == row.seq.limit:
            made.finish(row.seq, FinishReason.LENGTH)
    made.check()
    return plan


def shape(plan: SchedulerOutput) -> list[tuple[int, int, int, int, bool]]:
    return [(row.seq.key, row.start, row.count, row.drafts, row.samples) for row in plan.rows]


def finish_all(made: Scheduler, most_steps: int = 1000) -> None:
    for _ in range(most_steps):
        if not made.running and not made.waiting:
            return
        step(made)
    raise AssertionError("requests are left")


@each(("name", "value"), [("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_model_len", 1)])
def test_limits_that_let_nothing_run_are_refused(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}"):
        scheduler(**{name: value})


def test_requests_that_could_never_run_are_refused() -> None:
    made = scheduler(max_model_len=10)
    made.add(seq(0, 9))
    with pytest.raises(UserError, match="request 1 has 10 tokens, above the 9"):
        made.add(seq(1, 10))
    assert made.waiting == 1
    made = scheduler(blocks=3)
    made.add(seq(0, 5, new=8))  # the last of its 13 tokens is never read
    words = r"grow to 14 tokens, which need 4 blocks of 4, above the 3 .* within 13 tokens"
    with pytest.raises(UserError, match=words):
        made.add(seq(1, 5, new=9))
    made = scheduler()
    made.add(seq(3, 5))
    for again in (seq(3, 5), seq(2, 5)):  # a key in use, and an earlier arrival
        with pytest.raises(AssertionError):
            made.add(again)


def test_a_request_reads_its_prompt_then_decodes_to_its_limit() -> None:
    made = scheduler()
    (one,) = added(made, seq(0, 5, new=3))
    assert shape(step(made)) == [(0, 0, 5, 0, True)]
    assert shape(step(made)) == [(0, 5, 1, 0, True)]
    assert shape(step(made)) == [(0, 6, 1, 0, True)]
    assert (one.finished, one.new_tokens, one.blocks) == (FinishReason.LENGTH, 3, [])
    assert shape(step(made)) == []
    made = scheduler(max_model_len=8)
    (one,) = added(made, seq(0, 5, new=50))
    assert one.limit == 8, "the longest context comes before its own limit"
    finish_all(made)
    assert len(one.tokens) == 8


def test_prompts_are_read_in_chunks_within_the_budget() -> None:
    made = scheduler(max_num_batched_tokens=10)
    added(made, seq(0, 14), seq(1, 9))
    assert shape(step(made)) == [(0, 0, 10, 0, False)]
    assert shape(step(made)) == [(0, 10, 4, 0, True), (1, 0, 6, 0, False)]
    assert shape(step(made)) == [(0, 14, 1, 0, True), (1, 6, 3, 0, True)]
    assert shape(step(made)) == [(0, 15, 1, 0, True), (1, 9, 1, 0, True)]
    made = scheduler(max_num_batched_tokens=8)
    added(made, seq(0, 3), seq(1, 20))
    step(made)
    assert shape(step(made)) == [(0, 3, 1, 0, True), (1, 5, 7, 0, False)], "decoding goes before reading"


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    made = scheduler(max_num_batched_tokens=2, max_num_seqs=4)
    added(made, *(seq(key, 2, new=4) for key in range(4)))
    while made.running or made.waiting:
        decoding = [one.key for one in made.running if one.pending == 1]
        rows = step(made, dict.fromkeys(range(4), 3)).rows
        assert [row.seq.key for row in rows][: len(decoding)] == decoding, "each decodes in every step"
        assert sum(row.count + row.drafts for row in rows) <= 2


def test_the_first_prompt_advances_however_many_requests_decode() -> None:
    made = scheduler(max_num_batched_tokens=3, max_num_seqs=3)
    decoding(made, seq(0, 1, new=30), seq(1, 1, new=30))
    added(made, seq(2, 12, new=1))
    for position in range(12):
        assert (2, position, 1, 0, position == 11) in shape(step(made, {0: 9, 1: 9}))


def test_requests_are_admitted_by_priority_and_arrival() -> None:
    made = scheduler(max_num_seqs=2)
    added(made, *(seq(key, 3, new=2 + key) for key in range(5)))
    order: list[int] = []
    while made.running or made.waiting:
        order += [row.seq.key for row in step(made).rows if row.start == 0]
    assert order == [0, 1, 2, 3, 4]
    made = scheduler(max_num_seqs=1)
    added(made, seq(0, 3, new=2), seq(1, 3, new=2, priority=5), seq(2, 3, new=2), seq(3, 3, new=2, priority=-1))
    order: list[int] = []
    while made.running or made.waiting:
        order += [row.seq.key for row in step(made).rows if row.start == 0]
    assert order == [3, 0, 2, 1], "by priority, then by arrival"

    made = scheduler(blocks=8)
    bulk, urgent = added(made, seq(0, 13, new=17, priority=1), seq(1, 11, new=17))
    while not (bulk.finished or urgent.finished):
        step(made)
    assert (bulk.preemptions, urgent.preemptions) == (1, 0), "the earlier one is the less urgent"
    assert urgent.finished


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    made = scheduler(blocks=9)
    added(made, seq(0, 16, new=2), seq(1, 28, new=2), seq(2, 2, new=2))
    assert [row.seq.key for row in step(made).rows] == [0]
    assert made.waiting == 2
    step(made)
    assert [row.seq.key for row in step(made).rows] == [1, 2]


def test_a_new_request_leaves_a_block_for_each_of_the_others() -> None:
    made = scheduler(blocks=8)
    added(made, seq(0, 15, new=8), seq(1, 13, new=4))
    step(made)
    assert made.waiting == 1, "4 blocks are free and it needs 4, but then the first could not grow"


def test_a_request_starts_behind_its_prefix_cache_hit() -> None:
    made = scheduler()
    (first,) = added(made, seq(0, list(range(10)), new=1))
    step(made)
    (second,) = added(made, seq(1, [*range(9), 50], new=1))
    assert shape(step(made)) == [(1, 8, 2, 0, True)]
    assert first.finished is second.finished is FinishReason.LENGTH
    assert (made._block_manager.hits, made._block_manager.used) == (2, 0)
    made = scheduler()
    (first,) = added(made, seq(0, list(range(10))))
    step(made)
    (second,) = added(made, seq(1, [*range(9), 50]))
    step(made)
    assert second.blocks[:2] == first.blocks[:2], "blocks are found while their owner runs"
    assert second.blocks[2] != first.blocks[2]


def lagging() -> tuple[Scheduler, SequenceState]:
    """A request that decodes behind 3 blocks of another, of which the drafter has read the first."""
    made = scheduler()
    (first,) = added(made, seq(0, list(range(14)), new=1, speculation=Speculation()))
    made.plan(lambda _: {})
    made.commit(first, read=14, new_tokens=[7], drafter_length=7)
    made.finish(first, FinishReason.LENGTH)
    (second,) = added(made, seq(1, list(range(14)), speculation=Speculation()))
    assert shape(step(made)) == [(1, 12, 2, 0, True)]
    return made, second


def test_a_request_lags_if_the_drafter_has_read_less_of_its_prefix() -> None:
    made, one = lagging()
    assert (one.num_cached_tokens, one.drafter_length, one.lags, one.followed) == (12, 4, True, False)
    (other,) = added(made, seq(2, list(range(14))))
    assert shape(step(made)) == [(1, 14, 1, 0, True), (2, 12, 2, 0, True)]
    assert (other.num_cached_tokens, other.lags, other.followed) == (12, False, False)


def test_a_lagging_request_that_catches_up_reads_again_from_where_the_drafter_is() -> None:
    made, one = lagging()
    stay = one.stay
    one.catches_up = True
    plan = made.plan(lambda _: {})
    assert shape(plan) == [(1, 4, 11, 0, True)]
    assert (one.written_length, one.followed) == (14, True)
    assert one.stay != stay, "so the device is told again"
    made.commit(one, read=11, new_tokens=[7], drafter_length=14)
    (other,) = added(made, seq(2, list(range(14)), speculation=Speculation()))
    plan = made.plan(lambda _: {})
    assert shape(plan) == [(1, 15, 1, 0, True), (2, 12, 2, 0, True)]
    assert (other.drafter_length, other.followed) == (12, True)


def test_nothing_is_read_again_for_one_token_or_in_flight_or_while_another_reads_it() -> None:
    made, one = lagging()
    (other,) = added(made, seq(2, list(range(14)), speculation=Speculation()))
    step(made)
    one.catches_up = other.catches_up = True
    plan = made.plan(lambda _: {})
    assert shape(plan) == [(2, 14, 1, 0, True), (1, 4, 12, 0, True)]
    made.launched(plan)
    assert shape(made.plan(lambda _: {})) == [(1, 16, 1, 0, True), (2, 15, 1, 0, True)], "only the next tokens"
    made.commit(other, read=1, new_tokens=[7])
    made.commit(one, read=12, new_tokens=[7], drafter_length=15)
    made.landed(plan)
    plan = made.plan(lambda _: {})
    assert shape(plan) == [(1, 16, 1, 0, True), (2, 12, 4, 0, True)], "the first block of its own"
    made, one = lagging()
    one.catches_up = True
    one.limit = len(one.tokens) + 1
    assert shape(made.plan(lambda _: {})) == [(1, 14, 1, 0, True)]


def test_a_request_in_flight_waits_until_it_can_read_again() -> None:
    made, one = lagging()
    plan = made.plan(lambda _: {})
    made.launched(plan)
    one.catches_up = True
    assert made.plan(lambda _: {}).rows == ()
    made.commit(one, read=1, new_tokens=[7])
    made.landed(plan)
    assert shape(made.plan(lambda _: {})) == [(1, 4, 12, 0, True)]


def test_a_gap_no_longer_than_the_rest_of_the_prompt_is_read_with_it() -> None:
    made, one = lagging()
    made.cancel(one.key)
    added(made, seq(2, list(range(20)), speculation=Speculation()))
    plan = made.plan(lambda _: {})
    assert shape(plan) == [(2, 4, 16, 0, True)]
    assert (plan.rows[0].seq.written_length, plan.rows[0].seq.num_cached_tokens) == (12, 12)


def test_after_a_swap_of_weights_lagging_requests_read_with_the_new_ones_and_others_go_on() -> None:
    made, one = lagging()
    (other,) = added(made, seq(2, 5, speculation=Speculation()))
    step(made)
    made.note_new_weights()
    assert (one.drafts_outdated, other.drafts_outdated) == (False, True)
    one.catches_up = True
    assert shape(step(made)) == [(2, 5, 1, 0, True), (1, 0, 16, 0, True)]


def test_without_a_drafter_requests_never_lag() -> None:
    made = scheduler(drafter=False)
    added(made, seq(0, list(range(10)), speculation=Speculation()))
    step(made)
    (second,) = added(made, seq(1, list(range(10)), speculation=Speculation()))
    step(made)
    assert (second.target_length, second.drafter_length, made._block_manager.hits) == (10, 0, 2)


def test_a_block_is_registered_only_when_its_successor_is_known() -> None:
    made = scheduler()
    (one,) = added(made, seq(0, 4))
    plan = made.plan(lambda _: {})
    assert made._block_manager.match([*one.tokens, 7]) == []
    made.commit(one, read=plan.rows[0].count, new_tokens=[7])
    assert made._block_manager.match([*one.tokens[:4], 8]) == []
    assert made._block_manager.match([*one.tokens[:4], 7]) == one.blocks[:1]


def decoding(made: Scheduler, *seqs: SequenceState) -> None:
    """Let requests read their prompts."""
    added(made, *seqs)
    while any(one.pending > 1 for one in seqs):
        step(made)


def drafts(rows: tuple[ScheduledRow, ...]) -> list[int]:
    return [row.drafts for row in rows]


def test_drafts_get_blocks_and_release_them_when_rejected() -> None:
    made = scheduler()
    one = seq(0, 6, new=30)
    decoding(made, one)
    plan = made.plan(lambda _: {0: 9})
    assert shape(plan) == [(0, 6, 1, 9, True)]
    assert len(one.blocks) == 4
    made.commit(one, read=3, new_tokens=[7, 7, 7])
    assert (one.target_length, len(one.tokens), len(one.blocks)) == (9, 10, 3)
    made.check()


def test_no_draft_goes_beyond_the_last_allowed_token() -> None:
    made = scheduler(max_model_len=16)
    one, other = seq(0, 6, new=5), seq(1, 12, new=50)
    decoding(made, one, other)
    assert drafts(made.plan(lambda _: {0: 9, 1: 9}).rows) == [3, 2], "with the target's token, 11 and 16 are full"


def test_a_short_budget_is_shared_among_drafts() -> None:
    made = scheduler(max_num_batched_tokens=13)
    decoding(made, *(seq(key, 3, new=40) for key in range(4)))
    assert drafts(made.plan(lambda _: {0: 9, 1: 1, 2: 9, 3: 0}).rows) == [4, 1, 4, 0]
    assert drafts(made.plan(lambda _: {0: 2, 1: 2, 2: 2}).rows) == [2, 2, 2, 0]
    assert drafts(made.plan(lambda _: {}).rows) == [0, 0, 0, 0]


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    made = scheduler(max_num_batched_tokens=21)
    decoding(made, seq(0, 3, new=100))
    added(made, seq(1, 40))
    assert shape(step(made, {0: 50})) == [(0, 3, 1, 10, True), (1, 0, 10, 0, False)]
    assert shape(step(made, {0: 4})) == [(0, 4, 1, 4, True), (1, 10, 16, 0, False)]


def test_drafts_are_dropped_rather_than_a_request_preempted() -> None:
    made = scheduler(blocks=5)
    decoding(made, seq(0, 7, new=12), seq(1, 6, new=12))
    plan = made.plan(lambda _: {0: 9, 1: 9})
    assert plan.preempted == ()
    assert drafts(plan.rows) == [4, 1], "of 5 blocks the first has 3 and the second 2"


def test_drafts_take_no_block_from_a_newcomer() -> None:
    made = scheduler(blocks=6)
    decoding(made, seq(0, 7, new=16))
    added(made, seq(1, 12, new=4))
    plan = made.plan(lambda _: {0: 15})
    assert [(row.seq.key, row.drafts) for row in plan.rows] == [(0, 4), (1, 0)]


def test_the_latest_is_preempted_when_a_block_is_missing() -> None:
    made = scheduler(blocks=6)
    seqs = [seq(key, 4, new=16) for key in range(3)]
    decoding(made, *seqs)
    for _ in range(4):
        step(made)
    assert [len(one.blocks) for one in seqs] == [2, 2, 2]
    plan = step(made)
    assert plan.preempted == (seqs[2],)
    assert [row.seq.key for row in plan.rows] == [0, 1]
    assert (seqs[2].blocks, seqs[2].target_length, seqs[2].preemptions) == ([], 0, 1)
    assert len(seqs[2].tokens) == 9, "its tokens stay"


def test_a_preempted_request_is_the_first_to_come_back_and_the_oldest_is_never_preempted() -> None:
    made = scheduler(blocks=6, max_num_seqs=3)
    seqs = [seq(key, 4, new=9 if key == 0 else 16) for key in range(4)]
    added(made, *seqs)
    while not seqs[2].preemptions:
        step(made)
    while seqs[0].finished is None:
        step(made)
    assert made._waiting[0] is seqs[2]
    finish_all(made)
    assert all(one.finished is FinishReason.LENGTH for one in seqs)
    made = scheduler(blocks=10)
    seqs = [seq(key, 3, new=38) for key in range(5)]
    added(made, *seqs)
    finish_all(made)
    assert seqs[0].preemptions == 0
    assert sum(one.preemptions for one in seqs) > 3
    made = scheduler(blocks=4)
    (one,) = added(made, seq(0, 3, new=14))
    finish_all(made)
    assert (len(one.tokens), one.preemptions) == (17, 0), "alone it can fill the pool to the last block"


def test_a_preempted_request_reads_only_what_the_cache_lost() -> None:
    made = scheduler(blocks=8)
    first, second = seq(0, 8, new=9), seq(1, 9, new=16)
    decoding(made, first, second)
    while not second.preemptions:
        step(made)
    length = len(second.tokens)
    while made.waiting:
        plan = step(made)
    row = plan.rows[-1]
    assert row.seq is second
    assert 0 < row.start < length
    assert row.start + row.count == length
    assert row.samples


def test_waiting_and_reading_requests_can_be_cancelled() -> None:
    made = scheduler(max_num_seqs=1)
    _, second, third = added(made, seq(0, 3, new=2), seq(1, 3, new=2), seq(2, 3, new=2))
    step(made)
    assert made.cancel(1)
    assert second.finished is FinishReason.CANCELLED
    finish_all(made)
    assert third.finished is FinishReason.LENGTH
    assert second.new_tokens == 0
    assert not made.cancel(1), "it is gone"
    assert not made.cancel(9), "it never was"
    made = scheduler(max_num_batched_tokens=5)
    (one,) = added(made, seq(0, 16))
    step(made)
    assert made.cancel(0)
    made.check()
    assert (made.running, made._block_manager.used, made._block_manager.cached) == ([], 0, 1)
    assert one.finished is FinishReason.CANCELLED


def test_what_a_step_gives_to_a_cancelled_request_is_dropped() -> None:
    made = scheduler()
    one, other = seq(0, 6), seq(1, 6)
    decoding(made, one, other)
    made.plan(lambda _: {0: 3, 1: 3})
    assert made.cancel(0)
    assert made._block_manager.used == len(other.blocks)
    made.commit(one, read=2, new_tokens=[7, 7], drafter_length=7)
    made.finish(one, FinishReason.STOP)
    made.commit(other, read=2, new_tokens=[7, 7])
    made.check()
    assert (one.finished, len(one.tokens)) == (FinishReason.CANCELLED, 7)


def test_the_check_finds_a_block_without_owner() -> None:
    made = scheduler()
    (one,) = added(made, seq(0, 6))
    step(made)
    one.blocks.pop()
    with pytest.raises(AssertionError):
        made.check()


def test_a_request_that_decodes_alone_stays_in_one_run_of_blocks() -> None:
    made = scheduler(blocks=40, max_model_len=160)
    (one,) = added(made, seq(0, 10, new=140))
    while len(one.tokens) < 149:
        step(made, {0: 5}, accept=2)
    assert one.blocks == list(range(one.blocks[0], one.blocks[0] + 38))


def test_prefixes_are_shared_only_with_equal_salts() -> None:
    made = scheduler()
    prompt = list(range(4 * SIZE + 1))
    for key, (salt, cached) in enumerate([("a", 0), ("b", 0), (None, 0), ("a", 16), ("b", 16), (None, 16), ("", 0)]):
        (one,) = added(made, seq(key, prompt, cache_salt=salt))
        finish_all(made)
        assert one.num_cached_tokens == cached, (key, salt)


def test_a_preempted_request_finds_its_own_prefix_and_no_other() -> None:
    made = scheduler()
    prompt = list(range(4 * SIZE + 1))
    first, second = added(made, seq(0, prompt, new=20, cache_salt="a"), seq(1, prompt, new=20, cache_salt="b"))
    step(made)
    owned = [list(first.blocks), list(second.blocks)]
    made.preempt_all(drafter=False)
    assert first.blocks == second.blocks == []
    step(made)
    assert [first.blocks[:4], second.blocks[:4]] == [blocks[:4] for blocks in owned]
    assert set(first.blocks).isdisjoint(second.blocks)
