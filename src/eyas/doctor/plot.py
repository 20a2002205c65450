"""The report as one PNG, for a README or a chat: made from the record and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.doctor.report import relative, reliability

Record = Mapping[str, Any]


def plot_record(record: Record, path: Path) -> None:
    """Draw curves by depth, and the matrix where there is one."""
    # Without pyplot there is no global state, no window system and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = {name: own["drift"] for name, own in record["drafters"].items() if own["drift"]}
    cases = [case for case in record["cases"] if case["cells"]]
    rows = 2
    figure = Figure(figsize=(18, 9 if cases else 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 4 if cases else 3)
    for number, (name, drift) in enumerate(measured.items()):
        colour, line = f"C{number}", ("o-", "s--")[number % 2]
        first = drift["rms"]["value"][0]
        _curve(axes[0, 0], relative(drift["rms"]), f"{name} ({first:.3g} at depth 1)", colour, line)
        _curve(axes[0, 1], drift["conditional"], name, colour, line)
        _curve(axes[0, 2], drift["joint"], name, colour, line)
        _curve(axes[1, 0], drift["mass"]["own"], f"{name}, on its own drafts", colour, line)
        _curve(axes[1, 0], drift["mass"]["sink"], f"{name}, on the first 4 tokens (sink)", colour, "^:")
        lengths = [one["value"] for one in drift["length"]]
        axes[1, 1].plot(range(1, len(lengths) + 1), lengths, line, color=colour, ms=3, label=name)
        pairs = reliability(drift["calibration"])
        if pairs:
            axes[1, 2].plot(*zip(*pairs, strict=True), line, color=colour, ms=4, label=name)
    axes[1, 2].plot([0, 1], [0, 1], ":", color="grey")
    for place, title, up, across in (
        ((0, 0), "size of the fed-back state", "RMS / RMS at depth 1 (times)", "depth (tokens)"),
        ((0, 1), "conditional acceptance", "accepted (share of rounds so far)", "depth (tokens)"),
        ((0, 2), "joint acceptance", "accepted (share of all rounds)", "depth (tokens)"),
        ((1, 0), "where it looks", "attention (share of its weight)", "depth (tokens)"),
        ((1, 1), "acceptance length", "tokens per check by the target", "depth served with (tokens)"),
        ((1, 2), "confidence and truth", "accepted (share)", "confidence (probability)"),
    ):
        _label(axes[place], title, up, across)
    if cases:
        grid = axes[0, 3].get_gridspec()
        for row in range(rows):
            axes[row, 3].remove()
        _matrix(figure.add_subplot(grid[:, 3]), cases, list(record["drafters"]))
    decision, names = record["decision"], " against ".join(record["drafters"])
    told = decision["text"] if len(record["drafters"]) == 1 else f"{decision['drafter']}: {decision['text']}"
    figure.suptitle(f"{told}\neyas doctor: {names}, on {record['target']['source']}")
    figure.savefig(path, dpi=110)


def _curve(axes: Any, curve: Record, label: str, colour: str, style: str) -> None:
    known = [
        (depth, *values)
        for depth, values in enumerate(zip(curve["value"], curve["low"], curve["high"], strict=True), start=1)
        if None not in values
    ]
    if known:
        depth, value, low, high = zip(*known, strict=True)
        axes.plot(depth, value, style, color=colour, ms=3, label=label)
        axes.fill_between(depth, low, high, color=colour, alpha=0.15, lw=0)


def _label(axes: Any, title: str, up: str, across: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _matrix(axes: Any, cases: list[Record], names: list[str]) -> None:
    kept = [[list(case["cells"][name].values())[-1]["kept"]["value"] for name in names] for case in cases]
    filled = [[float("nan") if value is None else value for value in row] for row in kept]
    axes.imshow(filled, cmap="RdYlGn", vmin=0.5, vmax=1.2, aspect="auto")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=8)
    for row, values in enumerate(filled):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8)
    axes.set_title("acceptance length kept", fontsize=10)
