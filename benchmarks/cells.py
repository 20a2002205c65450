"""Formats cells of benchmark results."""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def number(value: float | None, spec: str) -> str:
    """A figure, or a dash for None."""
    return "-" if value is None else format(value, spec)


def device_parts(row: Json) -> str:
    """Acceptance length, and milliseconds of captured kernels in a step."""
    device = ", ".join(f"{kind} {ms:.3f}" for kind, ms in row["device_ms"].items())
    return (
        f"length {row['acceptance_length']:.2f}; device ms: {device or '-'}; "
        f"{row['graphs']} graphs, {row['graph_mebibytes']} MiB"
    )


def table(record: Json, line_of: Callable[[Json], str]) -> str:
    """All cells, and notes on missing ones."""
    head = f"\n{record['arguments']['shape']}, {record['device']}, {record['seconds']:.0f} s in all"
    return "\n".join([head, *map(line_of, record["rows"]), *(f"note: {words}" for words in record["notes"])])
