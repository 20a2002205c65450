"""Charts: axis labels, titles, distinguishable series, legible text."""

import re
from importlib.resources import files
from itertools import combinations
from math import dist
from pathlib import Path

import pytest

from eyas.errors import UserError
from eyas.reports.charts import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, SHAPES, WIDTH, Axes, Line, line_chart, marker
from eyas.reports.plot import label_axes, new_figure


def test_names_are_below_their_points() -> None:
    axes = Axes(across="users", up="tokens/s", names=["1", "4", "<16>"])
    drawn = line_chart([Line(label="a", x=range(3), y=[1.0, None, 3.0])], axes)
    places = [float(x) for x in re.findall(rf'<text class="tick" x="([\d.]+)" y="{HEIGHT - BOTTOM + 18}"', drawn)]
    assert places == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert "&lt;16&gt;" in drawn
    assert "<16>" not in drawn
    assert "a: 3 at &amp;lt;16" not in drawn  # escaped once


def test_a_single_name_stands_in_the_middle() -> None:
    drawn = line_chart([Line(label="a", x=[0], y=[2.0])], Axes(across="users", up="tokens/s", names=["8"]))
    assert f'<path class="point c0" d="M{(LEFT + WIDTH - RIGHT) / 2 - 4:.1f},' in drawn


def test_both_axes_have_their_titles() -> None:
    drawn = line_chart([Line(label="a", x=[1, 2], y=[1.0, 2.0])], Axes(across="depth (tokens)", up="pause (ms)"))
    assert re.findall(r'<text class="name"[^>]*>([^<]+)</text>', drawn) == ["pause (ms)", "depth (tokens)"]


def test_series_differ_by_shape_and_dashes_and_not_by_colour_alone() -> None:
    lines = [Line(label=f"line {i}", x=[1, 2], y=[i, i + 1.0], colour=i) for i in range(len(SHAPES))]
    drawn = line_chart(lines, Axes(across="x", up="y"))
    assert len({marker(i, 0, 0) for i in range(len(SHAPES))}) == len(SHAPES)
    for i in range(len(SHAPES)):
        assert f'<polyline class="line c{i} d{i}"' in drawn
        assert drawn.count(f'd="{marker(i, 14, 7)}"') == 1, "the legend shows the same point"


def test_many_names_leave_room_for_each_other() -> None:
    names = [f"{10**i:,}" for i in range(9)]
    drawn = line_chart([Line(label="a", x=range(9), y=[1.0] * 9)], Axes(across="users", up="y", names=names))
    assert 2 <= sum(f">{name}</text>" in drawn for name in names) < 9


def test_large_ticks_are_short_and_a_floor_stays_one() -> None:
    drawn = line_chart([Line(label="a", x=[1, 2], y=[0.0, 20_000.0])], Axes(across="x", up="y", y_min=0.0))
    assert ">20k</text>" in drawn
    nothing = line_chart([Line(label="a", x=[1, 2], y=[0.0, 0.0])], Axes(across="x", up="y", y_min=0.0))
    assert ">-" not in nothing


def _colours(css: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", css))


def _linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), _linear(colour), strict=True))


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


BLIND = {  # Machado, Oliveira and Fernandes 2009, severity 1, on linear values
    "nobody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def _seen(colour: str, by: str) -> list[float]:
    """In Oklab, where distances are those of the eye."""
    linear = _linear(colour)
    r, g, b = (max(0.0, sum(m * part for m, part in zip(row, linear, strict=True))) for row in BLIND[by])
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return [
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    ]


def test_colours_stand_out_and_differ_in_light_and_dark_for_most_eyes() -> None:
    css = files("eyas.reports").joinpath("templates", "style.css").read_text(encoding="utf-8")
    light, dark = css.split("prefers-color-scheme: dark")[:2]
    for own in (_colours(light), _colours(light) | _colours(dark.split("* {")[0])):
        series = [own[f"c{i}"] for i in range(COLOURS)]
        for colour in series:
            assert _contrast(colour, own["card"]) >= 3, colour
        for name in ("ink", "soft", "fault", "warning", "unknown", "note", "healthy", "link"):
            assert min(_contrast(own[name], own["card"]), _contrast(own[name], own["ground"])) >= 4.5, name
        for by in BLIND:
            for one, other in combinations(series, 2):
                assert dist(_seen(one, by), _seen(other, by)) > 0.12, (by, one, other)


def test_no_text_is_smaller_than_12_px() -> None:
    css = files("eyas.reports").joinpath("templates", "style.css").read_text(encoding="utf-8")
    sizes = [float(size) for size in re.findall(r"(?:font-size:|font:[^;]*?) ?([\d.]+)px", css)]
    assert len(sizes) > 10
    assert min(sizes) >= 12
    # A chart is 312 px wide at least (a phone of 360 px without margins and paddings), its text 14 units high.
    assert 14 * 312 / WIDTH >= 12


def test_a_figure_is_written_and_a_failure_is_an_error(tmp_path: Path) -> None:
    def plot(path: Path) -> None:
        with new_figure(path, (3, 2)) as figure:
            axes = figure.subplots()
            axes.plot([1, 2], [3, 4], label="a")
            label_axes(axes, "title", "x", "y")

    plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"cannot write .*nowhere"):
        plot(tmp_path / "nowhere" / "plot.png")
