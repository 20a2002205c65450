"""Templates: everything is escaped once, and missing values raise."""

from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from eyas.reports.charts import Axes, Line, line_chart
from eyas.reports.render import number, render
from reports.hostile import MARKUP


def test_a_chart_is_escaped_once() -> None:
    chart = line_chart([Line(label=MARKUP, x=[1, 2], y=[1.0, 2.0])], Axes(across=MARKUP, up=MARKUP))
    assert "<script" not in chart
    # Two points and the legend, the titles of both axes, both of them as the chart's name.
    assert chart.count("&lt;script&gt;") == 7
    assert "&amp;lt;" not in chart


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'record' is undefined"):
        render("plan.html.j2", title="a", lead={"kind": "", "text": ""}, contents=[])


def test_numbers_follow_their_format_and_none_is_a_dash() -> None:
    assert (number(0.256, ".0%"), number(None, ".0%"), number(1234, ",")) == ("26%", "-", "1,234")


def test_templates_load_nothing_external() -> None:
    for file in files("eyas.reports").joinpath("templates").iterdir():
        text = file.read_text(encoding="utf-8").replace("http-equiv", "")
        for outside in ("http", "<link", "src=", "@import", "url(", "|safe", " style=", " onclick="):
            assert outside not in text, (file.name, outside)
