"""The roofline's four constants fitted to steps that were measured, and how far off that is.

What is fitted are the logarithms of four factors, one for each constant, and what is made small are the squares of
log(predicted / measured): a factor stays positive, and steps of all lengths count alike. Factors are drawn towards 1 by
a little: with few rows, or rows that tell two constants badly apart, they stay near where they were.

The error that is told is of rows left out: each measured step is predicted by a fit to all the others. How well moving
and computing overlap (p of `roofline.py`) is chosen by that error, where there are rows enough.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from eyas.errors import UserError
from eyas.plan.roofline import Pair, Speed, Work

PRIOR = 0.002
"""What the constants one starts from weigh, in measured rows."""
ROUNDS, LONGEST_STRIDE = 40, 1.0
"""Of the fit, and how far a logarithm may go in one of them."""


OVERLAPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ENOUGH = 8
"""Rows from which on the overlap is chosen."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Users who decode, each drafting so deep: what a round gave and a step took."""

    users: int
    depth: float
    """On average: a server may choose another one in every step."""
    length: float
    """Tokens of a step for one user."""
    seconds: float
    context: float
    """Tokens that a user's newest one looks back to, on average."""

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.users * self.length / self.seconds

    def works(self, pair: Pair) -> tuple[Work, Work]:
        """What such a step does: the target's pass and the drafter's."""
        drafts, reads = round(self.users * self.depth), round(self.users * (self.depth + self.length - 1))
        return (
            pair.verify(rows=self.users, tokens=self.users + drafts, context=self.context),
            pair.draft(rows=self.users, passes=self.depth, tokens=reads, context=self.context),
        )


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """A measured step beside what the others predict of it."""

    step: MeasuredStep
    predicted_seconds: float
    speedup: float | None
    """Measured against plain decoding of as many users; None where that was not measured."""
    predicted_speedup: float | None

    @property
    def error(self) -> float:
        """Of the step's time."""
        return self.predicted_seconds / self.step.seconds - 1

    @property
    def speedup_error(self) -> float | None:
        """Of the speedup."""
        if self.speedup is None or self.predicted_speedup is None:
            return None
        return self.predicted_speedup / self.speedup - 1


def calibrate(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> Speed:
    """The constants that the steps speak for."""
    return start.scaled(calibration(pair, start, steps))


def calibration(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """How many times slower than it started from each constant is, in the order of `Speed.parts`."""
    if not steps:
        raise UserError("there is no measured step to calibrate with; measure plain decoding and at least one depth")
    works = [step.works(pair) for step in steps]

    def off(logs: Sequence[float]) -> list[float]:
        speed = start.scaled([exp(x) for x in logs])
        told = [log(speed.seconds(*work) / step.seconds) for work, step in zip(works, steps, strict=True)]
        return [*told, *(sqrt(PRIOR) * x for x in logs)]

    return tuple(exp(x) for x in _least_squares(off, [0.0] * len(start.parts)))


def choose_overlap(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> Speed:
    """The same constants with the overlap that predicts rows left out best."""
    if len(steps) < ENOUGH:
        return start

    def error(speed: Speed) -> float:
        told = 0.0
        for step in steps:
            fitted = calibrate(pair, speed, [other for other in steps if other is not step])
            told += log(fitted.seconds(*step.works(pair)) / step.seconds) ** 2
        return told

    return min((replace(start, overlap=overlap) for overlap in OVERLAPS), key=error)


def check(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> list[CheckedStep]:
    """Every step predicted by a fit to all the others; speedups with the plain step of as many users left out too."""
    plain = {step.users: step for step in steps if step.depth == 0}
    checked = []
    for step in steps:
        baseline = plain.get(step.users)
        others = [other for other in steps if other is not step]
        speed = calibrate(pair, start, others) if others else start
        predicted = speed.seconds(*step.works(pair))
        measured_gain = predicted_gain = None
        if step.depth and baseline is not None:
            blind = [other for other in others if other is not baseline]
            blind_speed = calibrate(pair, start, blind) if blind else start
            seconds = [blind_speed.seconds(*one.works(pair)) for one in (baseline, step)]
            measured_gain = step.tokens_per_second / baseline.tokens_per_second
            predicted_gain = step.length / baseline.length * seconds[0] / seconds[1]
        checked.append(
            CheckedStep(step=step, predicted_seconds=predicted, speedup=measured_gain, predicted_speedup=predicted_gain)
        )
    return checked


def _least_squares(off: Callable[[Sequence[float]], list[float]], at: list[float]) -> list[float]:
    """Where the squares of `off` sum up to least, by Levenberg and Marquardt's method."""
    now, damping, nudge = off(at), 1e-3, 1e-5
    for _ in range(ROUNDS):
        slopes = [
            [(there - here) / nudge for there, here in zip(off(_moved(at, place, nudge)), now, strict=True)]
            for place in range(len(at))
        ]
        equations = [
            [_dot(mine, other) + (damping if i == j else 0.0) for j, other in enumerate(slopes)] + [-_dot(mine, now)]
            for i, mine in enumerate(slopes)
        ]
        strides = [min(max(x, -LONGEST_STRIDE), LONGEST_STRIDE) for x in _solve(equations)]
        tried = [x + stride for x, stride in zip(at, strides, strict=True)]
        there = off(tried)
        if _dot(there, there) < _dot(now, now):
            at, now, damping = tried, there, damping / 3
        else:
            damping *= 5
    return at


def _moved(at: Sequence[float], place: int, by: float) -> list[float]:
    return [x + by if i == place else x for i, x in enumerate(at)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _solve(equations: list[list[float]]) -> list[float]:
    """By elimination; the prior keeps every pivot above zero."""
    size = len(equations)
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = equations[other][pivot] / equations[pivot][pivot]
                equations[other] = [a - factor * b for a, b in zip(equations[other], equations[pivot], strict=True)]
    return [equations[i][size] / equations[i][i] for i in range(size)]
