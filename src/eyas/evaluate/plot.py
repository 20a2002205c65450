"""Plot of an evaluation record: acceptance length by depth, by category and, with prefixes, by prefix length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.reports.plot import label_axes, new_figure

LENGTH = "acceptance length (tokens per check)"


def plot_evaluation(record: Mapping[str, Any], picture: Path) -> None:
    """Draw as PNG."""
    groups = [group for group in record["groups"] if group["measured"]]
    panels = 3 if len(groups) > 1 else 2
    with new_figure(picture, (6 * panels, 4.2)) as figure:
        axes = figure.subplots(1, panels)
        if groups:
            first = groups[0]["measured"]
            names = list(dict.fromkeys(cell["drafter"] for cell in first))
            _plot_depths(axes[0], first, names)
            deepest = max(cell["depth"] for cell in first)
            _plot_categories(axes[1], [cell for cell in first if cell["depth"] == deepest], names, deepest)
            if panels == 3:
                _plot_prefixes(axes[2], groups, names, deepest)


def _plot_depths(axes: Any, cells: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        own = sorted((cell for cell in cells if cell["drafter"] == name), key=lambda cell: cell["depth"])
        for style, lengths, label in (
            (("o-", "s--")[number % 2], [cell["acceptance_length"] for cell in own], name),
            ("o:", [cell["without_loops"]["acceptance_length"] for cell in own], f"{name}, without loops"),
            ("x", [cell["estimate"] and cell["estimate"]["acceptance_length"] for cell in own], f"{name}, estimate"),
        ):
            points = [(cell["depth"], length) for cell, length in zip(own, lengths, strict=True) if length is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set_xticks(sorted({cell["depth"] for cell in cells}))
    label_axes(axes, "acceptance length by depth", "depth (tokens drafted per round)", LENGTH)


def _plot_categories(axes: Any, cells: Sequence[Mapping[str, Any]], names: Sequence[str], depth: int) -> None:
    labels = sorted({label for cell in cells for label in cell["by_category"]})
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        own: Mapping[str, Any] = next((cell["by_category"] for cell in cells if cell["drafter"] == name), {})
        lengths = [own.get(label, {}).get("acceptance_length") or 0 for label in labels]
        places = [place + number * height for place in range(len(labels))]
        axes.barh(places, lengths, height, color=f"C{number}", label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(labels))], labels)
    axes.invert_yaxis()
    label_axes(axes, f"by category at depth {depth}", LENGTH, "category")


def _plot_prefixes(axes: Any, groups: Sequence[Mapping[str, Any]], names: Sequence[str], depth: int) -> None:
    for number, name in enumerate(names):
        points = [
            (group["prefix_tokens"], cell["acceptance_length"])
            for group in groups
            for cell in group["measured"]
            if (cell["drafter"], cell["depth"]) == (name, depth) and cell["acceptance_length"] is not None
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", color=f"C{number}", label=name)
    label_axes(axes, f"behind a prefix, at depth {depth}", "prefix (tokens of unrelated text)", LENGTH)
