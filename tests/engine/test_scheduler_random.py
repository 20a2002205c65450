"""Ten thousand steps of scheduler and pages under a fake engine that leaves nothing out.

Requests with shared beginnings come, go, are cancelled at any moment and want any number of drafts; pages are short.
A shadow knows what each slot of each page was really computed from, so it sees when a request is given content that is
not its own, or when someone writes where others read.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from eyas.engine.pages import PagePool
from eyas.engine.request import FinishReason, Live, Request, Speculation
from eyas.engine.scheduler import Row, Scheduler
from eyas.sampling import Sampling

GARBAGE = -1


class Shadow:
    """What each slot holds: the sequence it was computed from, as a number. Equal numbers are equal sequences."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.target = [[GARBAGE] * size for _ in range(pages)]
        self.drafter = [[GARBAGE] * size for _ in range(pages)]
        self._numbers: dict[tuple[int, int], int] = {}

    def sequences(self, tokens: list[int]) -> list[int]:
        """The number of tokens[: i + 1] for each i."""
        numbers: list[int] = []
        for token in tokens:
            key = (numbers[-1] if numbers else GARBAGE, token)
            numbers.append(self._numbers.setdefault(key, len(self._numbers)))
        return numbers

    def write(self, part: list[list[int]], pages: list[int], position: int, sequence: int) -> int:
        """Fill a slot and return its page."""
        page = pages[position // self.size]
        part[page][position % self.size] = sequence
        return page

    def verify(self, live: Live) -> None:
        """All that a request will read was computed from its own tokens, for the drafter with the next one too."""
        sequences = self.sequences(live.tokens)
        held = list(chain.from_iterable(self.target[page] for page in live.pages))
        assert held[: live.target_length] == sequences[: live.target_length]
        drafted = list(chain.from_iterable(self.drafter[page] for page in live.pages))
        assert drafted[: live.drafter_length] == sequences[1 : live.drafter_length + 1]


@dataclass
class FakeEngine:
    """Drives a scheduler as the engine would, with chance in place of models."""

    seed: int
    pages: int = 40
    size: int = 4
    max_rows: int = 6
    budget: int = 24
    max_length: int = 72
    chunk: int | None = None
    prefix_cache: bool = True
    seen: Counter[str] = field(default_factory=Counter)
    lives: list[Live] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.pool = PagePool(self.pages, self.size, prefix_cache=self.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_rows=self.max_rows,
            token_budget=self.budget,
            max_length=self.max_length,
            prefill_chunk=self.chunk,
        )
        self.shadow = Shadow(self.pages, self.size)
        self.stems = [self.text(50) for _ in range(3)]

    def text(self, length: int) -> list[int]:
        return self.chance.choices(range(3), weights=[8, 1, 1], k=length)

    def arrive(self) -> None:
        stem = self.chance.choice(self.stems)[: self.chance.randrange(50)]
        prompt = (stem + self.text(self.chance.randrange(1, 12)))[: self.max_length - 1]
        key = len(self.lives)
        request = Request(
            prompt=tuple(prompt),
            sampling=Sampling(),
            max_new_tokens=self.chance.randrange(1, 40),
            speculation=Speculation(mode=self.chance.choice(["auto", "off"])),
        )
        self.lives.append(Live(key=key, arrival=key, request=request))
        self.scheduler.add(self.lives[-1])

    def present(self) -> list[Live]:
        return [live for live in self.lives if live.finished is None]

    def step(self, *, arrivals: float) -> None:
        chance, scheduler = self.chance, self.scheduler
        if chance.random() < arrivals and scheduler.waiting < 12:
            self.arrive()
        present = self.present()
        wanted = {live.key: chance.randrange(9) for live in present if live.speculates and chance.random() < 0.8}
        before = {live.key: live.preemptions for live in present}
        running = scheduler.running
        plan = scheduler.plan(wanted)

        if present:
            assert plan.rows, "someone can always go on"
            assert any(row.live is present[0] for row in plan.rows), "the oldest moves in every step"
            assert present[0].preemptions == before[present[0].key], "the oldest is never preempted"
        assert sum(row.count + row.drafts for row in plan.rows) <= self.budget
        assert len({row.live.key for row in plan.rows}) == len(plan.rows)
        rows_of = {row.live.key: row for row in plan.rows}
        for live in scheduler.running:
            self.shadow.verify(live)
            assert live.pending > 1 or live.key in rows_of, "every decoding request has a row"
        for row in plan.rows:
            self.check_row(row, wanted.get(row.live.key, 0))
            self.seen["drafted hits"] += row.live not in running and row.live.drafter_length > 0
        for live in plan.preempted:
            assert (live.pages, live.target_length) == ([], 0)
            assert all(row.live.arrival < live.arrival for row in plan.rows)
        self.seen["preempted"] += len(plan.preempted)

        tables = {row.live.key: list(row.live.pages) for row in plan.rows}
        while self.lives and chance.random() < 0.02:  # a client goes away while the step runs
            self.cancel()
        for row in plan.rows:
            self.run(row, tables[row.live.key])
        while self.lives and chance.random() < 0.02:
            self.cancel()
        if chance.random() < 0.01:
            chance.choice([self.pool.forget, self.pool.forget_drafts])()
            self.seen["forgotten"] += 1
        scheduler.check()

    def check_row(self, row: Row, wanted: int) -> None:
        live = row.live
        assert row.start == live.target_length
        assert 1 <= row.count <= min(live.pending, self.chunk or self.budget)
        assert row.samples == (row.count == live.pending)
        assert 0 <= row.drafts <= wanted
        assert row.drafts == 0 or live.pending == 1
        assert row.start + row.count + row.drafts <= len(live.pages) * self.size
        assert not row.samples or len(live.tokens) + row.drafts + 1 <= min(live.limit, self.max_length)
        self.seen["lowered"] += row.drafts < wanted
        self.seen["chunks"] += not row.samples
        self.seen["read again"] += live.preemptions > 0 and row.count > 1

    def run(self, row: Row, pages: list[int]) -> None:
        """Draft, verify and commit one row, whether or not it was cancelled meanwhile."""
        live, chance = row.live, self.chance
        gone = live.finished is not None
        if row.drafts:
            self.read_with_drafter(live, live.target_length, pages)
            slots = range(row.start, row.start + row.drafts)
            self.owned_alone(live, {self.shadow.write(self.shadow.drafter, pages, i, GARBAGE) for i in slots})
        accepted = chance.randrange(row.drafts + 1)
        new = self.text(accepted + 1) if row.samples else []
        kept = row.count + accepted
        sequences = self.shadow.sequences(live.tokens + new)
        positions = range(row.start, row.start + row.count + row.drafts)
        written = {
            self.shadow.write(self.shadow.target, pages, i, sequences[i] if i < row.start + kept else GARBAGE)
            for i in positions
        }
        self.owned_alone(live, written)
        stops = row.samples and chance.random() < 0.03
        if stops:
            new = new[: chance.randrange(1, len(new) + 1)]
        self.scheduler.commit(live, read=row.count + max(0, len(new) - 1), new_tokens=new)
        if gone:
            return
        self.seen["accepted"] += accepted
        if live.speculates and chance.random() < 0.7:
            self.read_with_drafter(live, chance.randint(live.drafter_length, live.target_length), live.pages)
        if stops or len(live.tokens) == self.scheduler.limit(live):
            self.scheduler.finish(live, FinishReason.STOP if stops else FinishReason.LENGTH)
            assert live.pages == []

    def read_with_drafter(self, live: Live, end: int, pages: list[int]) -> None:
        """The drafter's part may be filled in while others, which the drafter does not follow, share the page."""
        sequences = self.shadow.sequences(live.tokens)
        slots = range(live.drafter_length, end)
        written = {self.shadow.write(self.shadow.drafter, pages, i, sequences[i + 1]) for i in slots}
        for other in self.scheduler.running:
            assert other is live or not other.speculates or written.isdisjoint(other.pages)
        self.scheduler.note_read(live, end)

    def owned_alone(self, live: Live, written: set[int]) -> None:
        for other in self.scheduler.running:
            assert other is live or written.isdisjoint(other.pages), "written where others read"

    def cancel(self) -> None:
        """End a request, waiting, reading, decoding or ended already."""
        live = self.chance.choice([*self.scheduler.running, *self.lives[-10:]])
        was_here = live.finished is None
        kind = "ended" if not was_here else "unread" if live.target_length < live.prompt_length else "decoding"
        assert self.scheduler.cancel(live.key) == was_here
        self.seen[f"cancelled {kind}"] += 1


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"pages": 18, "max_rows": 8, "chunk": 7},
    {"pages": 18, "budget": 5, "max_rows": 4},
    {"pages": 72, "size": 1, "budget": 40, "chunk": 16},
    {"pages": 8, "size": 16, "max_rows": 10, "budget": 64, "chunk": 16},
    {"pages": 18, "prefix_cache": False},
]
STEPS = [2500, 2500, 2000, 1000, 1500, 500]


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_any_course_of_events_keeps_pages_whole_hits_right_and_requests_moving(number: int) -> None:
    engine = FakeEngine(seed=number, **CONFIGURATIONS[number])
    for step in range(STEPS[number]):
        # Rush hours alternate with quiet ones, when requests run out.
        engine.step(arrivals=0.5 if step % 200 < 100 else 0.02)
    # A step moves the oldest at least by a token, and the oldest is read once and not again.
    for _ in range(sum(engine.scheduler.limit(live) for live in engine.present())):
        engine.step(arrivals=0)
    assert engine.present() == [], "everything ends"
    assert engine.pool.free == engine.pages, "every page is back"
    engine.pool.check([])
    reached = {name for name, times in engine.seen.items() if times}
    assert reached >= {"lowered", "accepted", "chunks", "forgotten", "preempted", "read again"}
    assert reached >= {"cancelled ended", "cancelled unread", "cancelled decoding"}
    assert (engine.pool.hits > 0) == (engine.seen["drafted hits"] > 0) == engine.prefix_cache


def test_there_are_ten_thousand_steps() -> None:
    assert sum(STEPS) == 10_000
