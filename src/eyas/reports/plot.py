"""Plots as PNG files: a matplotlib figure without a window system, and the labels that all panels share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import UserError


@contextmanager
def new_figure(path: Path, size: tuple[float, float], *, dpi: int = 120) -> Iterator[Any]:
    """Yield a matplotlib figure of `size` inches; it is written to `path` when the block ends without an error."""
    # pyplot would keep global state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; free space and run again") from error


def label_axes(axes: Any, title: str, across: str, up: str = "") -> None:
    """Set title and axis labels, draw a grid, and a legend if a series has a label."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
