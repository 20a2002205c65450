"""What every command's tables have in common."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def wide_console(width: int, *, highlight: bool = True) -> "Console":
    """For stdout: as wide as the terminal, or as wide as asked for, since a file has no width to fit into."""
    from rich.console import Console

    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(width=width, highlight=highlight)


def titled_table(title: str, headings: Sequence[str]) -> "Table":
    """The first column to the left, all others, being numbers, to the right."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    return table
