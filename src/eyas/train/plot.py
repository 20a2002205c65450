"""A picture of a run: loss, accuracy by depth, and acceptance length on held-out text, from its log."""

from pathlib import Path
from typing import Any

from eyas.errors import UserError
from eyas.train.journal import read_log


def plot_run(log: Path, picture: Path) -> None:
    """Draw the log of a run as PNG."""
    # Without pyplot there is no global state, no window system and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(log)
    names = list(dict.fromkeys(line["drafter"] for line in lines))
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accuracies, lengths = figure.subplots(1, 3)
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
    _label(losses, "loss", "weighted over depths")
    _label(accuracies, "accuracy by depth", "paler is deeper")
    _label(lengths, "acceptance length, held out", "rounds walked as decoding walks them")
    for axes in (losses, lengths):
        if names:
            axes.legend()
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise UserError(f"cannot write {picture}: {error.strerror}; free space and run again") from error


def _label(axes: Any, title: str, note: str) -> None:
    axes.set_title(f"{title}\n({note})", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
