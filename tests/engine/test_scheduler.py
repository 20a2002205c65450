"""First come, first served, within budget and pages; see test_scheduler_random.py for all of it at once."""

from collections.abc import Mapping
from typing import Any

import pytest

from eyas.engine.pages import PagePool
from eyas.engine.request import FinishReason, Live, Request, Speculation
from eyas.engine.scheduler import Row, Scheduler, StepPlan
from eyas.errors import UserError
from eyas.sampling import Sampling

SIZE = 4
OFF = Speculation(mode="off")


def scheduler(pages: int = 64, **changes: Any) -> Scheduler:
    limits = {"max_rows": 8, "token_budget": 64, "max_length": 128, "prefill_chunk": None} | changes
    return Scheduler(PagePool(pages, SIZE), **limits)


def live(key: int, prompt: list[int] | int, *, new: int = 8, speculation: Speculation = OFF) -> Live:
    """A request whose prompt is its own, or given."""
    tokens = [1000 * key + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Live(
        key=key,
        arrival=key,
        request=Request(prompt=tuple(tokens), sampling=Sampling(), max_new_tokens=new, speculation=speculation),
    )


def added(made: Scheduler, *lives: Live) -> tuple[Live, ...]:
    for one in lives:
        made.add(one)
    return lives


def step(made: Scheduler, wanted: Mapping[int, int] | None = None, *, accept: int = 0) -> StepPlan:
    """Plan and commit: of each row's drafts `accept` are accepted, at most; finish what is at its limit."""
    plan = made.plan(wanted or {})
    for row in plan.rows:
        accepted = min(accept, row.drafts)
        made.commit(row.live, read=row.count + accepted, new_tokens=[7] * (accepted + 1) if row.samples else [])
        if len(row.live.tokens) == made.limit(row.live):
            made.finish(row.live, FinishReason.LENGTH)
    made.check()
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int, int, bool]]:
    return [(row.live.key, row.start, row.count, row.drafts, row.samples) for row in plan.rows]


def finish_all(made: Scheduler, most_steps: int = 1000) -> None:
    for _ in range(most_steps):
        if not made.running and not made.waiting:
            return
        step(made)
    raise AssertionError("requests are left")


@pytest.mark.parametrize(
    ("name", "value"), [("max_rows", 0), ("token_budget", 0), ("max_length", 1), ("prefill_chunk", 0)]
)
def test_limits_that_let_nothing_run_are_refused(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}"):
        scheduler(**{name: value})


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    made = scheduler(max_length=10)
    made.add(live(0, 9))
    with pytest.raises(UserError, match="request 1 has 10 tokens, above the 9"):
        made.add(live(1, 10))
    assert made.waiting == 1


def test_what_needs_more_pages_than_there_are_is_refused() -> None:
    made = scheduler(pages=3)
    made.add(live(0, 5, new=8))  # the last of its 13 tokens is never read
    with pytest.raises(UserError, match=r"grow to 14 tokens, which need 4 pages of 4, above the 3 .* within 13 tokens"):
        made.add(live(1, 5, new=9))


def test_keys_are_given_once_and_arrivals_ascend() -> None:
    made = scheduler()
    made.add(live(3, 5))
    for again in (live(3, 5), live(2, 5)):
        with pytest.raises(AssertionError):
            made.add(again)


def test_a_request_reads_its_prompt_then_decodes_to_its_limit() -> None:
    made = scheduler()
    (one,) = added(made, live(0, 5, new=3))
    assert shape(step(made)) == [(0, 0, 5, 0, True)]
    assert shape(step(made)) == [(0, 5, 1, 0, True)]
    assert shape(step(made)) == [(0, 6, 1, 0, True)]
    assert (one.finished, one.new_tokens, one.pages) == (FinishReason.LENGTH, 3, [])
    assert shape(step(made)) == []


def test_the_longest_context_ends_an_answer_before_its_own_limit() -> None:
    made = scheduler(max_length=8)
    (one,) = added(made, live(0, 5, new=50))
    assert made.limit(one) == 8
    finish_all(made)
    assert len(one.tokens) == 8


def test_prompts_are_read_in_chunks_within_the_budget() -> None:
    made = scheduler(token_budget=10, prefill_chunk=6)
    added(made, live(0, 14), live(1, 9))
    assert shape(step(made)) == [(0, 0, 6, 0, False), (1, 0, 4, 0, False)]
    assert shape(step(made)) == [(0, 6, 6, 0, False), (1, 4, 4, 0, False)]
    assert shape(step(made)) == [(1, 8, 1, 0, True), (0, 12, 2, 0, True)]
    assert shape(step(made)) == [(0, 14, 1, 0, True), (1, 9, 1, 0, True)]


def test_decoding_goes_before_reading() -> None:
    made = scheduler(token_budget=8)
    added(made, live(0, 3), live(1, 20))
    step(made)
    assert shape(step(made)) == [(0, 3, 1, 0, True), (1, 5, 7, 0, False)]


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    made = scheduler(token_budget=2, max_rows=4)
    added(made, *(live(key, 2, new=4) for key in range(4)))
    while made.running or made.waiting:
        decoding = [one.key for one in made.running if one.pending == 1]
        rows = step(made, dict.fromkeys(range(4), 3)).rows
        assert [row.live.key for row in rows][: len(decoding)] == decoding, "each decodes in every step"
        assert sum(row.count + row.drafts for row in rows) <= 2


def test_the_first_prompt_gets_on_however_many_decode() -> None:
    made = scheduler(token_budget=3, max_rows=3, prefill_chunk=1)
    added(made, live(0, 12, new=1), live(1, 1, new=30), live(2, 1, new=30))
    for position in range(12):
        assert (0, position, 1, 0, position == 11) in shape(step(made, {1: 9, 2: 9}))


def test_requests_are_admitted_in_arrival_order() -> None:
    made = scheduler(max_rows=2)
    added(made, *(live(key, 3, new=2 + key) for key in range(5)))
    order: list[int] = []
    while made.running or made.waiting:
        order += [row.live.key for row in step(made).rows if row.start == 0]
    assert order == [0, 1, 2, 3, 4]


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    made = scheduler(pages=9)
    added(made, live(0, 16, new=2), live(1, 28, new=2), live(2, 2, new=2))
    assert [row.live.key for row in step(made).rows] == [0]
    assert made.waiting == 2
    step(made)
    assert [row.live.key for row in step(made).rows] == [1, 2]


def test_a_newcomer_leaves_a_page_for_each_of_the_others() -> None:
    made = scheduler(pages=8)
    added(made, live(0, 15, new=8), live(1, 13, new=4))
    step(made)
    assert made.waiting == 1, "4 pages are free and it needs 4, but then the first could not grow"


def test_a_request_starts_behind_what_the_prefix_cache_has() -> None:
    made = scheduler()
    (first,) = added(made, live(0, list(range(10)), new=1))
    step(made)
    (second,) = added(made, live(1, [*range(9), 50], new=1))
    assert shape(step(made)) == [(1, 8, 2, 0, True)]
    assert first.finished is second.finished is FinishReason.LENGTH
    assert (made._pool.hits, made._pool.used) == (2, 0)


def test_a_shared_page_is_found_while_its_owner_runs() -> None:
    made = scheduler()
    (first,) = added(made, live(0, list(range(10))))
    step(made)
    (second,) = added(made, live(1, [*range(9), 50]))
    step(made)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_a_speculating_request_starts_only_behind_what_the_drafter_has_read() -> None:
    made = scheduler()
    (first,) = added(made, live(0, list(range(14)), speculation=Speculation()))
    step(made)
    made.note_read(first, 11)  # two pages and a part of the third
    (second, third) = added(made, live(1, list(range(14)), speculation=Speculation()), live(2, list(range(14))))
    plan = made.plan({})
    assert [(row.live.key, row.start) for row in plan.rows] == [(0, 14), (1, 8), (2, 12)]
    assert (second.drafter_length, third.drafter_length) == (8, 0)


def test_without_a_drafter_a_request_that_would_speculate_starts_behind_any_prefix() -> None:
    made = scheduler(drafter=False)
    added(made, live(0, list(range(10)), speculation=Speculation()))
    step(made)
    (second,) = added(made, live(1, list(range(10)), speculation=Speculation()))
    step(made)
    assert (second.target_length, second.drafter_length, made._pool.hits) == (10, 0, 2)


def test_a_page_is_registered_only_when_its_successor_is_known() -> None:
    made = scheduler()
    (one,) = added(made, live(0, 4))
    plan = made.plan({})
    assert made._pool.match([*one.tokens, 7], need_draft=False) == []
    made.commit(one, read=plan.rows[0].count, new_tokens=[7])
    assert made._pool.match([*one.tokens[:4], 8], need_draft=False) == []
    assert made._pool.match([*one.tokens[:4], 7], need_draft=False) == one.pages[:1]


def decoding(made: Scheduler, *lives: Live) -> None:
    """Let requests read their prompts."""
    added(made, *lives)
    while any(one.pending > 1 for one in lives):
        step(made)


def drafts(rows: tuple[Row, ...]) -> list[int]:
    return [row.drafts for row in rows]


def test_drafts_get_pages_and_lose_them_when_rejected() -> None:
    made = scheduler()
    one = live(0, 6, new=30)
    decoding(made, one)
    plan = made.plan({0: 9})
    assert shape(plan) == [(0, 6, 1, 9, True)]
    assert len(one.pages) == 4
    made.commit(one, read=3, new_tokens=[7, 7, 7])
    assert (one.target_length, len(one.tokens), len(one.pages)) == (9, 10, 3)
    made.check()


def test_no_draft_goes_beyond_the_last_allowed_token() -> None:
    made = scheduler(max_length=16)
    one, other = live(0, 6, new=5), live(1, 12, new=50)
    decoding(made, one, other)
    assert drafts(made.plan({0: 9, 1: 9}).rows) == [3, 2], "with one token more, 11 and 16 are full"


def test_a_short_budget_is_shared_among_drafts() -> None:
    made = scheduler(token_budget=13)
    decoding(made, *(live(key, 3, new=40) for key in range(4)))
    assert drafts(made.plan({0: 9, 1: 1, 2: 9, 3: 0}).rows) == [4, 1, 4, 0]
    assert drafts(made.plan({0: 2, 1: 2, 2: 2}).rows) == [2, 2, 2, 0]
    assert drafts(made.plan({}).rows) == [0, 0, 0, 0]


def test_drafts_leave_half_of_the_budget_to_prompts() -> None:
    made = scheduler(token_budget=21)
    decoding(made, live(0, 3, new=100))
    added(made, live(1, 40))
    assert shape(step(made, {0: 50})) == [(0, 3, 1, 10, True), (1, 0, 10, 0, False)]
    assert shape(step(made, {0: 4})) == [(0, 4, 1, 4, True), (1, 10, 16, 0, False)]


def test_drafts_are_dropped_rather_than_a_request_preempted() -> None:
    made = scheduler(pages=5)
    decoding(made, live(0, 7, new=12), live(1, 6, new=12))
    plan = made.plan({0: 9, 1: 9})
    assert plan.preempted == ()
    assert drafts(plan.rows) == [4, 1], "of 5 pages the first has 3 and the second 2"


def test_drafts_take_no_page_from_a_newcomer() -> None:
    made = scheduler(pages=6)
    decoding(made, live(0, 7, new=16))
    added(made, live(1, 12, new=4))
    plan = made.plan({0: 15})
    assert [(row.live.key, row.drafts) for row in plan.rows] == [(0, 4), (1, 0)]


def test_the_latest_is_preempted_when_a_page_is_missing() -> None:
    made = scheduler(pages=6)
    lives = [live(key, 4, new=16) for key in range(3)]
    decoding(made, *lives)
    for _ in range(4):
        step(made)
    assert [len(one.pages) for one in lives] == [2, 2, 2]
    plan = step(made)
    assert plan.preempted == (lives[2],)
    assert [row.live.key for row in plan.rows] == [0, 1]
    assert (lives[2].pages, lives[2].target_length, lives[2].preemptions) == ([], 0, 1)
    assert len(lives[2].tokens) == 9, "its tokens stay"


def test_a_preempted_request_is_the_first_to_come_back() -> None:
    made = scheduler(pages=6, max_rows=3)
    lives = [live(key, 4, new=9 if key == 0 else 16) for key in range(4)]
    added(made, *lives)
    while not lives[2].preemptions:
        step(made)
    while lives[0].finished is None:
        step(made)
    assert made._waiting[0] is lives[2]
    finish_all(made)
    assert all(one.finished is FinishReason.LENGTH for one in lives)


def test_a_preempted_request_reads_again_only_what_the_cache_lost() -> None:
    made = scheduler(pages=8)
    first, second = live(0, 8, new=9), live(1, 9, new=16)
    decoding(made, first, second)
    while not second.preemptions:
        step(made)
    length = len(second.tokens)
    while made.waiting:
        plan = step(made)
    row = plan.rows[-1]
    assert row.live is second
    assert 0 < row.start < length
    assert row.start + row.count == length
    assert row.samples


def test_the_oldest_is_never_preempted() -> None:
    made = scheduler(pages=10)
    lives = [live(key, 3, new=38) for key in range(5)]
    added(made, *lives)
    finish_all(made)
    assert lives[0].preemptions == 0
    assert sum(one.preemptions for one in lives) > 3


def test_one_request_alone_can_fill_the_pool_to_the_last_page() -> None:
    made = scheduler(pages=4)
    (one,) = added(made, live(0, 3, new=14))
    finish_all(made)
    assert (len(one.tokens), one.preemptions) == (17, 0)


def test_a_waiting_request_can_be_cancelled() -> None:
    made = scheduler(max_rows=1)
    _, second, third = added(made, live(0, 3, new=2), live(1, 3, new=2), live(2, 3, new=2))
    step(made)
    assert made.cancel(1)
    assert second.finished is FinishReason.CANCELLED
    finish_all(made)
    assert third.finished is FinishReason.LENGTH
    assert second.new_tokens == 0


def test_a_running_request_can_be_cancelled_in_the_middle_of_its_prompt() -> None:
    made = scheduler(prefill_chunk=5)
    (one,) = added(made, live(0, 16))
    step(made)
    assert made.cancel(0)
    made.check()
    assert (made.running, made._pool.used, made._pool.cached) == ([], 0, 1)
    assert one.finished is FinishReason.CANCELLED


def test_what_a_step_gives_to_a_request_cancelled_meanwhile_is_dropped() -> None:
    made = scheduler()
    one, other = live(0, 6), live(1, 6)
    decoding(made, one, other)
    made.plan({0: 3, 1: 3})
    assert made.cancel(0)
    assert made._pool.used == len(other.pages)
    made.commit(one, read=2, new_tokens=[7, 7])
    made.note_read(one, 7)
    made.finish(one, FinishReason.STOP)
    made.commit(other, read=2, new_tokens=[7, 7])
    made.check()
    assert (one.finished, len(one.tokens)) == (FinishReason.CANCELLED, 7)


def test_cancelling_what_is_not_there_says_so() -> None:
    made = scheduler()
    added(made, live(0, 3, new=1))
    assert not made.cancel(1)
    finish_all(made)
    assert not made.cancel(0)


def test_the_check_finds_a_page_nobody_owns() -> None:
    made = scheduler()
    (one,) = added(made, live(0, 6))
    step(made)
    one.pages.pop()
    with pytest.raises(AssertionError):
        made.check()


def test_a_request_that_decodes_alone_stays_in_one_run_of_pages() -> None:
    made = scheduler(pages=40, max_length=160)
    (one,) = added(made, live(0, 10, new=140))
    while len(one.tokens) < 149:
        step(made, {0: 5}, accept=2)
    assert one.pages == list(range(one.pages[0], one.pages[0] + 38))
