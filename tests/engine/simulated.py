"""Simulated machines, drafters and requests: thousands of engine steps per second on a virtual clock.

The clock runs on true costs; the controller sees them through noise. So two runs differ only by the depths chosen.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, Literal, Protocol

from eyas.engine.speculation.controller import Choice, Controller, RowFacts
from eyas.engine.speculation.step_report import Rehearsal, RoundOutcome, StepReport
from eyas.plan.shapes import CHAIN

LUMP = 64
MAX_DEPTH = 7
REHEARSED_ROWS, REHEARSED_DEPTHS, REHEARSED_TOKENS = (1, 4, 16), (0, 1, 3, 7), 64

Mode = Literal["auto", "off", "fixed"]
Seconds = Callable[[int], float]
"""Duration of a pass over so many tokens."""
Profile = Callable[[int, int], Sequence[float]]
"""Acceptance probabilities by depth, given the request's number and the step."""


def through(*points: tuple[int, float]) -> Seconds:
    """Interpolate through points of (tokens, milliseconds), extrapolating at the end."""
    counts = [count for count, _ in points]

    def seconds(count: int) -> float:
        place = min(max(bisect_left(counts, count), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return 1e-3 * (y0 + (y1 - y0) * (count - x0) / (x1 - x0))

    return seconds


def in_tiles(seconds: Seconds, tile: int) -> Seconds:
    """Round costs up to whole tiles of tokens."""
    return lambda count: seconds(-(-count // tile) * tile)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """True costs of passes, and the noise of their measurement."""

    verify: Seconds
    read: Seconds
    deepen: Seconds
    wake: float = 0.0
    """Extra time to read more states than a captured pass reads, for requests that have rested."""
    per_context_token: float = 0.0
    rest: Callable[[int, bool], float] = lambda requests, drafting: 0.0
    """Host time beside all passes."""
    overlapped: bool = False
    """Whether host time overlaps with the passes; the next step is then chosen before this one's results are known."""
    noise: float = 0.05
    outliers: float = 0.02
    """How often a measurement is three to ten times too long."""
    slower: Callable[[int], float] = lambda step: 1.0
    """Slowdown of the whole machine, by step."""

    def rehearsal(self) -> Rehearsal:
        """Measured whole steps of some sizes with short contexts, each the better of two noisy measurements."""
        chance = random.Random(1)

        def seen(rows: int, depth: int) -> float:
            drafting = self.read(rows) + (depth - 1) * self.deepen(rows) if depth else 0.0
            seconds = seconds_of(self, rows, self.verify(rows * (1 + depth)) + drafting, drafting=depth > 0)
            late = chance.uniform(3, 10) if chance.random() < self.outliers else 1.0
            return seconds * late * chance.lognormvariate(0, self.noise)

        return Rehearsal(
            steps={
                (rows, depth): min(seen(rows, depth), seen(rows, depth))
                for rows in REHEARSED_ROWS
                for depth in REHEARSED_DEPTHS
                if rows * (1 + depth) <= REHEARSED_TOKENS
            }
        )


CPU = Machine(
    verify=through((1, 58), (4, 124), (8, 180), (16, 260), (64, 800)),
    read=lambda count: 13e-3 + 2e-4 * count,
    deepen=lambda count: 13e-3 + 1e-3 * count,
)
KIND_CPU = Machine(
    verify=through((1, 25), (4, 32), (8, 40), (64, 150)),
    read=lambda count: 3e-3 + 1e-4 * count,
    deepen=lambda count: 3e-3 + 3e-4 * count,
)
TWO_CORES = Machine(
    verify=through((1, 23), (2, 24.7), (3, 28.1), (4, 29.4), (5, 33.4), (6, 37.2), (8, 45.2), (16, 80)),
    read=lambda count: 3.7e-3 + 1.6e-4 * count,
    deepen=lambda count: 3.7e-3 + 1.6e-4 * count,
)
"""SmolLM2 with the shipped drafter, as measured by the controller on two Neoverse-N1 cores."""
TWO_X86_CORES = Machine(
    verify=through((1, 7), (2, 8), (4, 9), (8, 12), (16, 20), (32, 33), (64, 60), (128, 112)),
    read=lambda count: 3.4e-3 + 1.5e-4 * count,
    deepen=lambda count: 3.4e-3 + 1.5e-4 * count,
)
"""The same models on two x86 cores: drafts pay for one user, but not for four."""
GPU = Machine(
    verify=through((1, 4.9), (64, 4.9), (512, 14)),
    read=lambda count: 5e-4 + 5e-7 * count,
    deepen=lambda count: 5e-4,
)
SMALL_ON_GPU = Machine(
    verify=through((1, 1.0), (64, 1.2), (512, 2.0)),
    read=lambda count: 7e-4 + 5e-7 * count,
    deepen=lambda count: 1.5e-4,
    rest=lambda requests, drafting: 1e-4 + requests * (6e-5 if drafting else 2e-5),
)
"""A target so small that the host takes as long as the device."""
SMALL_ON_FAST_GPU = Machine(
    verify=through((1, 1.07), (2, 1.13), (4, 1.134), (8, 1.157), (16, 1.19), (64, 1.35), (256, 2.2)),
    read=lambda count: 2.18e-4,
    deepen=lambda count: 1.57e-4,
    wake=2e-3,
    rest=lambda requests, drafting: 9e-5 + requests * (1.2e-5 if drafting else 4e-6),
)
"""SmolLM2 as measured on an H200: states that have waited are read operation by operation."""
SLOW_HOST = replace(SMALL_ON_GPU, rest=lambda requests, drafting: 2e-4 + requests * (2.5e-4 if drafting else 2e-5))
"""With a host that is slow at drafting."""
SMALL_ON_H200 = Machine(
    verify=through((1, 0.62), (16, 0.68), (64, 0.78), (256, 1.5), (1024, 4.2)),
    read=lambda count: 1.6e-4 + 2e-7 * count,
    deepen=lambda count: 1.1e-4 + 1e-7 * count,
    rest=lambda requests, drafting: 2.5e-4 + requests * (8e-6 if drafting else 5e-6),
    overlapped=True,
)
"""A 135M target on an H200 with one step in flight; from 64 users on the host is as slow as the device."""
LARGE_ON_H200 = Machine(
    verify=through((1, 4.66), (16, 4.93), (64, 5.44), (256, 8.93), (1024, 25)),
    read=lambda count: 4.6e-4 + 1e-6 * count,
    deepen=lambda count: 3.8e-4 + 1e-6 * count,
    rest=lambda requests, drafting: 2.5e-4 + requests * (8e-6 if drafting else 5e-6),
    overlapped=True,
)
"""An 8B target on an H200, by measured device times."""
TILED_GPU = Machine(
    verify=in_tiles(through((1, 5), (64, 10), (512, 60)), 16),
    read=lambda count: 5e-4 + 5e-7 * count,
    deepen=lambda count: 5e-4,
)


def chances(*by_depth: float) -> Profile:
    """The same probabilities for every request; the last one holds for all deeper drafts."""
    padded = [*by_depth, *[by_depth[-1]] * MAX_DEPTH][:MAX_DEPTH]
    return lambda request, step: padded


RANDOM, POOR, GOOD, GREAT = chances(0.0), chances(0.3, 0.25), chances(0.73, 0.71, 0.68, 0.66), chances(0.85, 0.82)


class Policy(Protocol):
    """Chooses the depths of a run."""

    def choose(self, rows: Sequence[RowFacts]) -> Choice: ...


@dataclass(frozen=True)
class Always:
    """Always chooses one depth."""

    depth: int

    def choose(self, rows: Sequence[RowFacts]) -> Choice:
        depths = (self.depth,) * len(rows)
        return Choice(depths=depths, shape=CHAIN, reason="always")


@dataclass
class Request:
    number: int
    left: int
    context: int
    mode: Mode = "auto"
    depth: int | None = None
    pending: int = 8
    sure: list[float] = field(default_factory=list)
    """True acceptance probability of each draft of this round."""
    hits: list[bool] = field(default_factory=list)
    """Whether the first candidate of each depth is right, given that all before it are."""
    made: int = 0


@dataclass
class Run:
    """Results of a run, step by step."""

    tokens: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    depths: list[tuple[int, ...]] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    reading: list[float] = field(default_factory=lambda: [0.0])
    """Seconds so far that the drafter spent on reading along, which no choice affects."""

    def rate(self, start: int = 0, end: int = -1) -> float:
        """Tokens per second between two steps."""
        return (self.tokens[end] - self.tokens[start]) / (self.seconds[end] - self.seconds[start])

    def mean_depth(self, start: int = 0, end: int | None = None) -> float:
        return mean(depth for depths in self.depths[start:end] for depth in depths)


@dataclass
class Engine:
    """An engine with simulated models."""

    policy: Policy
    machine: Machine
    profile: Profile
    users: Callable[[int], int]
    spread: float = 0.3
    """How far the probabilities of single drafts deviate from the profile's."""
    length: int = 200
    mode: Callable[[int], tuple[Mode, int | None]] = lambda number: ("auto", None)
    seed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.controller = self.policy if isinstance(self.policy, Controller) else None
        self.requests: list[Request] = []
        self.run, self.step, self.now, self.numbers = Run(), 0, 0.0, 0
        self.read_along = 0.0
        self.seen = 0.0
        """Measured seconds of the current step."""
        self.chosen_at, self.until, self.held = 0, 0, False
        self.chosen_for: set[int] = set()

    def take_time(self, seconds: float) -> float:
        """Advance the clock; returns the measured seconds."""
        seconds *= self.machine.slower(self.step)
        self.now += seconds
        late = self.chance.uniform(3, 10) if self.chance.random() < self.machine.outliers else 1.0
        seen = seconds * late * self.chance.lognormvariate(0, self.machine.noise)
        self.seen += seen
        return seen

    def steps(self, count: int) -> Run:
        for self.step in range(count):
            self.admit()
            facts = [
                RowFacts(key=r.number, context=r.context, mode=r.mode, depth=r.depth, pending=r.pending)
                for r in self.requests
            ]
            surprised = self.controller is not None and self.controller.surprised
            same = {r.number for r in self.requests} == self.chosen_for
            self.held = self.step < self.until and not surprised and same
            if not self.held:
                after = max(1, self.step - self.chosen_at)
                self.choice = (
                    self.controller.choose(facts, after=after) if self.controller else self.policy.choose(facts)
                )
                self.chosen_at, self.until = self.step, self.step + self.choice.holds
                self.chosen_for = {r.number for r in self.requests}
            self.observe_late()
            self.throw_dice()
            self.report = StepReport(choice=self.choice, requests=len(self.requests))
            began = self.now
            self.draft(self.choice.depths)
            self.verify()
            gained = self.accept()
            self.host(began, drafting=any(r.made for r in self.requests))
            if self.controller and not self.machine.overlapped:
                self.controller.observe(self.report)
            self.read_lumps()
            self.run.tokens.append(self.run.tokens[-1] + gained)
            self.run.seconds.append(self.now)
            self.run.reading.append(self.read_along)
            self.run.depths.append(self.choice.depths)
            self.run.made.append(sum(r.made for r in self.requests))
            self.run.reasons.append(self.choice.reason)
            if self.controller:
                self.run.events += [(self.step, event) for event in self.controller.events()]
        return self.run

    def admit(self) -> None:
        users = self.users(self.step)
        for gone in [r for r in self.requests if r.left <= 0] + self.requests[users:]:
            if gone in self.requests:
                self.requests.remove(gone)
        while len(self.requests) < users:
            self.numbers += 1
            mode, depth = self.mode(self.numbers)
            left = self.chance.randint(self.length // 2, self.length * 3 // 2)
            self.requests.append(Request(self.numbers, left, 100 + self.chance.randint(0, 50), mode, depth))

    def throw_dice(self) -> None:
        for r in self.requests:
            r.sure = [
                a + min(self.spread, a, 1 - a) * self.chance.choice((-1, 1)) for a in self.profile(r.number, self.step)
            ]
            r.hits = [self.chance.random() < sure for sure in r.sure]
            r.made = 0

    def draft(self, depths: Sequence[int]) -> None:
        drafting = [(r, depth) for r, depth in zip(self.requests, depths, strict=True) if depth]
        if not drafting:
            return
        everyone = [r for r, _ in drafting]
        rested = [r for r in everyone if r.pending > MAX_DEPTH + 1]
        if rested and self.machine.wake:
            self.report.catching_up = self.take_time(self.machine.wake)
            for r in rested:
                r.pending = 1
        seconds = self.machine.read(sum(r.pending for r in everyone))
        for deeper in range(1, max(depth for _, depth in drafting)):
            seconds += self.machine.deepen(sum(depth > deeper for _, depth in drafting))
        for r, depth in drafting:
            r.made, r.pending = depth, 0
        self.take_time(seconds)

    def verify(self) -> None:
        tokens = sum(1 + r.made for r in self.requests)
        context = sum(r.context for r in self.requests)
        self.take_time(self.machine.verify(tokens) + self.machine.per_context_token * context)

    def observe_late(self) -> None:
        """With overlap, observe the previous step only now, after the next one was chosen."""
        if self.controller and self.machine.overlapped and self.step:
            self.controller.observe(self.report)

    def host(self, began: float, *, drafting: bool) -> None:
        """Add the host's time, or what exceeds the passes if it overlaps."""
        seconds = self.machine.rest(len(self.requests), drafting)
        if self.machine.overlapped:
            seconds = max(0.0, seconds - (self.now - began) / self.machine.slower(self.step))
        if seconds:
            self.take_time(seconds)
        self.report.seconds, self.seen = self.seen, 0.0

    def accept(self) -> int:
        gained = 0
        for r in self.requests:
            accepted = [*r.hits[: r.made], False].index(False)
            if r.made:
                self.report.rounds.append(RoundOutcome(key=r.number, drafted=r.made, accepted=accepted))
            r.left -= 1 + accepted
            r.context += 1 + accepted
            r.pending += 1 + accepted
            gained += 1 + accepted
        return gained

    def read_lumps(self) -> None:
        """Read the states of requests that have not drafted for long, together and for keys and values only."""
        if self.controller and max(r.pending for r in self.requests) >= LUMP:
            seconds = self.machine.read(sum(r.pending for r in self.requests) // 3) * self.machine.slower(self.step)
            self.now += seconds
            self.read_along += seconds
            for r in self.requests:
                r.pending = 0


def serve(
    policy: Policy,
    machine: Machine,
    profile: Profile,
    *,
    users: int | Callable[[int], int],
    steps: int,
    **options: Any,
) -> Run:
    """Run an engine for so many steps; finished requests are replaced by new ones."""
    many = users if callable(users) else lambda step: users
    return Engine(policy, machine, profile, many, **options).steps(steps)


def seconds_of(machine: Machine, users: int, passes: float, *, drafting: bool) -> float:
    """Duration of a step whose passes take `passes`."""
    rest = machine.rest(users, drafting)
    return max(passes, rest) if machine.overlapped else passes + rest


def plain_rate(machine: Machine, users: int) -> float:
    """Tokens per second without speculation."""
    return users / seconds_of(machine, users, machine.verify(users), drafting=False)


def fixed_rate(machine: Machine, profile: Profile, *, users: int, depth: int) -> float:
    """Expected tokens per second at one depth, with equal requests."""
    tokens, survival = 1.0, 1.0
    for chance in profile(0, 0)[:depth]:
        survival *= chance
        tokens += survival
    drafting = machine.read(round(users * tokens)) + (depth - 1) * machine.deepen(users) if depth else 0.0
    passes = machine.verify(users * (1 + depth)) + drafting
    return users * tokens / seconds_of(machine, users, passes, drafting=depth > 0)


def best_rate(machine: Machine, profile: Profile, *, users: int) -> float:
    """The best rate of all fixed depths, plain decoding included."""
    return max(fixed_rate(machine, profile, users=users, depth=depth) for depth in range(MAX_DEPTH + 1))
