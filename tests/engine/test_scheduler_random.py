"""Ten thousand steps of scheduler and blocks under a fake engine that leaves nothing out.

Requests with shared beginnings come, go, are cancelled at any moment and want any number of drafts; blocks are short.
A shadow knows what each slot of each block was really computed from, so it sees when a request is given content that is
not its own or of another cache salt, or when someone writes where others read. Requests whose prefix the drafter has
not read go back to read it again now and then, which may fill in the drafter's part of what others share and change
nothing that somebody reads.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from each import each
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.scheduler import ScheduledRow, Scheduler
from eyas.sampling import Sampling

GARBAGE = -1


class Shadow:
    """What each slot holds: the sequence it was computed from, as a number. Equal numbers are equal sequences."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.target = [[GARBAGE] * size for _ in range(blocks)]
        self.drafter = [[GARBAGE] * size for _ in range(blocks)]
        self._numbers: dict[tuple[int | str | None, int], int] = {}

    def sequences(self, tokens: list[int], cache_salt: str | None) -> list[int]:
        """The number of tokens[: i + 1] behind that salt, for each i."""
        numbers: list[int] = []
        for token in tokens:
            key = (numbers[-1] if numbers else cache_salt, token)
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))
        return numbers

    def write(self, part: list[list[int]], blocks: list[int], position: int, sequence: int) -> int:
        """Fill a slot and return its block."""
        block = blocks[position // self.size]
        part[block][position % self.size] = sequence
        return block

    def verify(self, seq: SequenceState) -> None:
        """All that a request will read was computed from its own tokens, for the drafter with the next one too."""
        sequences = self.sequences(seq.tokens, seq.request.cache_salt)
        held = list(chain.from_iterable(self.target[block] for block in seq.blocks))
        assert held[: seq.target_length] == sequences[: seq.target_length]
        drafted = list(chain.from_iterable(self.drafter[block] for block in seq.blocks))
        assert drafted[: seq.drafter_length] == sequences[1 : seq.drafter_length + 1]


@dataclass
class FakeEngine:
    """Drives a scheduler as the engine would, with chance in place of models."""

    seed: int
    blocks: int = 40
    size: int = 4
    max_num_seqs: int = 6
    budget: int = 24
    max_model_len: int = 72
    prefix_cache: bool = True
    priorities: tuple[int, ...] = (0,)
    seen: Counter[str] = field(default_factory=Counter)
    seqs: list[SequenceState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.block_manager = BlockManager(self.blocks, self.size, prefix_cache=self.prefix_cache)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
        )
        self.shadow = Shadow(self.blocks, self.size)
        self.stems = [self.text(50) for _ in range(3)]

    def text(self, length: int) -> list[int]:
        return self.chance.choices(range(3), weights=[8, 1, 1], k=length)

    def arrive(self) -> None:
        stem = self.chance.choice(self.stems)[: self.chance.randrange(50)]
        prompt = (stem + self.text(self.chance.randrange(1, 12)))[: self.max_model_len - 1]
        key = len(self.seqs)
        request = Request(
            prompt=tuple(prompt),
            sampling=Sampling(),
            max_new_tokens=self.chance.randrange(1, 40),
            speculation=Speculation(mode=self.chance.choice(["auto", "off"])),
            cache_salt=self.chance.choice([None, None, "one", "two"]),
            priority=self.chance.choice(self.priorities),
        )
        self.seqs.append(SequenceState(key=key, arrival=key, request=request))
        self.scheduler.add(self.seqs[-1])

    def present(self) -> list[SequenceState]:
        return [seq for seq in self.seqs if seq.finished is None]

    def step(self, *, arrivals: float) -> None:
        chance, scheduler = self.chance, self.scheduler
        if chance.random() < arrivals and scheduler.waiting < 12:
            self.arrive()
        present = self.present()
        wanted = {seq.key: chance.randrange(9) for seq in present if seq.speculates and chance.random() < 0.8}
        before = {seq.key: seq.preemptions for seq in present}
        running = scheduler.running

        def want(decoding: Sequence[SequenceState]) -> dict[int, int]:
            for seq in decoding:
                seq.catches_up = seq.lags and wanted.get(seq.key, 0) > 5
            return wanted

        plan = scheduler.plan(want)

        if present:
            assert plan.rows, "someone can always go on"
            # A request of a lower priority may have to wait for one that runs already.
            first = running[0] if running else min(present, key=lambda seq: seq.turn)
            assert any(row.seq is first for row in plan.rows), "the first moves in every step"
            assert first.preemptions == before[first.key], "the first is never preempted"
        assert sum(row.count + row.drafts for row in plan.rows) <= self.budget
        assert len({row.seq.key for row in plan.rows}) == len(plan.rows)
        rows_of = {row.seq.key: row for row in plan.rows}
        for seq in scheduler.running:
            self.shadow.verify(seq)
            assert seq.pending > 1 or seq.key in rows_of, "every decoding request has a row"
        for row in plan.rows:
            self.check_row(row, wanted.get(row.seq.key, 0))
            self.seen["read for the drafter"] += seq_reads_again(row.seq)
            self.seen["drafted hits"] += row.seq not in running and row.seq.drafter_length > 0
        for seq in plan.preempted:
            assert (seq.blocks, seq.target_length) == ([], 0)
            assert all(row.seq.turn < seq.turn for row in plan.rows)
        self.seen["preempted"] += len(plan.preempted)

        tables = {row.seq.key: list(row.seq.blocks) for row in plan.rows}
        while self.seqs and chance.random() < 0.02:  # a client goes away while the step runs
            self.cancel()
        for row in plan.rows:
            self.run(row, tables[row.seq.key])
        while self.seqs and chance.random() < 0.02:
            self.cancel()
        if chance.random() < 0.01:
            chance.choice([self.block_manager.forget, self.block_manager.forget_drafts])()
            self.seen["forgotten"] += 1
        scheduler.check()

    def check_row(self, row: ScheduledRow, wanted: int) -> None:
        seq = row.seq
        assert row.start == seq.target_length
        assert 1 <= row.count <= min(seq.pending, self.budget)
        assert row.samples == (row.count == seq.pending)
        assert 0 <= row.drafts <= wanted
        assert row.drafts == 0 or seq.pending == 1
        assert row.start + row.count + row.drafts <= len(seq.blocks) * self.size
        assert not row.samples or len(seq.tokens) + row.drafts + 1 <= min(seq.limit, self.max_model_len)
        self.seen["lowered"] += row.drafts < wanted
        self.seen["chunks"] += not row.samples
        self.seen["read again"] += seq.preemptions > 0 and row.count > 1

    def run(self, row: ScheduledRow, blocks: list[int]) -> None:
        """Draft, verify and commit one row, whether or not it was cancelled meanwhile."""
        seq, chance = row.seq, self.chance
        gone = seq.finished is not None
        drafted = seq.drafter_length
        if row.drafts and seq.followed:
            drafted = self.read_with_drafter(seq, row.start, blocks, seq.tokens)
            slots = range(row.start, row.start + row.drafts)
            self.owned_alone(seq, {self.shadow.write(self.shadow.drafter, blocks, i, GARBAGE) for i in slots})
        accepted = chance.randrange(row.drafts + 1)
        new = self.text(accepted + 1) if row.samples else []
        kept = row.count + accepted
        sequences = self.shadow.sequences(seq.tokens + new, seq.request.cache_salt)
        positions = range(max(row.start, seq.written_length), row.start + row.count + row.drafts)
        written = {
            self.shadow.write(self.shadow.target, blocks, i, sequences[i] if i < row.start + kept else GARBAGE)
            for i in positions
        }
        self.owned_alone(seq, written)
        stops = row.samples and chance.random() < 0.03
        if stops:
            new = new[: chance.randrange(1, len(new) + 1)]
        read = row.count + max(0, len(new) - 1)
        if seq.followed and not gone and chance.random() < 0.7:
            end = chance.randint(drafted, row.start + read)
            drafted = self.read_with_drafter(seq, end, blocks, seq.tokens + new)
        self.scheduler.commit(seq, read=read, new_tokens=new, drafter_length=drafted)
        if gone:
            return
        self.seen["accepted"] += accepted
        if stops or len(seq.tokens) == seq.limit:
            self.scheduler.finish(seq, FinishReason.STOP if stops else FinishReason.LENGTH)
            assert seq.blocks == []

    def read_with_drafter(self, seq: SequenceState, end: int, blocks: list[int], tokens: list[int]) -> int:
        """The drafter's part may be filled in while others share the block; `verify` says that it is right for them."""
        sequences = self.shadow.sequences(tokens, seq.request.cache_salt)
        for i in range(seq.drafter_length, end):
            held = self.shadow.drafter[blocks[i // self.size]][i % self.size]
            block = self.shadow.write(self.shadow.drafter, blocks, i, sequences[i + 1])
            for other in self.scheduler.running:
                shared = other is not seq and block in other.blocks and i < other.drafter_length
                assert not shared or held == sequences[i + 1], "changed where others read"
        return end

    def owned_alone(self, seq: SequenceState, written: set[int]) -> None:
        for other in self.scheduler.running:
            assert other is seq or written.isdisjoint(other.blocks), "written where others read"

    def cancel(self) -> None:
        """End a request, waiting, reading, decoding or ended already."""
        seq = self.chance.choice([*self.scheduler.running, *self.seqs[-10:]])
        was_here = seq.finished is None
        kind = "ended" if not was_here else "unread" if seq.target_length < seq.prompt_length else "decoding"
        assert self.scheduler.cancel(seq.key) == was_here
        self.seen[f"cancelled {kind}"] += 1


def seq_reads_again(seq: SequenceState) -> bool:
    """Whether it reads what the target has written before."""
    return seq.target_length < seq.written_length


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
def test_any_course_of_events_keeps_blocks_whole_hits_right_and_requests_moving(number: int) -> None:
    engine = FakeEngine(seed=number, **CONFIGURATIONS[number])
    for step in range(STEPS[number]):
        # Rush hours alternate with quiet ones, when requests run out.
        engine.step(arrivals=0.5 if step % 200 < 100 else 0.02)
    # A step moves the first at least by a token, and the first is read once, and once more for the drafter at most.
    for _ in range(2 * sum(seq.limit for seq in engine.present())):
        engine.step(arrivals=0)
    assert engine.present() == [], "everything ends"
    assert engine.block_manager.free == engine.blocks, "every block is back"
    engine.block_manager.check([])
    reached = {name for name, times in engine.seen.items() if times}
    assert reached >= {"lowered", "accepted", "chunks", "forgotten", "preempted", "read again"}
    assert reached >= {"cancelled ended", "cancelled unread", "cancelled decoding"}
    assert (engine.seen["read for the drafter"] > 0) == engine.prefix_cache
    assert (engine.block_manager.hits > 0) == (engine.seen["drafted hits"] > 0) == engine.prefix_cache


def test_there_are_ten_thousand_steps() -> None:
    assert sum(STEPS) == 10_000
