"""Least squares of a few unknowns, by Levenberg and Marquardt's method: no numpy where nothing is loaded."""

from collections.abc import Callable, Sequence

ROUNDS, LONGEST_STRIDE, SETTLED = 40, 1.0, 1e-9
"""Of the search, how far an unknown may go in one of them, and the part of the squares that is not worth another."""


def least_squares(off: Callable[[Sequence[float]], list[float]], at: list[float]) -> list[float]:
    """Where the squares of `off` sum up to least, searched for from `at` on."""
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
        before, after = _dot(now, now), _dot(there, there)
        if after < before:
            at, now, damping = tried, there, damping / 3
            if before - after < SETTLED * (before + SETTLED):
                break
        else:
            damping *= 5
    return at


def _moved(at: Sequence[float], place: int, by: float) -> list[float]:
    return [x + by if i == place else x for i, x in enumerate(at)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _solve(equations: list[list[float]]) -> list[float]:
    """By elimination; damping keeps every pivot above zero."""
    size = len(equations)
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = equations[other][pivot] / equations[pivot][pivot]
                equations[other] = [a - factor * b for a, b in zip(equations[other], equations[pivot], strict=True)]
    return [equations[i][size] / equations[i][i] for i in range(size)]
