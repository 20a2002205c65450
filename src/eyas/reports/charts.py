"""Charts as inline SVG: no script, no font, no file from elsewhere; colours are the report's own, in light and dark.

A chart is a box of fixed coordinates that scales with the page. This file computes where things are;
`templates/chart.html.j2` draws them. Values that are None leave a gap.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

from markupsafe import Markup

from eyas.reports.render import render

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 40
COLOURS = 4
"""Colours of the stylesheet."""

Number = float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points joined, with a band where there is one."""

    label: str
    x: Sequence[float]
    y: Sequence[Number]
    low: Sequence[Number] = field(default_factory=tuple)
    high: Sequence[Number] = field(default_factory=tuple)
    colour: int = 0
    """Which of the stylesheet's colours."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What a chart shows."""

    across: str
    up: str
    y_min: float | None = None
    y_max: float | None = None
    percent: bool = False
    diagonal: bool = False
    """Draw where y equals x."""
    names: Sequence[str] = ()
    """What x = 0, 1, 2, ... is called, where x is no number."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title and caption."""

    title: str
    chart: Markup
    caption: str = ""


def line_chart(lines: Sequence[Line], axes: Axes) -> Markup:
    """An SVG element and its legend, or a line that says that nothing was measured."""
    lines = [line for line in lines if any(y is not None for y in line.y)]
    if not lines:
        return render("chart.html.j2", lines=[])
    scale = _Scale(lines, axes)
    percent = ".0%" if scale.ticks[1] - scale.ticks[0] >= 0.01 else ".1%"
    diagonal = None
    if axes.diagonal:
        ends = max(scale.left, scale.bottom), min(scale.right, scale.top)
        diagonal = [(scale.x(end), scale.y(end)) for end in ends]
    return render(
        "chart.html.j2",
        axes=axes,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        middle=LEFT + (WIDTH - LEFT - RIGHT) / 2,
        rows=[(scale.y(tick), format(tick, percent if axes.percent else ".4g")) for tick in scale.ticks],
        columns=[
            (scale.x(tick), _name(tick, axes)) for tick in (range(len(axes.names)) if axes.names else _across(scale))
        ],
        below=HEIGHT - BOTTOM + 16,
        diagonal=diagonal,
        lines=[_drawn(line, scale, axes) for line in lines],
    )


class _Scale:
    """From values to coordinates."""

    def __init__(self, lines: Sequence[Line], axes: Axes) -> None:
        xs = [x for line in lines for x in line.x]
        ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if y is not None]
        self.left, self.right = min(xs), max(xs)
        if self.left == self.right:
            self.left, self.right = (self.left - 0.5, self.right + 0.5) if axes.names else (self.left, self.left + 1)
        low = min(ys) if axes.y_min is None else axes.y_min
        high = max(ys) if axes.y_max is None else axes.y_max
        if high - low < 1e-9 * max(1.0, abs(high)):
            low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
        self.ticks = ticks(low, high)
        self.bottom, self.top = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def points(self, values: Sequence[tuple[float, float]]) -> str:
        """As SVG's `points`."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    raw = (high - low) / about
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if raw <= unit * factor * (1 + 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _name(x: float, axes: Axes) -> str:
    return axes.names[int(x)] if axes.names else f"{x:g}"


def _across(scale: _Scale) -> list[float]:
    """Where to name x: the first depth and round ones behind it, or round numbers."""
    inside = [t for t in ticks(scale.left, scale.right, 4) if scale.left - 1e-9 <= t <= scale.right + 1e-9]
    if scale.left == 1 and scale.right >= 4:
        step = max(1, round((scale.right - 1) / 4))
        return [1.0, *(float(t) for t in range(step, int(scale.right) + 1, step) if t > 1)]
    return [round(t, 6) for t in inside]


def _drawn(line: Line, scale: _Scale, axes: Axes) -> dict[str, object]:
    """A line in coordinates."""
    band = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    around = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
    return {
        "label": line.label,
        "colour": line.colour,
        "dashed": line.dashed,
        "band": scale.points(around),
        "runs": [
            {
                "points": scale.points(run),
                "dots": [
                    (scale.x(x), scale.y(y), f"{format(y, '.1%' if axes.percent else '.4g')} at {_name(x, axes)}")
                    for x, y in run
                ],
            }
            for run in _runs(line)
        ],
    }


def _runs(line: Line) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a gap."""
    run: list[tuple[float, float]] = []
    for x, y in zip(line.x, line.y, strict=True):
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run
