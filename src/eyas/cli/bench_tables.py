"""A bench's record, and a comparison of two, as tables for people."""

from collections.abc import Mapping
from typing import Any

from eyas.cli.tables import titled_table, wide_console

Record = Mapping[str, Any]


def print_bench(record: Record) -> None:
    """Write the table, then what to mind, to stdout."""
    from eyas.bench.measures import row_label

    console = wide_console(200)
    workload, plan = record["workload"], record["plan"]
    title = (
        f"{workload['conversations']} conversations, {plan['max_tokens']} tokens at temperature "
        f"{plan['temperature']:g}, medians of {plan['repetitions']}"
    )
    heads = ["server, mode, load", "tokens/s", "of a user", "x plain", "first token ms", "per token ms", "chunk gap ms"]
    table = titled_table(title, [*heads, "length", "by depth", "same text", "failed"])
    for row in record["rows"]:
        against, same, found = row["against_plain"], row["same_as_plain"], row["acceptance"]
        ratio = against and against["user_tokens_per_second"]
        table.add_row(
            row_label(row) + ("" if row["whole"] else " (partial)"),
            _spread(row["tokens_per_second"]),
            _spread(row["user_tokens_per_second"]),
            f"{ratio['median']:.2f}" if ratio else "-",
            *(_tail(row[key]) for key in ("time_to_first_token_ms", "time_per_output_token_ms", "chunk_gap_ms")),
            "-" if found["length"] is None else f"{found['length']:.2f}",
            " ".join(f"{share:.2f}" for share in found["by_depth"]) or "-",
            f"{same['same']} of {same['of']}" if same else "-",
            str(row["failed"]),
        )
    console.print(table)
    console.print("tokens/s with the lowest and highest repetition; times are p50 / p95; docs/bench.md has formulas")
    for row in record["rows"]:
        found = row["acceptance"]
        if suffix := found.get("suffix_accepted_tokens"):
            told = f"{row_label(row)}: {suffix:,} of {found['accepted_tokens']:,} accepted tokens were suffix drafts"
            console.print(told, markup=False, highlight=False)
    share = max((row["client"]["cpu_share"] for row in record["rows"]), default=0.0)
    console.print(f"the client used {share:.0%} of a core at most")
    for warning in record["warnings"]:
        console.print(f"mind  {warning}", style="yellow", soft_wrap=True, markup=False, highlight=False)


def print_comparison(found: Record, before: str, after: str) -> None:
    """Write the table, then what makes the two hard to compare."""
    from eyas.bench.measures import row_label

    console = wide_console(200)
    heads = [
        "server, mode, load",
        "tokens/s",
        "ratio",
        "of a user",
        "ratio",
        "first token ms",
        "per token ms",
        "length",
    ]
    table = titled_table(f"{before} → {after}", heads)
    for row in found["rows"]:
        table.add_row(
            row_label(row),
            *_change(row["tokens_per_second"]),
            *_change(row["user_tokens_per_second"]),
            *(_pair(row[key]) for key in ("time_to_first_token_ms", "time_per_output_token_ms", "acceptance_length")),
        )
    console.print(table)
    console.print("* beyond the spread of the repetitions of either; times are medians")
    same = found["same_texts"]
    if same["of"]:
        console.print(f"{same['same']} of {same['of']} answers have the same text in both")
    for words in found["differences"]:
        console.print(f"mind  {words}", style="yellow", soft_wrap=True, markup=False, highlight=False)


def _spread(found: Record | None) -> str:
    return f"{found['median']:.1f} ({found['low']:.1f}..{found['high']:.1f})" if found else "-"


def _tail(found: Record) -> str:
    return "-" if found["p50"] is None else f"{found['p50']:.0f} / {found['p95']:.0f}"


def _change(found: Record | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return (
        f"{found['before']:.1f} → {found['after']:.1f}",
        f"{found['ratio']:.2f}{'*' if found['beyond_spread'] else ''}",
    )


def _pair(found: Record) -> str:
    if found["before"] is None and found["after"] is None:
        return "-"
    return " → ".join("-" if value is None else f"{value:.4g}" for value in (found["before"], found["after"]))
