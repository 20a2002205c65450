"""A picture of a corpus check: what becomes of records, how long rows are, what a draft vocabulary covers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_check(record: Mapping[str, Any], picture: Path) -> None:
    """Draw as PNG."""
    # Without pyplot there is no global state, no window system and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    records, lengths, vocabulary = figure.subplots(1, 3)
    _plot_records(records, record)
    _plot_lengths(lengths, record)
    _plot_vocabulary(vocabulary, record)
    figure.savefig(picture, dpi=120)


def _plot_records(axes: Any, record: Mapping[str, Any]) -> None:
    bars = {
        "kept whole": record["kept"] - record["cut"],
        "kept, cut": record["cut"],
        "too long": record["too_long"],
        "unanswered": record["unanswered"],
        **{f"bad: {reason}": count for reason, count in record["bad"]["by_reason"].items()},
    }
    colours = ["C0", "C9", "C1", "C1", *["C3"] * len(record["bad"]["by_reason"])]
    drawn = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(drawn, fmt="{:,.0f}", fontsize=8, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    _label(axes, f"what becomes of {record['bad']['read']:,} records", "records", "")


def _plot_lengths(axes: Any, record: Mapping[str, Any]) -> None:
    histogram = record["lengths"]["histogram"]
    if histogram["rows"]:
        axes.stairs(histogram["rows"], histogram["edges"], fill=True, color="C0", alpha=0.7)
    axes.axvline(record["max_length"], color="C3", ls=":", label=f"max_length {record['max_length']:,}")
    axes.legend(fontsize=8)
    share = record["trained_on"] / max(1, record["tokens"])
    _label(axes, f"{record['rows']:,} rows, {record['tokens']:,} tokens, {share:.0%} trained on", "tokens", "rows")


def _plot_vocabulary(axes: Any, record: Mapping[str, Any]) -> None:
    coverage = record["vocabulary"]["coverage_of"]
    axes.plot([int(size) for size in coverage], [100 * share for share in coverage.values()], "o-")
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(size) for size in coverage], [f"{int(size) // 1000}k" for size in coverage])
    _label(axes, "what the most frequent tokens cover", "draft vocabulary", "% of trained tokens")


def _label(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
