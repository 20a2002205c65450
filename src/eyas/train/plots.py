"""Plots of a run, of an adaptation and of a corpus check, as PNG files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.reports.plot import label_axes, new_figure


@contextmanager
def _panels(picture: Path, count: int, size: tuple[float, float]) -> Iterator[Any]:
    """Yield panels side by side, in a figure that is saved at the end of the block."""
    with new_figure(picture, size) as figure:
        yield figure.subplots(1, count, squeeze=False)[0]


def plot_run(log: Path, picture: Path) -> None:
    """Plot a run's log: loss, accuracy by depth, and acceptance length on held-out text."""
    from eyas.train.journal import read_log

    lines = read_log(log)
    names = list(dict.fromkeys(line["drafter"] for line in lines))
    with _panels(picture, 3, (13, 4)) as (losses, accuracies, lengths):
        for number, name in enumerate(names):
            colour = f"C{number}"
            reports = [line for line in lines if line["drafter"] == name and "loss" in line]
            estimates = [line for line in lines if line["drafter"] == name and "held_out" in line]
            steps = [line["step"] for line in reports]
            losses.plot(steps, [line["loss"] for line in reports], color=colour, label=name)
            depths = len(reports[0]["accuracy"]) if reports else 0
            for depth in range(depths):
                alpha = 1 - 0.7 * depth / max(8, depths)
                accuracies.plot(steps, [line["accuracy"][depth] for line in reports], color=colour, alpha=alpha, lw=1)
            lengths.plot(
                [line["step"] for line in estimates],
                [line["held_out"]["acceptance_length"] for line in estimates],
                "o-",
                color=colour,
                label=name,
            )
        label_axes(losses, "loss\n(weighted over depths)", "step")
        label_axes(accuracies, "accuracy by depth\n(paler is deeper)", "step")
        label_axes(lengths, "acceptance length, held out\n(rounds walked as in decoding)", "step")


def plot_adaptation(changes: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """Plot acceptance by depth before and after an adaptation, on the traffic and on what is replayed."""
    with _panels(picture, len(changes), (5.5 * len(changes), 4)) as panels:
        for axes, (name, change) in zip(panels, changes.items(), strict=True):
            for when, style in (("before", "o--"), ("after", "s-")):
                shares = change[when]["conditional"]
                known = [(depth, share) for depth, share in enumerate(shares, start=1) if share is not None]
                length = change[when]["acceptance_length"]
                axes.plot(*zip(*known, strict=True), style, label=f"{when}: {length:.2f} tokens per verification")
            gain = change["gain"]
            title = f"{name}, {change['conversations']} conversations held out"
            interval = f"{gain['value']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})"
            label_axes(axes, f"{title}\n{interval}", "depth", "accepted, given all before it were")
            axes.set_ylim(0, 1)


def plot_check(record: Mapping[str, Any], picture: Path) -> None:
    """Plot a corpus check: what becomes of records, how long rows are, what a draft vocabulary covers."""
    with _panels(picture, 3, (16, 4.2)) as (records, lengths, vocabulary):
        bars = {
            "kept whole": record["kept"] - record["cut"],
            "kept, cut": record["cut"],
            "too long": record["too_long"],
            "unanswered": record["unanswered"],
            **{f"bad: {reason}": count for reason, count in record["bad"]["by_reason"].items()},
        }
        colours = ["C0", "C9", "C1", "C1", *["C3"] * len(record["bad"]["by_reason"])]
        drawn = records.barh(list(bars), list(bars.values()), color=colours)
        records.bar_label(drawn, fmt="{:,.0f}", fontsize=8, padding=2)
        records.invert_yaxis()
        records.margins(x=0.15)
        label_axes(records, f"what becomes of {record['bad']['read']:,} records", "records")

        histogram = record["lengths"]["histogram"]
        if histogram["rows"]:
            lengths.stairs(histogram["rows"], histogram["edges"], fill=True, color="C0", alpha=0.7)
        lengths.axvline(record["max_length"], color="C3", ls=":", label=f"max_length {record['max_length']:,}")
        share = record["trained_on"] / max(1, record["tokens"])
        title = f"{record['rows']:,} rows, {record['tokens']:,} tokens, {share:.0%} trained on"
        label_axes(lengths, title, "tokens", "rows")

        coverage = record["vocabulary"]["coverage_of"]
        vocabulary.plot([int(size) for size in coverage], [100 * share for share in coverage.values()], "o-")
        vocabulary.set_xscale("log", base=2)
        vocabulary.set_xticks([int(size) for size in coverage], [f"{int(size) // 1000}k" for size in coverage])
        label_axes(vocabulary, "what the most frequent tokens cover", "draft vocabulary", "% of trained tokens")
