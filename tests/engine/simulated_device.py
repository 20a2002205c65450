"""A simulated device with captured passes and one step in flight, with measured costs on a virtual clock.

A step takes as long as the slower of host and device. It is chosen before the previous step's results are known, and
pays for all tokens of its captured shape, used or not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from eyas.engine.speculation.captured_shapes import CapturedShapes
from eyas.engine.speculation.controller import Controller, RowFacts
from eyas.engine.speculation.step_report import Arm, Rehearsal, RoundOutcome, StepReport
from eyas.plan.shapes import CAPTURED_TREES, CHAIN, Shape

MAX_DEPTH, MOST_WAITING = 7, 24
SHAPES = CapturedShapes(
    rows=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    depths=(1, 2, 3, 5, 7),
    most_tokens=2048,
)
WITH_TREES = replace(SHAPES, trees=CAPTURED_TREES)
Points = tuple[tuple[int, float], ...]
"""Counts and milliseconds."""


def seconds_at(points: Points, count: int) -> float:
    counts, milliseconds = zip(*points, strict=True)
    slope = (milliseconds[-1] - milliseconds[-2]) / (counts[-1] - counts[-2])
    beyond = max(0, count - counts[-1]) * slope
    return 1e-3 * (float(np.interp(count, counts, milliseconds)) + beyond)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Costs of passes, and of the host beside it."""

    verify: Points
    """With sampling, by tokens, at the shortest context."""
    per_row: float
    """Milliseconds for the context of one row."""
    first: Points
    """The drafter's first pass, by rows."""
    further: Points
    plain_host: Points
    drafting_host: Points

    def verify_seconds(self, tokens: int, rows: int) -> float:
        return seconds_at(self.verify, tokens) + 1e-3 * self.per_row * rows

    def draft_seconds(self, depth: int, rows: int) -> float:
        return seconds_at(self.first, rows) + (depth - 1) * seconds_at(self.further, rows)

    def grow_seconds(self, shape: Shape, rows: int) -> float:
        """A tree has as many nodes per depth as it is wide, and choosing them takes time."""
        further = seconds_at(self.further, rows * shape.width) + 3e-5
        return seconds_at(self.first, rows) + (shape.depth - 1) * further + 3e-5

    def catch_up_seconds(self, rows: int) -> float:
        return 0.5 * seconds_at(self.first, rows) * (1 + rows / 64)

    def host_seconds(self, rows: int, *, drafting: bool) -> float:
        return seconds_at(self.drafting_host if drafting else self.plain_host, rows)

    def rehearsal(self) -> Rehearsal:
        """Steps timed on blank rows, without contexts."""
        steps: dict[tuple[int, Arm], float] = {}
        for rows, depth in product((1, 4, 16, 64, 256), (0, *SHAPES.depths)):
            drafting = self.draft_seconds(depth, rows) if depth else 0.0
            steps[rows, depth] = self.verify_seconds(rows * (1 + depth), 0) + drafting
        for rows, shape in product((1, 2, 4), CAPTURED_TREES):
            steps[rows, shape] = self.verify_seconds(rows * (1 + shape.budget), 0) + self.grow_seconds(shape, rows)
        return Rehearsal(steps=steps)


@dataclass(frozen=True)
class Fixed:
    """Always one depth."""

    depth: int


@dataclass
class Served:
    """Results of a run, step by step."""

    tokens: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    depths: list[int] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)

    def rate(self, start: int = 0, end: int = -1) -> float:
        return (self.tokens[end] - self.tokens[start]) / (self.seconds[end] - self.seconds[start])


def serve_on(
    policy: Controller | Fixed,
    device: Device,
    chances: Callable[[int], Any],
    *,
    users: int,
    steps: int,
    seed: int = 0,
    spread: float = 0.25,
    length: int = 250,
    noise: float = 0.03,
    siblings: tuple[float, ...] = (),
) -> Served:
    """Run so many steps. `chances` returns acceptance probabilities by depth for a step; each draft's own one is above
    or below.

    Where the first candidate is wrong, the second, third, ... is right with the probabilities of `siblings`.
    """
    source, run = np.random.default_rng(seed), Served()
    controller = policy if isinstance(policy, Controller) else None
    keys = list(range(users))
    left = source.integers(length // 2, 3 * length // 2, size=users)
    pending, late, choice, since, changed = np.ones(users, dtype=int), None, None, 0, False
    bucket = SHAPES.rows_for(users)

    def seen(seconds: float) -> float:
        return seconds * float(source.lognormal(0, noise)) * (5.0 if source.random() < 0.01 else 1.0)

    for step in range(steps):
        depth = policy.depth if isinstance(policy, Fixed) else 0
        if controller is not None:
            if choice is None or changed or since >= choice.holds or controller.surprised:
                facts = [
                    RowFacts(key=key, context=200, pending=int(waits)) for key, waits in zip(keys, pending, strict=True)
                ]
                choice = controller.choose(facts, after=max(1, since))
                since, changed = 0, False
            since += 1
            depth = choice.depth
            if late is not None:  # the previous step's results arrive when this one is launched
                controller.observe(late)
        report, passes = StepReport(choice=choice, requests=users), 0.0
        if pending.max() > (MAX_DEPTH + 1 if depth else MOST_WAITING - 1):
            passes += device.catch_up_seconds(bucket)
            report.catching_up = seen(passes)
            pending[:] = 1
        shape = CHAIN if choice is None else choice.shape
        accepted_R = np.zeros(users, dtype=int)
        tokens = bucket
        trees = list[RoundOutcome]()
        if depth and shape.kind == "tree":
            drafting = device.grow_seconds(shape, bucket)
            passes += drafting
            pending[:] = 0
            tokens = bucket * (1 + shape.budget)
            trees = [_walk(key, shape, chances(step), siblings, source) for key in keys]
            accepted_R = np.array([outcome.accepted for outcome in trees])
        elif depth:
            drafting = device.draft_seconds(depth, bucket)
            passes += drafting
            pending[:] = 0
            mean_K = np.asarray(chances(step)[:depth])
            away_K = np.minimum(np.minimum(mean_K, 1 - mean_K), spread)
            sure_RK = mean_K + away_K * source.choice((-1.0, 1.0), size=(users, depth))
            tokens = bucket * (1 + depth)
            hits_RK = source.random((users, depth)) < sure_RK
            accepted_R = np.cumprod(hits_RK, axis=1).sum(axis=1)
        verifying = device.verify_seconds(tokens, users)
        passes += verifying
        seconds = max(passes, device.host_seconds(users, drafting=depth > 0))
        if controller is not None:
            report.seconds = seen(seconds)
            if trees:
                report.rounds = trees
            elif depth:
                report.chains = [(depth, accepted) for accepted in accepted_R.tolist()]
            late = report
        left -= 1 + accepted_R
        pending += 1 + accepted_R
        for place in np.flatnonzero(left <= 0):
            report.ended.append(keys[place])
            keys[place], pending[place] = max(keys) + 1, 1
            left[place] = source.integers(length // 2, 3 * length // 2)
            changed = True
        run.tokens.append(run.tokens[-1] + int(users + accepted_R.sum()))
        run.seconds.append(run.seconds[-1] + seconds)
        run.depths.append(depth)
        run.shapes.append(shape)
    return run


def _walk(
    key: int, shape: Shape, chances: Any, siblings: tuple[float, ...], source: np.random.Generator
) -> RoundOutcome:
    """Outcome of a tree whose confidences are the true probabilities."""
    at_depth = [
        (first, *((1 - first) * share for share in (*siblings, *([0.0] * shape.width))[: shape.width - 1]))
        for first in chances[: shape.depth]
    ]
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    grown, nodes = {()}, list[tuple[float, tuple[int, ...]]]()
    for candidates in at_depth:
        level = sorted(level, reverse=True)[: shape.width]
        grown |= {path for _, path in level}
        level = [(above * chance, (*path, rank)) for above, path in level for rank, chance in enumerate(candidates, 1)]
        nodes += level
    kept = {path for _, path in sorted(nodes, key=lambda node: -node[0])[: shape.budget]}
    path, ranks = tuple[int, ...](), list[int]()
    while path in grown and len(path) < shape.depth:
        candidates = at_depth[len(path)]
        rank = int(np.searchsorted(np.cumsum(candidates), source.random(), side="right")) + 1
        ranks.append(rank if rank <= shape.width else 0)
        if (*path, ranks[-1]) not in kept:
            break
        path = (*path, ranks[-1])
    return RoundOutcome(key=key, drafted=shape.depth, accepted=len(path), ranks=ranks)


SMALL = Device(
    verify=((1, 1.03), (4, 1.09), (64, 1.15), (256, 1.30), (1024, 1.78), (2048, 2.5)),
    per_row=0.001,
    first=((1, 0.28), (64, 0.33), (256, 0.43)),
    further=((1, 0.18), (64, 0.205), (256, 0.26)),
    plain_host=((1, 0.4), (64, 1.2), (256, 6.3)),
    drafting_host=((1, 0.6), (64, 3.0), (256, 8.8)),
)
"""A 135M target on an H200, as measured."""
SMALL_WITH_LEAN_HOST = Device(
    verify=SMALL.verify,
    per_row=SMALL.per_row,
    first=SMALL.first,
    further=SMALL.further,
    plain_host=((1, 0.3), (64, 0.6), (256, 1.5)),
    drafting_host=((1, 0.4), (64, 0.9), (256, 2.0)),
)
LARGE = Device(
    verify=((1, 4.74), (4, 4.83), (64, 5.55), (256, 8.1), (512, 14.3), (1024, 26.5), (2048, 52.0)),
    per_row=0.006,
    first=((1, 0.50), (64, 0.60), (256, 1.2)),
    further=((1, 0.38), (64, 0.42), (256, 0.6)),
    plain_host=((1, 0.4), (64, 1.2), (256, 6.3)),
    drafting_host=((1, 0.6), (64, 3.0), (256, 8.8)),
)
"""An 8B target on an H200."""
