"""Scheduler and blocks under a device that finishes late: a step is planned and launched before the last is committed.

The fake device keeps its own lengths and tokens, accepts drafts that the host does not know of, and goes on with
requests that the host has ended meanwhile. It writes when its step lands, into the blocks that it was given at launch,
and looks at who owns them then. See test_scheduler_random.py for the same with one step after the other.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from each import each
from eyas.engine.kv_cache.block_manager import BlockManager
from eyas.engine.request import FinishReason, Request, SequenceState, Speculation
from eyas.engine.scheduler import ScheduledRow, Scheduler, SchedulerOutput
from eyas.sampling import Sampling

GARBAGE = -1
STOP = 0


def after(before: int, token: int) -> int:
    """A number for a sequence, from that of all but its last token: equal for equal sequences."""
    return ((before ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**61


def numbers(tokens: list[int], cache_salt: str | None) -> list[int]:
    """The number of tokens[: i + 1] behind that salt, for each i."""
    found, last = [], sum(map(ord, cache_salt or ""))
    for token in tokens:
        last = after(last, token + 1)
        found.append(last)
    return found


def next_token(sequence: int) -> int:
    """The one true token behind a sequence; seldom the one that stops an answer."""
    return STOP if sequence >> 20 & 31 == 0 else 1 + (sequence >> 30) % 3


def is_foreseen(sequence: int) -> bool:
    """Whether the drafter knows the token behind a sequence."""
    return (sequence >> 40) % 3 > 0


def whole_answer(seq: SequenceState) -> list[int]:
    """All tokens of a request that is left alone."""
    tokens = list(seq.request.prompt)
    while len(tokens) < seq.limit:
        tokens.append(next_token(numbers(tokens, seq.request.cache_salt)[-1]))
        if tokens[-1] == STOP:
            break
    return tokens


@dataclass
class DeviceRequest:
    """What the device knows of the request in a slot."""

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
    """The table at launch."""
    written: int
    """Of the target's tokens, those that it only reads again."""
    followed: bool
    catches_up: bool


@dataclass
class Result:
    read: int
    tokens: list[int]
    drafted: int


@dataclass
class LateEngine:
    """Plans up to `ahead` steps before it commits; with 0, one step after the other and no word of flights."""

    seed: int
    ahead: int = 1
    blocks: int = 40
    size: int = 4
    max_num_seqs: int = 6
    budget: int = 24
    max_model_len: int = 72
    prefix_cache: bool = True
    disturbed: bool = True
    """Whether clients go away and caches are forgotten."""
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
        )
        self.seqs.append(SequenceState(key=key, arrival=key, request=request))
        self.scheduler.add(self.seqs[-1])

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.launched)

    def step(self) -> None:
        before = {seq.key for seq in self.scheduler.running}
        wanted: dict[int, int] = {}

        def want(decoding: Sequence[SequenceState]) -> dict[int, int]:
            wanted.update({seq.key: self.chance.randrange(9) for seq in decoding if seq.speculates})
            for seq in decoding:
                seq.catches_up = seq.lags and wanted[seq.key] > 5
            return wanted

        plan = self.scheduler.plan(want)
        if not plan.rows:
            assert self.launched or not self.scheduler.running, "someone can go on, or something is under way"
            self.seen["waited"] += any(len(seq.tokens) < seq.limit - 1 for seq in self.scheduler.running)
        for seq in plan.preempted:
            self.seen["preempted under way"] += bool(self.launched)
            assert (seq.blocks, seq.slot, seq.flights) == ([], None, [])
        self.seen["preempted"] += len(plan.preempted)
        if plan.rows:
            self.launch(plan, wanted, before)
        while self.disturbed and self.chance.random() < 0.05:
            self.cancel()
        most = self.ahead if plan.rows and self.chance.random() < 0.95 else 0
        while len(self.launched) > most:
            self.collect()
        if self.disturbed and self.chance.random() < 0.01:
            self.chance.choice([self.block_manager.forget, self.block_manager.forget_drafts])()
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
            self.seen["depth under way"] += row.drafts > 0 and len(seq.flights) > 1
        self.launched.append((plan, rows))
        self.steps += 1
        self.check()

    def collect(self) -> None:
        """Let the oldest step land, then tell the scheduler; clients go away in between."""
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
            self.seen["ended under way"] += 1
        if STOP in tokens:
            tokens = tokens[: tokens.index(STOP) + 1]
            self.seen["stopped among drafts"] += len(tokens) < len(result.tokens) and seq.finished is None
        read = result.read - len(result.tokens) + len(tokens)
        self.scheduler.commit(seq, read=read, new_tokens=tokens, drafter_length=result.drafted)
        if seq.finished is None:
            if STOP in tokens:
                self.scheduler.finish(seq, FinishReason.STOP)
            elif len(seq.tokens) == seq.limit:
                self.scheduler.finish(seq, FinishReason.LENGTH)
        if self.ahead:
            self.check()

    def cancel(self) -> None:
        if self.seqs:
            seq = self.chance.choice([*self.scheduler.running, *self.seqs[-10:]])
            self.seen["cancelled under way"] += bool(seq.flights)
            assert self.scheduler.cancel(seq.key) or seq.finished is not None
            if self.ahead:
                self.check()

    # --- the device --------------------------------------------------------------------------------------------

    def run(self, at: DeviceRow) -> Result:
        """Draft, verify and accept for one row, by what the device knows."""
        row, state, seq = at.row, at.state, at.row.seq
        if len(state.tokens) == seq.limit:
            return Result(0, [], 0)  # the step before brought its last token
        start = state.length
        assert row.start <= start, "a lower bound"
        assert row.start == start or (row.count == 1 and row.samples), "only decoding may be further on"
        true = numbers(state.tokens, seq.request.cache_salt)
        held = [self.target[at.blocks[i // self.size]][i % self.size] for i in range(start)]
        assert held == true[:start], "what it reads is its own"
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
        """Fill a slot, unless it is beyond what the request may read."""
        seq = at.row.seq
        if position >= seq.limit - 1:
            return
        assert position < len(at.blocks) * self.size, "the deepest outcome has its blocks"
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
        """What holds at any moment: no launched step could write a block that is free or another's."""
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

    def check_prefixes(self) -> None:
        """What can be found is what its name says, with the token behind it for the drafter."""
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
def test_whatever_happens_while_a_step_runs_no_block_of_it_is_freed_and_answers_stay_right(number: int) -> None:
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
    assert reached >= {"ended under way", "cancelled under way", "stopped among drafts", "depth under way"}
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
    # An answer that stops holds its slot until the next step has landed; short blocks make the host wait.
    assert ahead.steps <= 1.2 * one_by_one.steps, (one_by_one.steps, ahead.steps)


def request(key: int, prompt: int, *, new: int = 8) -> SequenceState:
    asked = Request(
        prompt=tuple(1000 * key + i for i in range(prompt)),
        sampling=Sampling(),
        max_new_tokens=new,
        speculation=Speculation(mode="off"),
    )
    return SequenceState(key=key, arrival=key, request=asked)


def scheduler(*seqs: SequenceState, blocks: int = 64, **changes: int) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128} | changes
    made = Scheduler(BlockManager(blocks, 4), **limits)
    for seq in seqs:
        made.add(seq)
    return made


def launch(made: Scheduler, wanted: dict[int, int] | None = None) -> SchedulerOutput:
    plan = made.plan(lambda _: wanted or {})
    made.launched(plan)
    made.check()
    return plan


def shape(plan: SchedulerOutput) -> list[tuple[int, int, int, int, bool]]:
    return [(row.seq.key, row.start, row.count, row.drafts, row.samples) for row in plan.rows]


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
    assert shape(fourth) == [(0, 11, 1, 3, True)], "the third may accept 3 and leave it at 14"
    assert len(one.blocks) == 5, "for 11 tokens, 4 that may come and 3 drafts, but never the last of 18"
    made.commit(one, read=4, new_tokens=[7] * 4)
    assert (one.target_length, one.flights[0].most, made.in_flight) == (14, 4, 2)
    made.check()


def test_a_request_whose_last_token_is_under_way_gets_no_row_and_leaves_at_once() -> None:
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
    assert made._block_manager.used == 0, "no step under way has a row of it"
    made.landed(second)
    made.check()


@each("how", ["finish", "cancel"])
def test_what_an_ended_request_owned_is_kept_until_the_step_with_its_row_has_landed(how: str) -> None:
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


def test_a_request_under_way_is_not_preempted_but_waited_for() -> None:
    one, other = request(0, 7, new=9), request(1, 4, new=9)
    made = scheduler(one, other, blocks=4)
    first = launch(made)
    assert [row.seq for row in first.rows] == [one, other]
    second = launch(made)
    assert [len(row.seq.blocks) for row in second.rows] == [2, 2]
    third = made.plan(lambda _: {})
    assert (third.rows, third.preempted) == ((), ()), "a block is missing and the last has a step under way"
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
        made.begin_anew(drafter=False)


def test_a_step_that_chose_more_than_it_could_is_refused() -> None:
    one = request(0, 6)
    made = scheduler(one)
    launch(made)
    with pytest.raises(AssertionError, match="7 read"):
        made.commit(one, read=7, new_tokens=[7, 7])


def test_a_request_without_a_row_under_way_is_preempted_beside_a_step() -> None:
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
    assert [row.seq for row in step.rows] == [one, late[0]], "the others go on beside it"


def test_a_tree_has_room_for_all_its_nodes_and_gives_no_more_than_it_is_deep() -> None:
    one = request(0, 6, new=60)
    made = scheduler(one, blocks=20)
    first = launch(made)
    tree = made.plan(lambda _: {0: 20})
    made.launched(tree, deepest=3)
    assert tree.rows[0].drafts == 20
    assert len(one.blocks) == 7, "6 tokens, the one under way and 20 nodes, in blocks of 4"
    assert one.flights[-1].most == 4
    made.commit(one, read=6, new_tokens=[7])
    made.landed(first)
    made.plan(lambda _: {0: 20})
    assert len(one.blocks) == 8, "4 more tokens and 20 nodes behind them"
    made.check()
    with pytest.raises(AssertionError, match="5 read"):
        made.commit(one, read=5, new_tokens=[7] * 5)
