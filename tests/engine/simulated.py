"""A machine, a drafter and requests made of numbers: thousands of steps of an engine in a second, on a virtual clock.

The clock runs on true costs, and the controller sees them through noise. So two runs differ by what was chosen, not by
luck with the noise.
"""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal, Protocol

from eyas.engine.controller import Choice, Controller, RowFacts
from eyas.plan.shapes import CHAIN

LUMP = 64
MAX_DEPTH = 7

Mode = Literal["auto", "off", "fixed"]
Seconds = Callable[[int], float]
"""What a pass of so many tokens takes."""
Profile = Callable[[int, int], Sequence[float]]
"""Chances of acceptance by depth, given the request's number and the step."""


def through(*points: tuple[int, float]) -> Seconds:
    """The polygon through points of (tokens, milliseconds), extended past its end."""
    counts = [count for count, _ in points]

    def seconds(count: int) -> float:
        place = min(max(bisect_left(counts, count), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return 1e-3 * (y0 + (y1 - y0) * (count - x0) / (x1 - x0))

    return seconds


def in_tiles(seconds: Seconds, tile: int) -> Seconds:
    """The same costs, paid by whole tiles."""
    return lambda count: seconds(-(-count // tile) * tile)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What passes truly cost, and how unclearly that is seen."""

    verify: Seconds
    read: Seconds
    deepen: Seconds
    per_context_token: float = 0.0
    noise: float = 0.05
    outliers: float = 0.02
    """How often a pass takes three to ten times as long."""
    slower: Callable[[int], float] = lambda step: 1.0
    """The machine as a whole, by step."""


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
GPU = Machine(
    verify=through((1, 4.9), (64, 4.9), (512, 14)),
    read=lambda count: 5e-4 + 5e-7 * count,
    deepen=lambda count: 5e-4,
)
TILED_GPU = Machine(
    verify=in_tiles(through((1, 5), (64, 10), (512, 60)), 16),
    read=lambda count: 5e-4 + 5e-7 * count,
    deepen=lambda count: 5e-4,
)


def chances(*by_depth: float) -> Profile:
    """Every request alike; the last chance holds for all deeper drafts."""
    padded = [*by_depth, *[by_depth[-1]] * MAX_DEPTH][:MAX_DEPTH]
    return lambda request, step: padded


RANDOM, POOR, GOOD, GREAT = chances(0.0), chances(0.3, 0.25), chances(0.73, 0.71, 0.68, 0.66), chances(0.85, 0.82)


class Policy(Protocol):
    """What steers a run."""

    def choose(self, rows: Sequence[RowFacts], other_tokens: int = 0) -> Choice: ...


@dataclass(frozen=True)
class Always:
    """One depth, whatever happens."""

    depth: int

    def choose(self, rows: Sequence[RowFacts], other_tokens: int = 0) -> Choice:
        depths = (self.depth,) * len(rows)
        return Choice(depths=depths, limits=depths, shape=CHAIN, reason="always")


@dataclass
class Request:
    number: int
    left: int
    context: int
    mode: Mode = "auto"
    depth: int | None = None
    pending: int = 8
    sure: list[float] = field(default_factory=list)
    """The true chance of each draft of this round: the drafter knows it, and says so."""
    fate: list[bool] = field(default_factory=list)
    made: int = 0
    kept: int = 0


@dataclass
class Run:
    """What came of it, step by step."""

    tokens: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    depths: list[tuple[int, ...]] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    def rate(self, start: int = 0, end: int = -1) -> float:
        """Tokens per second between two steps."""
        return (self.tokens[end] - self.tokens[start]) / (self.seconds[end] - self.seconds[start])

    def mean_depth(self, start: int = 0, end: int | None = None) -> float:
        return mean(depth for depths in self.depths[start:end] for depth in depths)


@dataclass
class Engine:
    """An engine without models."""

    policy: Policy
    machine: Machine
    profile: Profile
    users: Callable[[int], int]
    sees: bool = False
    """Whether confidences are looked at while drafting."""
    spread: float = 0.3
    """How far the chances of single drafts lie from the profile's."""
    length: int = 200
    mode: Callable[[int], tuple[Mode, int | None]] = lambda number: ("auto", None)
    seed: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.controller = self.policy if isinstance(self.policy, Controller) else None
        self.requests: list[Request] = []
        self.run, self.step, self.now, self.numbers = Run(), 0, 0.0, 0

    def take_time(self, seconds: float) -> float:
        """Let the clock run, and say what was seen of it."""
        seconds *= self.machine.slower(self.step)
        self.now += seconds
        late = self.chance.uniform(3, 10) if self.chance.random() < self.machine.outliers else 1.0
        return seconds * late * self.chance.lognormvariate(0, self.machine.noise)

    def steps(self, count: int) -> Run:
        for self.step in range(count):
            self.admit()
            facts = [
                RowFacts(key=r.number, context=r.context, mode=r.mode, depth=r.depth, pending=r.pending)
                for r in self.requests
            ]
            choice = self.policy.choose(facts)
            self.draft(choice.limits if self.sees else choice.depths)
            self.verify()
            gained = self.accept()
            self.read_lumps()
            self.run.tokens.append(self.run.tokens[-1] + gained)
            self.run.seconds.append(self.now)
            self.run.depths.append(choice.depths)
            self.run.made.append(sum(r.made for r in self.requests))
            self.run.reasons.append(choice.reason)
            if self.controller:
                self.run.events += [(self.step, event) for event in self.controller.events()]
        return self.run

    def admit(self) -> None:
        users = self.users(self.step)
        for gone in [r for r in self.requests if r.left <= 0] + self.requests[users:]:
            if gone in self.requests:
                self.requests.remove(gone)
                if self.controller:
                    self.controller.forget(gone.number)
        while len(self.requests) < users:
            self.numbers += 1
            mode, depth = self.mode(self.numbers)
            left = self.chance.randint(self.length // 2, self.length * 3 // 2)
            self.requests.append(Request(self.numbers, left, 100 + self.chance.randint(0, 50), mode, depth))

    def draft(self, limits: Sequence[int]) -> None:
        for r in self.requests:
            r.sure = [
                a + min(self.spread, a, 1 - a) * self.chance.choice((-1, 1)) for a in self.profile(r.number, self.step)
            ]
            r.fate = [self.chance.random() < sure for sure in r.sure]
            r.made = r.kept = 0
        drafting = [(r, limit) for r, limit in zip(self.requests, limits, strict=True) if limit]
        if not drafting:
            return
        everyone = [r for r, _ in drafting]
        tokens = sum(r.pending for r in everyone)
        seconds, depth = self.machine.read(tokens), 0
        while drafting:
            depth += 1
            for r, _ in drafting:
                r.made, r.pending = depth, 0
            drafting = [(r, limit) for r, limit in drafting if limit > depth]
            if drafting and self.sees and self.controller:
                going = self.controller.goes_on([r.number for r, _ in drafting], [r.sure[:depth] for r, _ in drafting])
                drafting = [each for each, goes in zip(drafting, going, strict=True) if goes]
            if drafting:
                tokens += len(drafting)
                seconds += self.machine.deepen(len(drafting))
        seen = self.take_time(seconds)
        kept = [r.made for r in everyone]
        if self.controller:
            self.controller.observe_draft(depth, tokens, seen)
            if self.sees:
                kept = self.controller.keeps([r.number for r in everyone], [r.sure[: r.made] for r in everyone])
        for r, count in zip(everyone, kept, strict=True):
            r.kept = count

    def verify(self) -> None:
        tokens = sum(1 + r.kept for r in self.requests)
        context = sum(r.context for r in self.requests)
        seen = self.take_time(self.machine.verify(tokens) + self.machine.per_context_token * context)
        if self.controller:
            self.controller.observe_target(tokens, context, seen)

    def accept(self) -> int:
        gained = 0
        for r in self.requests:
            accepted = next((place for place, hit in enumerate(r.fate[: r.kept]) if not hit), r.kept)
            if self.controller:
                self.controller.observe_round(r.number, r.kept, accepted, r.sure[: r.kept])
            r.left -= 1 + accepted
            r.context += 1 + accepted
            r.pending += 1 + accepted
            gained += 1 + accepted
        return gained

    def read_lumps(self) -> None:
        """Who has not drafted for long is read for all the same, all together, and only for keys and values."""
        if self.controller and max(r.pending for r in self.requests) >= LUMP:
            self.now += self.machine.read(sum(r.pending for r in self.requests) // 3) * self.machine.slower(self.step)
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
    """Run an engine for so many steps; users that leave are followed by others."""
    many = users if callable(users) else lambda step: users
    return Engine(policy, machine, profile, many, **options).steps(steps)


def plain_rate(machine: Machine, users: int) -> float:
    """Tokens per second without speculation."""
    return users / machine.verify(users)


def fixed_rate(machine: Machine, profile: Profile, *, users: int, depth: int) -> float:
    """Expected tokens per second at one depth, requests being alike."""
    tokens, survival = 1.0, 1.0
    for chance in profile(0, 0)[:depth]:
        survival *= chance
        tokens += survival
    drafting = machine.read(round(users * tokens)) + (depth - 1) * machine.deepen(users) if depth else 0.0
    return users * tokens / (machine.verify(users * (1 + depth)) + drafting)


def best_rate(machine: Machine, profile: Profile, *, users: int) -> float:
    """The best of all fixed depths, plain decoding among them."""
    return max(fixed_rate(machine, profile, users=users, depth=depth) for depth in range(MAX_DEPTH + 1))
