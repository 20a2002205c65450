"""Fit the roofline's four constants to measured steps, keep what they leave over, and say how far off that is.

Fitted are the logarithms of four factors, one for each constant; minimised are the squares of log(predicted /
measured). So factors stay positive, and steps of all lengths count alike. A weak prior draws factors towards 1: with
few rows, or rows that do not separate two constants, they stay near their start.

What a measured pass then takes relative to the constants is kept by its tokens (`PassFactors` in roofline.py). So
measured steps are predicted as measured, and steps between them are interpolated. Drafting takes the time that was
measured, or else what the constants say; the rest of a step is the target's.

Errors are those of rows left out: each measured step is predicted from all the others. The overlap (p in roofline.py)
is chosen by the error of the constants alone, where there are enough rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from eyas.errors import UserError
from eyas.plan.roofline import Factors, Pair, PassFactors, Speed, Work

PRIOR = 0.002
"""Weight of the starting constants, in measured rows."""
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ENOUGH = 8
"""Rows from which on the overlap is chosen."""
ITERATIONS, LONGEST_STRIDE, SETTLED = 40, 1.0, 1e-9
"""Of the search: the most iterations, the largest change of a logarithm in one, and the relative gain that ends it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What a round gave and how long a step took, for a number of users at one depth."""

    users: int
    depth: float
    """A mean: a server may choose another depth in every step."""
    length: float
    """Tokens of a step for one user."""
    seconds: float
    context: float
    """Mean number of tokens that a user's newest one looks back to."""
    draft_seconds: tuple[float, float] | None = None
    """Of the drafter's first pass and of all others together, where they were timed."""

    @property
    def verified(self) -> int:
        """Tokens of the target's pass."""
        return self.users + round(self.users * self.depth)

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.users * self.length / self.seconds

    def work(self, pair: Pair) -> "StepWork":
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
    """A measured step and the work that a pair does in it."""

    step: MeasuredStep
    verify: Work
    first_draft: Work
    drafts: Work
    """All of the drafter's passes."""

    def parts(self, speed: Speed) -> tuple[float, float, float]:
        """Seconds of the target's pass, of the drafter's first pass and of its other passes."""
        verify = speed.verify_seconds(self.verify, tokens=self.step.verified)
        return verify, *speed.draft_seconds(self.first_draft, self.drafts, rows=self.step.users)

    def seconds(self, speed: Speed) -> float:
        return sum(self.parts(speed))


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """A measured step beside the prediction from the other steps."""

    step: MeasuredStep
    predicted_seconds: float
    speedup: float | None
    """Measured speedup over plain decoding of as many users; None where that was not measured."""
    predicted_speedup: float | None

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.step.seconds - 1

    @property
    def speedup_error(self) -> float | None:
        if self.speedup is None or self.predicted_speedup is None:
            return None
        return self.predicted_speedup / self.speedup - 1


@dataclass(frozen=True, kw_only=True)
class MachineCalibration:
    """Constants of a machine, and factors of the pair that was measured on it."""

    pair: Pair
    constants: tuple[float, ...]
    """Factors by which each constant is slower than before, in the order of `Speed.parts`."""
    overlap: float
    factors: PassFactors
    """For this very pair."""
    checked: tuple[CheckedStep, ...]

    def apply(self, start: Speed, pair: Pair) -> Speed:
        """Calibrate the speed of a pair: constants hold for the machine, factors for the measured pair alone."""
        fitted = replace(start.scaled(self.constants), overlap=self.overlap)
        return replace(fitted, factors=self.factors) if pair == self.pair else fitted


def find_calibration(pair: Pair, start: Speed, steps: Sequence[MeasuredStep]) -> MachineCalibration:
    """Fit everything to the steps of a bench."""
    works = [step.work(pair) for step in steps]
    start = choose_overlap(start, works)
    constants = _fit_constants(start, works)
    return MachineCalibration(
        pair=pair,
        constants=constants,
        overlap=start.overlap,
        factors=_pass_factors(start.scaled(constants), works),
        checked=tuple(check(start, works)),
    )


def calibrate(start: Speed, works: Sequence[StepWork], near: Sequence[float] = ()) -> Speed:
    """Fit constants and factors to the steps; the search starts at `near`, where it is given."""
    fitted = start.scaled(_fit_constants(start, works, near))
    return replace(fitted, factors=_pass_factors(fitted, works))


def choose_overlap(start: Speed, works: Sequence[StepWork]) -> Speed:
    """Choose the overlap with which constants predict rows left out best."""
    if len(works) < ENOUGH:
        return start

    def error(speed: Speed) -> float:
        total, near = 0.0, _fit_constants(speed, works)
        for work in works:
            fitted = speed.scaled(_fit_constants(speed, _without(works, work), near))
            total += log(fitted.seconds(work.verify, work.drafts) / work.step.seconds) ** 2
        return total

    return min((replace(start, overlap=overlap) for overlap in OVERLAPS), key=error)


def check(start: Speed, works: Sequence[StepWork]) -> list[CheckedStep]:
    """Predict every step from all the others; for speedups the plain step of as many users is left out too.

    The plain step of the fewest users is kept: the smallest pass has kernels of its own, so no other step predicts it.
    """
    plain = {work.step.users: work for work in works if work.step.depth == 0}
    fewest, near, checked = min(plain, default=0), _fit_constants(start, works), []
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


def _pass_factors(fitted: Speed, works: Sequence[StepWork]) -> PassFactors:
    """Compare the measured times of passes with those of the constants."""
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
        verify=_mean_factors(verified), first_draft=_mean_factors(first), further_drafts=_mean_factors(further)
    )


def _mean_factors(found: Sequence[tuple[int, float]]) -> Factors:
    by_count: dict[int, list[float]] = {}
    for count, factor in found:
        by_count.setdefault(count, []).append(factor)
    return Factors(points=tuple((count, sum(each) / len(each)) for count, each in sorted(by_count.items())))


def _fit_constants(start: Speed, works: Sequence[StepWork], near: Sequence[float] = ()) -> tuple[float, ...]:
    """Fit the factor of each constant, in the order of `Speed.parts`."""
    if not works:
        raise UserError("there is no measured step to calibrate with; measure plain decoding and at least one depth")

    def residuals(logs: Sequence[float]) -> list[float]:
        speed = start.scaled([exp(x) for x in logs])
        errors = [log(speed.seconds(work.verify, work.drafts) / work.step.seconds) for work in works]
        return [*errors, *(sqrt(PRIOR) * x for x in logs)]

    logs = _least_squares(residuals, [log(factor) for factor in near or (1.0,) * len(start.parts)])
    return tuple(exp(x) for x in logs)


def _least_squares(residuals: Callable[[Sequence[float]], list[float]], start: Sequence[float]) -> list[float]:
    """Minimise the sum of squares by the method of Levenberg and Marquardt."""
    import numpy as np  # plans without measured steps load no numpy

    at, now, damping, nudge = np.array(start), np.array(residuals(start)), 1e-3, 1e-5
    identity = np.eye(len(at))
    for _ in range(ITERATIONS):
        slopes = np.stack([(np.array(residuals((at + nudge * unit).tolist())) - now) / nudge for unit in identity])
        stride = np.linalg.solve(slopes @ slopes.T + damping * identity, -slopes @ now)
        tried = at + stride.clip(-LONGEST_STRIDE, LONGEST_STRIDE)
        there = np.array(residuals(tried.tolist()))
        before, after = now @ now, there @ there
        if after >= before:
            damping *= 5
            continue
        at, now, damping = tried, there, damping / 3
        if before - after < SETTLED * (before + SETTLED):
            break
    found: list[float] = at.tolist()
    return found
