"""Ten thousand steps of scheduler and block manager, one after the other, with everything that can happen to requests.

Requests with shared prefixes come, finish, are cancelled at any time and want any number of drafts; blocks are short.
Requests whose prefix the drafter has not read sometimes read it again, which may fill in the drafter's entries of
shared blocks and changes nothing that others read.
"""

from typing import Any

from each import each
from engine.late_engine import LateEngine, whole_answer
from eyas.engine.request import FinishReason

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"blocks": 18, "max_num_seqs": 8},
    {"blocks": 18, "budget": 5, "max_num_seqs": 4},
    {"blocks": 72, "size": 1, "budget": 40},
    {"blocks": 8, "size": 16, "max_num_seqs": 10, "budget": 64},
    {"blocks": 18, "prefix_cache": False},
    {"blocks": 18, "max_num_seqs": 8, "priorities": (-1, 0, 0, 3)},
]
STEPS = [2500, 2500, 1500, 1000, 1000, 500, 1000]


@each("number", range(len(CONFIGURATIONS)))
def test_any_course_of_events_keeps_blocks_consistent_hits_right_and_requests_moving(number: int) -> None:
    engine = LateEngine(seed=number, ahead=0, **CONFIGURATIONS[number])
    for step in range(STEPS[number]):
        # Busy periods alternate with quiet ones, in which requests run out.
        if engine.chance.random() < (0.5 if step % 200 < 100 else 0.02) and engine.scheduler.waiting < 12:
            engine.arrive()
        engine.step()
    # A step advances the first request by a token at least, which is read once, and once more for the drafter.
    for _ in range(2 * sum(seq.limit for seq in engine.scheduler.requests)):
        engine.step()
    assert not engine.busy, "all requests finish"
    assert engine.block_manager.free == engine.blocks, "every block is back"
    engine.block_manager.check([])
    for seq in engine.seqs:
        whole = whole_answer(seq)
        assert seq.tokens == whole[: len(seq.tokens)]
        assert len(seq.tokens) == len(whole) or seq.finished is FinishReason.CANCELLED
    reached = {name for name, times in engine.seen.items() if times}
    assert reached >= {"lowered", "accepted", "chunks", "forgotten", "preempted", "read again"}
    assert reached >= {"cancelled ended", "cancelled reading", "cancelled decoding"}
    assert (engine.seen["read for the drafter"] > 0) == engine.prefix_cache
    assert (engine.block_manager.hits > 0) == (engine.seen["drafted hits"] > 0) == engine.prefix_cache


def test_there_are_ten_thousand_steps() -> None:
    assert sum(STEPS) == 10_000
