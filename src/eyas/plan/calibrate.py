"""The roofline's four constants fitted to steps that were measured, what they leave over, and how far off that is.

What is fitted are the logarithms of four factors, one for each constant, and what is made small are the squares of
log(predicted / measured): a factor stays positive, and steps of all lengths count alike. Factors are drawn towards 1 by
a little: with few rows, or rows that tell two constants badly apart, they stay near where they were.

What a measured pass then takes in parts of what the constants say is kept by its tokens (`pass_factors.py`), so that
steps are told as they were measured, and those in between lie between them. How long drafting took is known where it
was timed; otherwise it is what the constants say, and the rest of a step is the target's.

The error that is told is of rows left out: each measured step is predicted from all the others. How well moving and
computing overlap (p of `roofline.py`) is chosen by the error of the constants alone, where there are rows enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from eyas.errors import UserError
from eyas.plan.least_squares import least_squares
from eyas.plan.pass_factors import PassFactors, mean_factors
from eyas.plan.roofline import Pair, Speed, Work

PRIOR = 0.002
"""What the constants one starts from weigh, in measured rows."""

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
    draft_seconds: tuple[float, float] | None = None
    """Of the drafter's first pass and of all others together; None where they were not timed."""

    @property
    def verified(self) -> int:
        """Tokens of the target's pass."""
        return self.users + round(self.users * self.depth)

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.users * self.length / self.seconds

    def work(self, pair: Pair) -> "StepWork":
        """What such a step does."""
        verify = pair.verify(rows=self.users, tokens=self.verified, context=self.context)
        first, passes = round(self.users * self.length), max(0.0, self.depth - 1)
        return StepWork(
            step=self,
            verify=verify,
            first_draft=pair.draft(rows=self.users, passes=min(1, self.depth), tokens=first, context=self.context),
            drafts=pair.draft(
                rows=self.users, passes=self.depth, tokens=first + round(self.users * passes), context=self.context
            ),
        )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A measured step with what a pair does in it."""

    step: MeasuredStep
    verify: Work
    first_draft: Work
    drafts: Work
    """All of them."""

    def parts(self, speed: Speed) -> tuple[float, float, float]:
        """Seconds of the target's pass, of the drafter's first one and of those behind it."""
        verify = speed.verify_seconds(self.verify, tokens=self.step.verified)
        return verify, *speed.draft_seconds(self.first_draft, self.drafts, rows=self.step.users)

    def seconds(self, speed: Speed) -> float:
        """Of the step."""
        return sum(self.parts(speed))


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


@dataclass(frozen=True, kw_only=True)
class MachineCalibration:
    """What measured steps of a pair say of a machine."""

    pair: Pair
    constants: tuple[float, ...]
    """How many times slower than before each is, in the order of `Speed.parts`."""
    overlap: float
    factors: PassFactors
    """Of this very pair."""
    checked: tuple[CheckedStep, ...]

    def apply(self, start: Speed, pair: Pair) -> Speed:
        """For a pair: constants are the machine's, what they leave over is the measured pair's alone."""
        fitted = replace(start.scaled(self.constants), overlap=self.overlap)
        return replace(fitted, factors=self.factors) if pair == self.pair else fitted


def find_calibration(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> MachineCalibration:
    """All that the steps of a bench say."""
    works = [step.work(pair) for step in steps]
    start = choose_overlap(start, works)
    constants = calibration(start, works)
    return MachineCalibration(
        pair=pair,
        constants=constants,
        overlap=start.overlap,
        factors=pass_factors(start.scaled(constants), works),
        checked=tuple(check(start, works)),
    )


def calibrate(start: Speed, works: Sequence[StepWork], near: Sequence[float] = ()) -> Speed:
    """The constants that the steps speak for, and what they leave over."""
    fitted = start.scaled(calibration(start, works, near))
    return replace(fitted, factors=pass_factors(fitted, works))


def pass_factors(fitted: Speed, works: Sequence[StepWork]) -> PassFactors:
    """What the passes of these steps took in parts of what the constants say."""
    verified, first, further = list[tuple[int, float]](), list[tuple[int, float]](), list[tuple[int, float]]()
    for work in works:
        step, (verify, *drafting) = work.step, work.parts(fitted)
        took = step.draft_seconds
        rest = step.seconds - sum(took or drafting)
        if rest > 0:
            verified.append((step.verified, rest / verify))
        if took is not None and drafting[0]:
            first.append((step.users, took[0] / drafting[0]))
        if took is not None and took[1] and drafting[1]:
            further.append((step.users, took[1] / drafting[1]))
    return PassFactors(
        verify=mean_factors(verified), first_draft=mean_factors(first), further_drafts=mean_factors(further)
    )


def calibration(start: Speed, works: Sequence[StepWork], near: Sequence[float] = ()) -> tuple[float, ...]:
    """How many times slower than it started from each constant is, in the order of `Speed.parts`.

    The search begins at `near`, if it is known where to look: all but one of the steps say much what all do.
    """
    if not works:
        raise UserError("there is no measured step to calibrate with; measure plain decoding and at least one depth")

    def off(logs: Sequence[float]) -> list[float]:
        speed = start.scaled([exp(x) for x in logs])
        told = [log(speed.seconds(work.verify, work.drafts) / work.step.seconds) for work in works]
        return [*told, *(sqrt(PRIOR) * x for x in logs)]

    return tuple(exp(x) for x in least_squares(off, [log(factor) for factor in near or (1.0,) * len(start.parts)]))


def choose_overlap(start: Speed, works: Sequence[StepWork]) -> Speed:
    """The same constants with the overlap that predicts rows left out best."""
    if len(works) < ENOUGH:
        return start

    def error(speed: Speed) -> float:
        told, near = 0.0, calibration(speed, works)
        for work in works:
            fitted = speed.scaled(calibration(speed, _without(works, work), near))
            told += log(fitted.seconds(work.verify, work.drafts) / work.step.seconds) ** 2
        return told

    return min((replace(start, overlap=overlap) for overlap in OVERLAPS), key=error)


def check(start: Speed, works: Sequence[StepWork]) -> list[CheckedStep]:
    """Every step predicted from all the others; speedups with the plain step of as many users left out too.

    That of the fewest users is kept: what the smallest pass takes, which has kernels of its own, follows from nothing.
    """
    plain = {work.step.users: work for work in works if work.step.depth == 0}
    fewest, near, checked = min(plain, default=0), calibration(start, works), []
    for work in works:
        step, baseline, others = work.step, plain.get(work.step.users), _without(works, work)
        speed = calibrate(start, others, near) if others else start
        predicted = work.seconds(speed)
        measured_gain = predicted_gain = None
        if step.depth and baseline is not None:
            if step.users != fewest:
                others = _without(others, baseline)
                speed = calibrate(start, others, near) if others else start
            measured_gain = step.tokens_per_second / baseline.step.tokens_per_second
            predicted_gain = step.length / baseline.step.length * baseline.seconds(speed) / work.seconds(speed)
        checked.append(
            CheckedStep(step=step, predicted_seconds=predicted, speedup=measured_gain, predicted_speedup=predicted_gain)
        )
    return checked


def _without(works: Sequence[StepWork], left_out: StepWork) -> list[StepWork]:
    return [work for work in works if work is not left_out]
