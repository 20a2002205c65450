"""Scheduler and block manager with steps in flight: a step is planned and launched before the last one is committed.

test_scheduler_random.py runs one step after the other.
"""

from typing import Any

import pytest

from each import each
from engine.late_engine import LateEngine, whole_answer
from engine.test_scheduler import added, shape
from engine.test_scheduler import scheduler as empty_scheduler
from engine.test_scheduler import seq as request
from eyas.engine.request import FinishReason, Request, SequenceState
from eyas.engine.scheduler import Scheduler, SchedulerOutput
from eyas.sampling import Sampling

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"blocks": 18, "max_num_seqs": 8},
    {"blocks": 18, "budget": 5, "max_num_seqs": 4},
    {"blocks": 72, "size": 1, "budget": 40},
    {"blocks": 8, "size": 16, "max_num_seqs": 10, "budget": 64},
    {"blocks": 18, "prefix_cache": False},
    {"blocks": 30, "ahead": 2},
]


@each("number", range(len(CONFIGURATIONS)))
def test_no_block_in_flight_is_freed_and_answers_stay_right(number: int) -> None:
    engine = LateEngine(seed=number, **CONFIGURATIONS[number])
    for step in range(500):
        if engine.chance.random() < (0.5 if step % 200 < 100 else 0.02) and engine.scheduler.waiting < 12:
            engine.arrive()
        engine.step()
    while engine.busy:
        engine.step()
    assert engine.block_manager.free == engine.blocks, "every block is back"
    engine.scheduler.check()
    for seq in engine.seqs:
        whole = whole_answer(seq)
        assert seq.tokens == whole[: len(seq.tokens)]
        assert len(seq.tokens) == len(whole) or seq.finished is FinishReason.CANCELLED
    reached = {name for name, times in engine.seen.items() if times}
    assert reached >= {"ended in flight", "cancelled in flight", "stopped among drafts", "depth in flight"}
    assert (engine.seen["read for the drafter"] > 0) == engine.prefix_cache
    if engine.blocks == 18:
        assert reached >= {"preempted", "waited", "chunk behind a chunk"}


@each("blocks", [120, 18])
def test_planning_ahead_gives_the_same_answers_in_about_as_many_steps(blocks: int) -> None:
    engines = [LateEngine(seed=3, ahead=ahead, blocks=blocks, disturbed=False) for ahead in (0, 1)]
    for engine in engines:
        for _ in range(60):
            engine.arrive()
        while engine.busy:
            engine.step()
    one_by_one, ahead = engines
    assert [seq.tokens for seq in one_by_one.seqs] == [seq.tokens for seq in ahead.seqs]
    assert all(seq.tokens == whole_answer(seq) for seq in ahead.seqs)
    # An answer that stops keeps its slot until the next step has landed; with few blocks the host must wait.
    assert ahead.steps <= 1.2 * one_by_one.steps, (one_by_one.steps, ahead.steps)


def scheduler(*seqs: SequenceState, blocks: int = 64, **changes: int) -> Scheduler:
    made = empty_scheduler(blocks, **{"max_num_seqs": 4, **changes})
    added(made, *seqs)
    return made


def launch(made: Scheduler, wanted: dict[int, int] | None = None) -> SchedulerOutput:
    plan = made.plan(lambda _: wanted or {})
    made.launched(plan)
    made.check()
    return plan


def test_chunks_follow_each_other_and_then_the_request_decodes_from_a_lower_bound() -> None:
    one = request(0, 10)
    made = scheduler(one, max_num_batched_tokens=6)
    first = launch(made)
    second = launch(made)
    assert (shape(first), shape(second)) == ([(0, 0, 6, 0, False)], [(0, 6, 4, 0, True)])
    made.commit(one, read=6, new_tokens=[])
    made.landed(first)
    third = launch(made, {0: 3})
    assert shape(third) == [(0, 10, 1, 3, True)]
    made.commit(one, read=4, new_tokens=[7])
    made.landed(second)
    fourth = launch(made, {0: 3})
    assert shape(fourth) == [(0, 11, 1, 3, True)], "the third step may accept 3 drafts and leave it at 14"
    assert len(one.blocks) == 5, "for 11 tokens, 4 that may come and 3 drafts, but not for the last of 18"
    made.commit(one, read=4, new_tokens=[7] * 4)
    assert (one.target_length, one.flights[0].most, made.in_flight) == (14, 4, 2)
    made.check()


def test_a_request_whose_last_token_is_in_flight_gets_no_row_and_leaves_at_once() -> None:
    one = request(0, 4, new=2)
    made = scheduler(one)
    first, second = launch(made), launch(made)
    asked: list[SequenceState] = []
    assert shape(made.plan(lambda decoding: (asked.extend(decoding), {})[1])) == []
    assert asked == []
    made.commit(one, read=4, new_tokens=[7])
    made.landed(first)
    made.commit(one, read=1, new_tokens=[7])
    made.finish(one, FinishReason.LENGTH)
    assert made._block_manager.used == 0, "no step in flight has a row of it"
    made.landed(second)
    made.check()


@each("how", ["finish", "cancel"])
def test_blocks_of_an_ended_request_are_kept_until_the_step_with_its_row_has_landed(how: str) -> None:
    one, other = request(0, 6), request(1, 6)
    made = scheduler(one, other, max_num_seqs=1)
    first, second = launch(made), launch(made, {0: 3})
    blocks, slot = list(one.blocks), one.slot
    if how == "finish":
        made.commit(one, read=6, new_tokens=[7])
        made.finish(one, FinishReason.STOP)
    else:
        made.cancel(0)
        made.commit(one, read=6, new_tokens=[7])
    assert (one.slot, one.blocks, one.flights) == (None, [], [])
    made.landed(first)
    made.check()
    assert made._block_manager.used == len(blocks)
    assert made.plan(lambda _: {}).rows == (), "its slot is not free yet"
    made.commit(one, read=0, new_tokens=[])
    made.landed(second)
    assert made._block_manager.used == 0
    third = launch(made)
    assert ([row.seq for row in third.rows], other.slot) == ([other], slot)


def test_a_request_in_flight_is_not_preempted_but_waited_for() -> None:
    one, other = request(0, 7, new=9), request(1, 4, new=9)
    made = scheduler(one, other, blocks=4)
    first = launch(made)
    assert [row.seq for row in first.rows] == [one, other]
    second = launch(made)
    assert [len(row.seq.blocks) for row in second.rows] == [2, 2]
    third = made.plan(lambda _: {})
    assert (third.rows, third.preempted) == ((), ()), "a block is missing and the last request is in flight"
    for step in (first, second):
        for row in step.rows:
            made.commit(row.seq, read=row.count, new_tokens=[7])
        made.landed(step)
    made.check()
    assert made.plan(lambda _: {}).preempted == (other,)
    assert (other.slot, other.blocks) == (None, [])


def test_steps_land_in_order_and_a_drafter_is_not_swapped_under_them() -> None:
    made = scheduler(request(0, 6))
    launch(made)
    second = launch(made)
    with pytest.raises(AssertionError, match="in the order"):
        made.landed(second)
    with pytest.raises(AssertionError, match="under way"):
        made.preempt_all(drafter=False)


def test_a_step_that_yields_more_than_it_could_is_refused() -> None:
    one = request(0, 6)
    made = scheduler(one)
    launch(made)
    with pytest.raises(AssertionError, match="7 read"):
        made.commit(one, read=7, new_tokens=[7, 7])


def test_a_request_without_a_row_in_flight_is_preempted_beside_a_step() -> None:
    reads = {"sampling": Sampling(), "max_new_tokens": 4, "prompt_logprobs": 0}
    late = [
        SequenceState(key=key, arrival=key, request=Request(prompt=tuple(range(8)), **reads))  # type: ignore[arg-type]
        for key in (1, 2)
    ]
    one = request(0, 3, new=16)
    made = scheduler(one, *late, blocks=7, max_prompt_logits=1)
    last = launch(made, {0: 4})
    assert len(made.running) == 3
    assert late[1].flights == [], "the one logit of a prompt went to the request before it"
    while not late[1].preemptions:
        step = launch(made, {0: 4})
        for row in last.rows:
            new = [7] * (1 + row.drafts) if row.samples else []
            made.commit(row.seq, read=row.count + row.drafts, new_tokens=new)
        made.landed(last)
        last = step
    assert step.preempted == (late[1],)
    assert [row.seq for row in step.rows] == [one, late[0]], "the others continue"


def test_a_tree_has_blocks_for_all_its_nodes_and_yields_at_most_its_depth() -> None:
    one = request(0, 6, new=60)
    made = scheduler(one, blocks=20)
    first = launch(made)
    tree = made.plan(lambda _: {0: 20})
    made.launched(tree, deepest=3)
    assert tree.rows[0].drafts == 20
    assert len(one.blocks) == 7, "6 tokens, one in flight and 20 nodes, in blocks of 4"
    assert one.flights[-1].most == 4
    made.commit(one, read=6, new_tokens=[7])
    made.landed(first)
    made.plan(lambda _: {0: 20})
    assert len(one.blocks) == 8, "4 more tokens and 20 nodes behind them"
    made.check()
    with pytest.raises(AssertionError, match="5 read"):
        made.commit(one, read=5, new_tokens=[7] * 5)
