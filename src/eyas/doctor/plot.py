"""Plot of an examination as one PNG, for a README or a chat: the report's charts and the matrix of conditions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.doctor.report import ChartData, charts, decision_text, deepest_cell
from eyas.reports.plot import label_axes, new_figure

Record = Mapping[str, Any]
ROWS = 2


def plot_record(record: Record, path: Path) -> None:
    """Draw a record."""
    drawn, names = list(charts(record)), list(record["drafters"])
    cases = [case for case in record["cases"] if case["cells"]]
    columns = max(1, -(-len(drawn) // ROWS)) + bool(cases)
    about = f"eyas doctor: {' against '.join(names)}, on {record['target']['source']}"
    with new_figure(path, (4.5 * columns, 9 if cases else 8), dpi=110) as figure:
        grid = figure.add_gridspec(ROWS, columns)
        for place, chart in enumerate(drawn):
            _chart(figure.add_subplot(grid[place % ROWS, place // ROWS]), chart)
        if cases:
            _matrix(figure.add_subplot(grid[:, -1]), cases, names)
        figure.suptitle(f"{decision_text(record)}\n{about}")


def _chart(axes: Any, chart: ChartData) -> None:
    for line in chart.lines:
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        band = [
            (x, low, high) for x, low, high in zip(line.x, line.low, line.high, strict=False) if None not in (low, high)
        ]
        style, colour = ("o-", "s--", "^:", "D-.")[line.colour % 4], f"C{line.colour}"
        if known:
            axes.plot(*zip(*known, strict=True), style, color=colour, ms=3, label=line.label)
        if band:
            axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.15, lw=0)
    if chart.axes.diagonal:
        axes.plot([0, 1], [0, 1], ":", color="grey")
    axes.set_ylim(bottom=chart.axes.y_min)
    label_axes(axes, chart.title, chart.axes.across, chart.axes.up.replace("(% of", "(share of"))


def _matrix(axes: Any, cases: Sequence[Record], names: Sequence[str]) -> None:
    kept = [[deepest_cell(case, name)["kept"]["value"] for name in names] for case in cases]
    filled = [[float("nan") if value is None else value for value in row] for row in kept]
    axes.imshow(filled, cmap="RdYlGn", vmin=0.5, vmax=1.2, aspect="auto")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=8)
    for row, values in enumerate(filled):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8)
    axes.set_title("acceptance length kept", fontsize=10)
