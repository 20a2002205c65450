"""Charts as inline SVG: no script, no font, no file from elsewhere; colours are the page's own, in light and dark.

A chart is a box of fixed coordinates that scales with the page. Values that are None leave a gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 14, 40

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
    """Which of the page's colours."""
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
    mark: float | None = None
    """A vertical line at this x."""
    names: Sequence[str] = ()
    """What x = 0, 1, 2, ... is called, where x is no number."""


def line_chart(lines: Sequence[Line], axes: Axes) -> str:
    """An SVG element."""
    lines = [line for line in lines if any(y is not None for y in line.y)]
    if not lines:
        return '<p class="nothing">nothing was measured</p>'
    scale = _Scale(lines, axes)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.up)} by {escape(axes.across)}">']
    parts += _grid(scale, axes)
    if axes.diagonal:
        low, high = max(scale.left, scale.bottom), min(scale.right, scale.top)
        ends = f'x1="{scale.x(low):.1f}" y1="{scale.y(low):.1f}" x2="{scale.x(high):.1f}" y2="{scale.y(high):.1f}"'
        parts.append(f'<line class="reference" {ends}/>')
    if axes.mark is not None:
        at = scale.x(axes.mark)
        parts.append(f'<line class="reference" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
    for line in lines:
        parts += _drawn(line, scale, axes)
    parts.append("</svg>")
    return "".join(parts) + legend(lines)


def legend(lines: Sequence[Line]) -> str:
    """Names beside their colours."""
    entries = "".join(
        f'<span><i class="c{line.colour}{" dashed" if line.dashed else ""}"></i>{escape(line.label)}</span>'
        for line in lines
    )
    return f'<div class="legend">{entries}</div>'


class _Scale:
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


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    raw = (high - low) / about
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if raw <= unit * factor * (1 + 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _grid(scale: _Scale, axes: Axes) -> list[str]:
    parts = []
    percent = ".0%" if scale.ticks[1] - scale.ticks[0] >= 0.01 else ".1%"
    for tick in scale.ticks:
        at = scale.y(tick)
        label = f"{tick:{percent}}" if axes.percent else f"{tick:.4g}"
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    for tick in range(len(axes.names)) if axes.names else _across(scale):
        label = escape(_name(tick, axes))
        at = scale.x(tick)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes.across)}</text>')
    return parts


def _name(x: float, axes: Axes) -> str:
    return axes.names[int(x)] if axes.names else f"{x:g}"


def _across(scale: _Scale) -> list[float]:
    """Where to name x: the first depth and round ones behind it, or round numbers."""
    inside = [t for t in ticks(scale.left, scale.right, 4) if scale.left - 1e-9 <= t <= scale.right + 1e-9]
    if scale.left == 1 and scale.right >= 4:
        step = max(1, round((scale.right - 1) / 4))
        return [1.0, *(float(t) for t in range(step, int(scale.right) + 1, step) if t > 1)]
    return [round(t, 6) for t in inside]


def _drawn(line: Line, scale: _Scale, axes: Axes) -> list[str]:
    parts = []
    band = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None
    ]
    if band:
        upper = [f"{scale.x(x):.1f},{scale.y(high):.1f}" for x, _, high in band]
        lower = [f"{scale.x(x):.1f},{scale.y(low):.1f}" for x, low, _ in reversed(band)]
        parts.append(f'<polygon class="band c{line.colour}" points="{" ".join(upper + lower)}"/>')
    for run in _runs(line):
        points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in run)
        parts.append(f'<polyline class="line c{line.colour}{" dashed" if line.dashed else ""}" points="{points}"/>')
        for x, y in run:
            told = f"{line.label}: {f'{y:.1%}' if axes.percent else f'{y:.4g}'} at {_name(x, axes)}"
            parts.append(
                f'<circle class="point c{line.colour}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.6">'
                f"<title>{escape(told)}</title></circle>"
            )
    return parts


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
