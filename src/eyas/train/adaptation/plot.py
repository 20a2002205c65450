"""A picture of an adaptation: acceptance by depth before and after, on the traffic and on what is replayed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_adaptation(changes: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """Draw the changes of a record as PNG."""
    # Without pyplot there is no global state, no window system and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(changes), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(changes), squeeze=False)[0]
    for axes, (name, change) in zip(panels, changes.items(), strict=True):
        for when, style in (("before", "o--"), ("after", "s-")):
            shares = change[when]["conditional"]
            known = [(depth, share) for depth, share in enumerate(shares, start=1) if share is not None]
            length = change[when]["acceptance_length"]
            axes.plot(*zip(*known, strict=True), style, label=f"{when}: {length:.2f} tokens per verification")
        gain = change["gain"]
        title = f"{name}, {change['conversations']} conversations held out"
        axes.set_title(f"{title}\n{gain['value']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})", fontsize=10)
        axes.set_xlabel("depth")
        axes.set_ylabel("accepted, given all before it were")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)
