"""An examination's record as tables and sentences for people."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eyas.cli.tables import titled_table, wide_console

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Record = Mapping[str, Any]

_STYLES = {"fault": "bold red", "warning": "yellow", "unknown": "magenta", "note": "blue", "healthy": "green"}
_DECIDED = {"ship": "bold green", "do_not_ship": "bold red", "cannot_tell": "bold magenta"}
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)


def print_record(record: Record) -> None:
    """Write the decision, tables, then the verdict, to stdout."""
    console = wide_console(160)
    for name, own in record["drafters"].items():
        console.print(_decision(name, own["decision"], several=len(record["drafters"]) > 1), soft_wrap=True)
    measured = {name: own for name, own in record["drafters"].items() if own["drift"]}
    for name, own in measured.items():
        console.print(_drift(name, own))
    if record["cases"]:
        console.print(_matrix(record))
    for name, own in record["drafters"].items():
        for line in _verdict(name, own):
            console.print(line, soft_wrap=True)
    for gate in record["gates"]:
        style = "green" if gate["passed"] else "bold red"
        console.print(f"{'holds' if gate['passed'] else 'FAILS'}  {gate['gate']}: {gate['reason']}", style=style)


def _decision(name: str, decision: Record, *, several: bool) -> "Text":
    from rich.text import Text

    return Text(f"{name}: {decision['text']}" if several else decision["text"], style=_DECIDED[decision["outcome"]])


def _drift(name: str, own: Record) -> "Table":
    drift = own["drift"]
    depths = [depth for depth in _SHOWN if depth <= drift["depth"]]
    title = f"{name} ({own['family']}): {drift['prompts']} prompts, {drift['rounds']} rounds to depth {drift['depth']}"
    table = titled_table(title, ["by depth", *map(str, depths), "slope per depth"])
    rows = {
        "acceptance length": ([one["value"] for one in drift["length"]], None, "{:.2f}"),
        "conditional acceptance": (drift["conditional"]["value"], drift["conditional"]["slope"], "{:.0%}"),
        "joint acceptance": (drift["joint"]["value"], drift["joint"]["slope"], "{:.0%}"),
        "RMS fed back": (drift["rms"]["value"], drift["growth"], "{:.3g}"),
        **{
            f"attention on {region}": (curve["value"], curve["slope"], "{:.3f}")
            for region, curve in drift["mass"].items()
        },
        "attention spread": (drift["spread"]["value"], drift["spread"]["slope"], "{:.3f}"),
    }
    for label, (values, slope, form) in rows.items():
        cells = ["-" if values[k - 1] is None else form.format(values[k - 1]) for k in depths]
        table.add_row(label, *cells, _slope(slope, relative=label == "RMS fed back"))
    return table


def _matrix(record: Record) -> "Table":
    names = list(record["drafters"])
    table = titled_table(
        "acceptance length under other conditions, and what is kept of the unperturbed one", ["condition"]
    )
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("kept", justify="right")
    table.add_column("prompts", justify="right")
    for case in record["cases"]:
        if case["left_out"]:
            table.add_row(case["name"], f"left out: {case['left_out']}")
            continue
        cells = []
        for name in names:
            cell = list(case["cells"][name].values())[-1]
            cells += [_number(cell["length"]), _percent(cell["kept"]["value"])]
        table.add_row(case["name"], *cells, str(case["prompts"]))
    return table


def _verdict(name: str, own: Record) -> Iterator["Text"]:
    from rich.text import Text

    verdict = own["verdict"]
    yield Text(f"\n{name}: recommended depth {verdict['recommended_depth']}", style="bold")
    for statement in verdict["statements"]:
        text = Text(f"  {statement['level']:8} ", style=_STYLES[statement["level"]])
        text.append(statement["text"], style="default")
        if statement["cause"] and statement["cause"] != statement["text"]:
            text.append(f"; likely cause: {statement['cause']}", style="default")
        if statement["evidence"]:
            text.append(f"\n           {'; '.join(statement['evidence'])}", style="dim")
        if statement["advice"]:
            text.append(f"\n           do: {statement['advice']}", style="default")
        yield text


def _slope(slope: Record | None, *, relative: bool) -> str:
    if slope is None or slope["value"] is None:
        return "-"
    form = "{:+.1%}" if relative else "{:+.4f}"
    return f"{form.format(slope['value'])} ({form.format(slope['low'])} .. {form.format(slope['high'])})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
