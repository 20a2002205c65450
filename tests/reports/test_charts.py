"""Charts whose x has names instead of numbers."""

import re

from eyas.reports.charts import LEFT, RIGHT, WIDTH, Axes, Line, line_chart


def test_names_stand_evenly_below_their_points() -> None:
    axes = Axes(across="users", up="tokens/s", names=["1", "4", "<16>"])
    drawn = line_chart([Line(label="a", x=range(3), y=[1.0, None, 3.0])], axes)
    places = [float(x) for x in re.findall(r'<text class="tick" x="([\d.]+)" y="246"', drawn)]
    assert places == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert "&lt;16&gt;" in drawn
    assert "<16>" not in drawn
    assert "a: 3 at &amp;lt;16" not in drawn  # escaped once


def test_a_single_name_stands_in_the_middle() -> None:
    drawn = line_chart([Line(label="a", x=[0], y=[2.0])], Axes(across="users", up="tokens/s", names=["8"]))
    assert re.search(rf'<circle class="point c0" cx="{(LEFT + WIDTH - RIGHT) / 2:.1f}"', drawn)
