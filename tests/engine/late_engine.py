"""An engine of random requests over a scheduler, and a fake device that runs up to `ahead` steps late.

The device keeps its own lengths and tokens, accepts drafts before the host knows of it, and continues requests that the
host has ended meanwhile. It writes when its step lands, into the blocks it was given at launch, and checks who owns
them then. Each slot holds the number of the sequence it was computed from, so a request that is given content of other
tokens or of another cache salt, or that writes where others read, is noticed.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.sampling import Sampling

GARBAGE = -1
STOP = 0


def after(before: int, token: int) -> int:
    """A number for a sequence, computed from the number of its prefix and its last token."""
    return ((before ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**61


def numbers(tokens: list[int], cache_salt: str | None) -> list[int]:
    """The number of tokens[: i + 1] with that salt, for each i."""
    found, last = [], sum(map(ord, cache_salt or ""))
    for token in tokens:
        last = after(last, token + 1)
        found.append(last)
    return found


def next_token(sequence: int) -> int:
    """The one correct token after a sequence; rarely the stop token."""
    return STOP if sequence >> 20 & 31 == 0 else 1 + (sequence >> 30) % 3


def is_foreseen(sequence: int) -> bool:
    """Whether the drafter drafts the correct token after a sequence."""
    return (sequence >> 40) % 3 > 0


def whole_answer(seq: SequenceState) -> list[int]:
    """All tokens of an undisturbed request."""
    tokens = list(seq.request.prompt)
    while len(tokens) < seq.limit:
        tokens.append(next_token(numbers(tokens, seq.request.cache_salt)[-1]))
        if tokens[-1] == STOP:
            break
    return tokens


@dataclass
class DeviceRequest:
    """The device's state of the request in a slot."""

    seq: SequenceState
    stay: int
    tokens: list[int]
    length: int
    drafted: int


@dataclass
class DeviceRow:
    row: ScheduledRow
    state: DeviceRequest
    slot: int
    blocks: list[int]
    """The block table at launch."""
    written: int
    """Tokens whose target entries exist already and are only read again."""
    followed: bool
    catches_up: bool


@dataclass
class Result:
    read: int
    tokens: list[int]
    drafted: int


@dataclass
class LateEngine:
    """Plans up to `ahead` steps before it commits; with 0, one step after the other, without flights."""

    seed: int
    ahead: int = 1
    blocks: int = 40
    size: int = 4
    max_num_seqs: int = 6
    budget: int = 24
    max_model_len: int = 72
    prefix_cache: bool = True
    priorities: tuple[int, ...] = (0,)
    disturbed: bool = True
    """Whether requests are cancelled and caches forgotten."""
    seen: Counter[str] = field(default_factory=Counter)
    seqs: list[SequenceState] = field(default_factory=list)
    launched: deque[tuple[SchedulerOutput, list[DeviceRow]]] = field(default_factory=deque)
    slots: dict[int, DeviceRequest] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.chance, self.arrivals = random.Random(self.seed), random.Random(self.seed)
        self.block_manager = BlockManager(self.blocks, self.size, prefix_cache=self.prefix_cache)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
        )
        self.target = [[GARBAGE] * self.size for _ in range(self.blocks)]
        self.drafter = [[GARBAGE] * self.size for _ in range(self.blocks)]
        self.stems = [self.arrivals.choices(range(1, 4), k=50) for _ in range(3)]

    # --- the host ----------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        chance, key = self.arrivals, len(self.seqs)
        prompt = chance.choice(self.stems)[: chance.randrange(50)] + chance.choices(range(1, 4), k=chance.randint(1, 9))
        request = Request(
            prompt=tuple(prompt[: self.max_model_len - 1]),
            sampling=Sampling(),
            max_new_tokens=chance.randrange(1, 40),
            speculation=Speculation(mode=chance.choice(["auto", "off"])),
            cache_salt=chance.choice([None, None, "one"]),
            priority=self.priorities[key % len(self.priorities)],
        )
        self.seqs.append(SequenceState(key=key, arrival=key, request=request))
        self.scheduler.add(self.seqs[-1])

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.launched)

    def step(self) -> None:
        running, present = self.scheduler.running, self.scheduler.requests
        before = {seq.key for seq in running}
        wanted: dict[int, int] = {}

        def want(decoding: Sequence[SequenceState]) -> dict[int, int]:
            wanted.update({seq.key: self.chance.randrange(9) for seq in decoding if seq.speculates})
            for seq in decoding:
                seq.catches_up = seq.lags and wanted[seq.key] > 5
            return wanted

        plan = self.scheduler.plan(want)
        if not plan.rows:
            assert self.launched or not self.scheduler.running, "a request can advance, or a step is in flight"
            self.seen["waited"] += any(len(seq.tokens) < seq.limit - 1 for seq in self.scheduler.running)
        for seq in plan.preempted:
            self.seen["preempted in flight"] += bool(self.launched)
            assert (seq.blocks, seq.slot, seq.flights) == ([], None, [])
        self.seen["preempted"] += len(plan.preempted)
        if present and not self.ahead:
            # A request of a lower priority may have to wait for one that is running.
            self.check_plan(plan, wanted, running, first=running[0] if running else min(present, key=lambda s: s.turn))
        if plan.rows:
            self.launch(plan, wanted, before)
        while self.disturbed and self.chance.random() < 0.05:
            self.cancel()
        most = self.ahead if plan.rows and self.chance.random() < 0.95 else 0
        while len(self.launched) > most:
            self.collect()
        if self.disturbed and self.chance.random() < 0.01:
            self.chance.choice([self.block_manager.forget, self.block_manager.forget_drafts])()
            self.seen["forgotten"] += 1
        if not self.launched:
            self.scheduler.check()
        if self.ahead or self.steps % 8 == 0:
            self.check_prefixes()

    def launch(self, plan: SchedulerOutput, wanted: dict[int, int], before: set[int]) -> None:
        if self.ahead:
            self.scheduler.launched(plan)
        rows = []
        assert sum(row.count + row.drafts for row in plan.rows) <= self.budget
        assert len({row.seq.key for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            seq, slot = row.seq, row.seq.slot
            assert slot is not None
            assert 0 <= row.drafts <= wanted.get(seq.key, 0)
            if seq.key not in before or self.slots[slot].stay != seq.stay:
                self.seen["read for the drafter"] += seq.key in before
                self.slots[slot] = DeviceRequest(seq, seq.stay, list(seq.tokens), row.start, seq.drafter_length)
            assert self.slots[slot].seq is seq, "a slot has one request"
            catches_up = seq.followed and self.chance.random() < 0.7
            places = list(seq.blocks), seq.written_length
            rows.append(DeviceRow(row, self.slots[slot], slot, *places, seq.followed, catches_up))
            self.seen["chunk behind a chunk"] += not row.samples and len(seq.flights) > 1
            self.seen["depth in flight"] += row.drafts > 0 and len(seq.flights) > 1
        self.launched.append((plan, rows))
        self.steps += 1
        self.check()

    def collect(self) -> None:
        """Land and commit the oldest step, with cancellations in between."""
        plan, rows = self.launched.popleft()
        results = [self.run(row) for row in rows]
        for row, result in zip(plan.rows, results, strict=True):
            self.commit(row, result)
            if self.disturbed and self.chance.random() < 0.01:
                self.cancel()
        if self.ahead:
            self.scheduler.landed(plan)
        self.check()

    def commit(self, row: ScheduledRow, result: Result) -> None:
        seq, tokens = row.seq, result.tokens
        if seq.finished is not None:
            self.seen["ended in flight"] += 1
        if STOP in tokens:
            tokens = tokens[: tokens.index(STOP) + 1]
            self.seen["stopped among drafts"] += len(tokens) < len(result.tokens) and seq.finished is None
        read = result.read - len(result.tokens) + len(tokens)
        self.scheduler.commit(seq, read=read, new_tokens=tokens, drafter_length=result.drafted)
        if seq.finished is None:
            self.seen["accepted"] += max(0, len(tokens) - 1)
            if STOP in tokens:
                self.scheduler.finish(seq, FinishReason.STOP)
            elif len(seq.tokens) == seq.limit:
                self.scheduler.finish(seq, FinishReason.LENGTH)
        if self.ahead:
            self.check()

    def cancel(self) -> None:
        if self.seqs:
            seq = self.chance.choice([*self.scheduler.running, *self.seqs[-10:]])
            self.seen["cancelled in flight"] += bool(seq.flights)
            reads = seq.target_length < seq.prompt_length
            self.seen["cancelled " + ("ended" if seq.finished else "reading" if reads else "decoding")] += 1
            assert self.scheduler.cancel(seq.key) or seq.finished is not None
            if self.ahead:
                self.check()

    # --- the device --------------------------------------------------------------------------------------------

    def run(self, at: DeviceRow) -> Result:
        """Draft, verify and accept for one row, by the device's state."""
        row, state, seq = at.row, at.state, at.row.seq
        if len(state.tokens) == seq.limit:
            return Result(0, [], 0)  # the previous step brought its last token
        start = state.length
        assert row.start <= start, "a lower bound"
        assert row.start == start or (row.count == 1 and row.samples), "only decoding may be further on"
        true = numbers(state.tokens, seq.request.cache_salt)
        held = [self.target[at.blocks[i // self.size]][i % self.size] for i in range(start)]
        assert held == true[:start], "it reads its own entries"
        if at.catches_up or (at.followed and row.drafts):
            known = min(start + row.count, len(state.tokens)) - 1 if not row.samples else start
            for i in range(state.drafted, known):
                self.write(self.drafter, at, i, true[i + 1])
            state.drafted = max(state.drafted, known)
        for i in range(row.drafts * at.followed):
            self.write(self.drafter, at, start + i, GARBAGE)
        tokens, accepted = [], 0
        if row.samples:
            tokens.append(next_token(true[-1]))
            while accepted < row.drafts and is_foreseen(true[-1]) and len(state.tokens) + len(tokens) < seq.limit:
                true.append(after(true[-1], tokens[-1] + 1))
                tokens.append(next_token(true[-1]))
                accepted += 1
        state.tokens += tokens
        state.length += row.count + accepted
        for i in range(max(start, at.written), start + row.count + row.drafts):
            self.write(self.target, at, i, true[i] if i < state.length else GARBAGE)
        return Result(row.count + accepted, tokens, min(state.drafted, start + row.count))

    def write(self, part: list[list[int]], at: DeviceRow, position: int, value: int) -> None:
        """Fill a slot, unless it is beyond what the request may use."""
        seq = at.row.seq
        if position >= seq.limit - 1:
            return
        assert position < len(at.blocks) * self.size, "the longest outcome has its blocks"
        block = at.blocks[position // self.size]
        kept = seq.blocks if seq.finished is None else []
        aside = [blocks for _, left in self.scheduler._steps for blocks, _ in left]
        assert block in kept or any(block in blocks for blocks in aside) or not self.ahead, "freed under the device"
        for other in self.scheduler.running:
            same = part is self.drafter and (
                other.drafter_length <= position or part[block][position % self.size] == value
            )
            assert other is seq or same or block not in other.blocks, "written where others read"
        registered = self.block_manager._content[block]
        if part is self.target or value == GARBAGE:
            assert registered is None, "written after it could be found"
        part[block][position % self.size] = value

    # --- the law -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Holds at any time: no launched step can write to a block that is free or another request's."""
        if self.ahead:
            self.scheduler.check()
        for _, rows in self.launched if self.ahead else ():
            for at in rows:
                seq, first = at.row.seq, max(at.state.length, at.row.start, at.written) // self.size
                for block in at.blocks[first:]:
                    assert self.block_manager._references[block] > 0, f"block {block} is free under the device"
                    for other in self.scheduler.running:
                        assert other is seq or block not in other.blocks, f"block {block} is another's"
                assert all(other is seq or other.slot != at.slot for other in self.scheduler.running), (
                    "slot given twice"
                )

    def check_plan(
        self, plan: SchedulerOutput, wanted: dict[int, int], running: list[SequenceState], first: SequenceState
    ) -> None:
        """Holds where each step lands before the next is planned."""
        assert any(row.seq is first for row in plan.rows), "the first advances in every step"
        assert first not in plan.preempted, "the first is never preempted"
        assert all(row.seq.turn < seq.turn for row in plan.rows for seq in plan.preempted)
        keys = {row.seq.key for row in plan.rows}
        for seq in self.scheduler.running:
            assert seq.pending > 1 or seq.key in keys, "every decoding request has a row"
            true = numbers(seq.tokens, seq.request.cache_salt)
            held = [value for block in seq.blocks for value in self.target[block]]
            assert held[: seq.target_length] == true[: seq.target_length]
            held = [value for block in seq.blocks for value in self.drafter[block]]
            assert held[: seq.drafter_length] == true[1 : seq.drafter_length + 1]
        for row in plan.rows:
            seq = row.seq
            assert row.start == seq.target_length
            assert 1 <= row.count <= min(seq.pending, self.budget)
            assert row.samples == (row.count == seq.pending)
            assert row.drafts == 0 or seq.pending == 1
            assert row.start + row.count + row.drafts <= len(seq.blocks) * self.size
            assert not row.samples or len(seq.tokens) + row.drafts + 1 <= min(seq.limit, self.max_model_len)
            self.seen["lowered"] += row.drafts < wanted.get(seq.key, 0)
            self.seen["chunks"] += not row.samples
            self.seen["read again"] += seq.preemptions > 0 and row.count > 1
            self.seen["drafted hits"] += seq not in running and seq.drafter_length > 0

    def check_prefixes(self) -> None:
        """Cached blocks have the content they are found by, with the next token for the drafter."""
        for block, prefix in enumerate(self.block_manager._content):
            if prefix is None:
                continue
            chain: Any = prefix
            tokens: list[int] = []
            while chain is not None and not isinstance(chain, str):
                tokens[:0] = chain.tokens
                chain = chain.before
            true = numbers([*tokens, prefix.successor], chain)
            assert self.target[block] == true[-self.size - 1 : -1], "found before it was written"
            if prefix.drafted and prefix.block == block:
                assert self.drafter[block] == true[-self.size :], "the drafter's keys are not final"
