"""An evaluation's record as tables for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Record = Mapping[str, Any]


def print_tables(record: Record) -> None:
    """Write every table to stdout."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has no width to fit into
    for table in tables(record):
        console.print(table)
        console.print()


def tables(record: Record) -> Iterator["Table"]:
    """Lengths for every prefix, then, for the first one at the deepest depth, categories and depths."""
    groups = [group for group in record["groups"] if group["measured"]]
    for group in groups:
        yield _lengths(group, compared=len(groups) > 1)
    if groups:
        cells = groups[0]["measured"]
        deepest = max(cell["depth"] for cell in cells)
        yield _categories([cell for cell in cells if cell["depth"] == deepest], deepest)
        yield _depths([cell for cell in cells if cell["depth"] == deepest], deepest)
    if record.get("held_out"):
        yield _held_out(record["held_out"])


def _lengths(group: Record, *, compared: bool) -> "Table":
    plain = group["plain"]
    title = f"acceptance length, {group['prompts']} prompts"
    if group["prefix_tokens"]:
        title += f" behind {group['prefix_tokens']} tokens of other text"
    if group["skipped"]:
        title += f", {group['skipped']} too long and left out"
    title += f"; {_share(plain['looping'], plain['answers'])} of the plain answers loop"
    headings = ["drafter", "depth", "pooled", "by prompt", "no loops", "looping", "estimate", "error"]
    headings += ["same as plain", "margin"]
    table = _table(title, [*headings, "to first prefix"] if compared else headings)
    for cell in group["measured"]:
        estimate = cell["estimate"] or {}
        row = [
            cell["drafter"],
            str(cell["depth"]),
            _number(cell["acceptance_length"]),
            _number(cell["mean_by_answer"]),
            _number(cell["without_loops"]["acceptance_length"]),
            _share(cell["looping"], cell["answers"]),
            _number(estimate.get("acceptance_length")),
            _percent(cell["estimate_difference"], sign=True),
            f"{cell['identical']} of {cell['answers']}",
            _number(cell["largest_margin"]),
        ]
        table.add_row(*row, *([_percent(cell["ratio_to_first_prefix"])] if compared else []))
    return table


def _categories(cells: Sequence[Record], depth: int) -> "Table":
    table = _table(f"by category, depth {depth}", ["category", "answers", *(cell["drafter"] for cell in cells)])
    for label in sorted({label for cell in cells for label in cell["by_category"]}):
        own = [cell["by_category"].get(label, {}) for cell in cells]
        answers = max(part.get("answers", 0) for part in own)
        table.add_row(label, str(answers), *(_number(part.get("acceptance_length")) for part in own))
    return table


def _depths(cells: Sequence[Record], depth: int) -> "Table":
    title = f"accepted with all before it at depth {depth}, in brackets where all before it were"
    table = _table(title, ["drafter", *(str(k + 1) for k in range(depth))])
    for cell in cells:
        pairs = zip(cell["acceptance_by_depth"], cell["acceptance_by_depth_given_all_before"], strict=True)
        table.add_row(cell["drafter"], *(f"{_percent(share)} ({_percent(given)})" for share, given in pairs))
    return table


def _held_out(held_out: Record) -> "Table":
    found = held_out["estimates"]
    depths = list(dict.fromkeys(one["depth"] for one in found))
    title = f"estimated on the {held_out['conversations']} conversations as they stand"
    table = _table(title, ["drafter", *(f"depth {depth}" for depth in depths)])
    for name in dict.fromkeys(one["drafter"] for one in found):
        own = {one["depth"]: one["acceptance_length"] for one in found if one["drafter"] == name}
        table.add_row(name, *(_number(own[depth]) for depth in depths))
    return table


def _table(title: str, headings: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.1%}" if sign else f"{value:.1%}"


def _share(part: int, whole: int) -> str:
    return _percent(part / whole if whole else None)
