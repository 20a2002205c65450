"""Line charts as inline SVG, without scripts or fonts, in the report's light and dark colours.

A chart has fixed coordinates and scales with the page. This file computes positions; `templates/chart.html.j2` draws
them. None values leave a gap. Series differ by colour, dashes and point shape, so that colour is never needed to tell
them apart. The width suits a phone: text of 14 units is at least 12 px high on any page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

from markupsafe import Markup

from eyas.reports.render import render

WIDTH, HEIGHT = 360, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 36, 52
COLOURS = 6
SHAPES = ("circle", "square", "triangle", "diamond")
SIZE = 4.0
"""Radius of a point."""

Number = float | None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series of points joined by a line, optionally with a band."""

    label: str
    x: Sequence[float]
    y: Sequence[Number]
    low: Sequence[Number] = field(default_factory=tuple)
    high: Sequence[Number] = field(default_factory=tuple)
    colour: int = 0
    """Index of a colour in the stylesheet."""
    dashes: int | None = None
    """Index of a dash pattern in the stylesheet, 0 for a solid line; by default that of the colour."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Axes of a chart."""

    across: str
    """Title of the horizontal axis, with its unit."""
    up: str
    """Title of the vertical axis, with its unit."""
    y_min: float | None = None
    y_max: float | None = None
    percent: bool = False
    diagonal: bool = False
    """Draw the line y = x."""
    names: Sequence[str] = ()
    """Labels of x = 0, 1, 2, ..., if x is no number."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title and caption."""

    title: str
    chart: Markup
    caption: str = ""


def line_chart(lines: Sequence[Line], axes: Axes) -> Markup:
    """An SVG element with its legend, or a note that nothing was measured."""
    lines = [line for line in lines if any(y is not None for y in line.y)]
    if not lines:
        return render("chart.html.j2", lines=[])
    scale = _Scale(lines, axes)
    labels = _tick_labels(scale.ticks, percent=axes.percent)
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
        top=TOP,
        bottom=HEIGHT - BOTTOM,
        middle=LEFT + (WIDTH - LEFT - RIGHT) / 2,
        rows=[(scale.y(tick), text) for tick, text in zip(scale.ticks, labels, strict=True)],
        columns=[(scale.x(tick), _name(tick, axes)) for tick in (_named(axes.names) if axes.names else _across(scale))],
        below=HEIGHT - BOTTOM + 18,
        diagonal=diagonal,
        lines=[_drawn(line, scale, axes) for line in lines],
    )


class _Scale:
    """Maps values to coordinates."""

    def __init__(self, lines: Sequence[Line], axes: Axes) -> None:
        xs = [x for line in lines for x in line.x]
        ys = [y for line in lines for y in (*line.y, *line.low, *line.high) if y is not None]
        self.left, self.right = min(xs), max(xs)
        if self.left == self.right:
            self.left, self.right = (self.left - 0.5, self.right + 0.5) if axes.names else (self.left, self.left + 1)
        low = min(ys) if axes.y_min is None else axes.y_min
        high = max(ys) if axes.y_max is None else axes.y_max
        if high - low < 1e-9 * max(1.0, abs(high)):
            low, high = low - (0.5 * abs(low or 1) if axes.y_min is None else 0.0), high + 0.5 * abs(high or 1)
        self.ticks = ticks(low, high)
        self.bottom, self.top = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def points(self, values: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    raw = (high - low) / about
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if raw <= unit * factor * (1 + 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _tick_labels(values: Sequence[float], *, percent: bool) -> list[str]:
    """Short labels of ticks."""
    if percent:
        spec = ".0%" if values[1] - values[0] >= 0.01 else ".1%"
        return [format(value, spec) for value in values]
    if max(map(abs, values)) >= 10_000:
        return [f"{value / 1000:g}k" for value in values]
    return [f"{value:.4g}" for value in values]


def _name(x: float, axes: Axes) -> str:
    return axes.names[int(x)] if axes.names else f"{x:g}"


def _named(names: Sequence[str]) -> list[int]:
    """Indices of the names that fit below the axis."""
    room = (WIDTH - LEFT - RIGHT) / (8 * max(map(len, names)) + 8)
    step = ceil(len(names) / max(1.0, room))
    return list(range(0, len(names), step))


def _across(scale: _Scale) -> list[float]:
    """Ticks of the horizontal axis: round numbers, or 1 and round numbers after it for depths."""
    inside = [t for t in ticks(scale.left, scale.right, 4) if scale.left - 1e-9 <= t <= scale.right + 1e-9]
    if scale.left == 1 and scale.right >= 4:
        step = max(1, round((scale.right - 1) / 4))
        return [1.0, *(float(t) for t in range(step, int(scale.right) + 1, step) if t > 1)]
    return [round(t, 6) for t in inside]


def _drawn(line: Line, scale: _Scale, axes: Axes) -> dict[str, object]:
    band = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    around = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
    return {
        "label": line.label,
        "colour": line.colour,
        "dashes": line.colour % len(SHAPES) if line.dashes is None else line.dashes,
        "sample": marker(line.colour, 14, 7),
        "band": scale.points(around),
        "runs": [
            {
                "points": scale.points(run),
                "dots": [
                    (
                        marker(line.colour, scale.x(x), scale.y(y)),
                        f"{format(y, '.1%' if axes.percent else '.4g')} at {_name(x, axes)}",
                    )
                    for x, y in run
                ],
            }
            for run in _runs(line)
        ],
    }


def _runs(line: Line) -> Iterator[list[tuple[float, float]]]:
    """Runs of points without a gap."""
    run: list[tuple[float, float]] = []
    for x, y in zip(line.x, line.y, strict=True):
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def marker(series: int, x: float, y: float) -> str:
    """The SVG path of a point; shapes differ by series."""
    r = SIZE
    shape = SHAPES[series % len(SHAPES)]
    if shape == "circle":
        return f"M{x - r:.1f},{y:.1f}a{r:g},{r:g} 0 1,0 {2 * r:g},0a{r:g},{r:g} 0 1,0 {-2 * r:g},0z"
    if shape == "square":
        return f"M{x - r:.1f},{y - r:.1f}h{2 * r:g}v{2 * r:g}h{-2 * r:g}z"
    if shape == "triangle":
        return f"M{x:.1f},{y - r:.1f}l{r:g},{2 * r:g}h{-2 * r:g}z"
    return f"M{x:.1f},{y - r - 1:.1f}l{r + 1:g},{r + 1:g}l{-r - 1:g},{r + 1:g}l{-r - 1:g},{-r - 1:g}z"
