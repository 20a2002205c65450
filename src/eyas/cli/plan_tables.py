"""Prints a plan's record, and that of `eyas plan --train`."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eyas.cli.terminal import wide_console
from eyas.plan.memory import size

if TYPE_CHECKING:
    from rich.table import Table

    from eyas.plan.training import TrainingFigure, TrainingPlan

Record = Mapping[str, Any]


def print_forecast(record: Record) -> None:
    """Print everything; command lines last and unbroken, to be copied."""
    console = wide_console(120, highlight=False)
    for line in _header(record):
        console.print(line, markup=False)
    console.print(_memory(record))
    console.print(record["verdict"], markup=False)
    for change in record["changes"]:
        console.print(f"changed   {change}", markup=False)
    half = f"{record['asked']['context'] // 2:,}"
    console.print(f"milliseconds of a step, tokens/s of all users, speedup; at {half} tokens each", markup=False)
    console.print(_speeds(record))
    for line in _how_fast(record):
        console.print(line, markup=False)
    for line in _advice(record):
        console.print(line, markup=False)
    if "calibration" in record:
        console.print(_errors(record["calibration"]), markup=False)
        console.print(_calibration(record["calibration"]))
    for note in record["notes"]:
        console.print(f"note      {note}", markup=False)
    for command in record["commands"]:
        console.print(command, markup=False, soft_wrap=True)


def _header(record: Record) -> Iterator[str]:
    target, drafter, card = record["target"], record["drafter"], record["card"]
    active = target["active_parameters"]
    count = f"{_count(target['parameters'])} weights"
    if active < target["parameters"]:
        count += f", {_count(active)} of them for a token"
    kept = record["quantisation"]
    bits = f"{kept['name']} ({kept['bits_per_weight']:.3g} bits)"
    yield f"target    {target['source']}: {target['model_type']}, {count}, {bits}"
    if drafter is None:
        yield "drafter   none"
    else:
        yield f"drafter   {drafter['name']}: {drafter['family']}" + (", usual shape" if drafter["assumed"] else "")
    count = f"{card['count']} x " if card["count"] > 1 else ""
    yield (
        f"card      {count}{card['name']}: {size(card['memory_bytes'])}, "
        f"{card['bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s, {card['flops_per_second'] / 1e12:,.3g} TFLOPS"
    )
    yield f"accepted  {record['acceptance']['source']}"


def _memory(record: Record) -> "Table":
    memory, asked = record["memory"], record["asked"]
    tokens = asked["users"] * asked["context"]
    title = "memory" if record["card"]["count"] == 1 else "memory of each card"
    table = _explained_table(title, "bytes")
    said = record["formulas"]
    table.add_row("target's weights", size(memory["weights"]), said["weights"])
    table.add_row("drafter's weights", size(memory["drafter"]), said.get("drafter", ""))
    rows = (("kv_per_token", "target's keys and values"), ("drafter_kv_per_token", "drafter's keys and values"))
    kind = "" if record["kv_cache_dtype"] == "auto" else f", in {record['kv_cache_dtype']}"
    for key, what in rows:
        how = f"{asked['users']} users x {asked['context']:,} tokens x {memory[key] / 1024:,.1f} KiB{kind}"
        how += f": {said[key]}" if key in said else ""
        table.add_row(what, size(tokens * memory[key]), how)
    table.add_row("buffers of steps", size(memory["recorded"]), said["recorded"])
    table.add_row("activations", size(memory["working"]), said["working"])
    table.add_row("runtime", size(memory["runtime"]), said.get("runtime", "none"))
    table.add_row("together", size(memory["needed"]), f"of {size(memory['usable'])}: {said['needed']}", style="bold")
    return table


def _speeds(record: Record) -> "Table":
    from rich.table import Table

    rows = record["expected"]
    users = list(dict.fromkeys(one["users"] for one in rows))
    at = {(one["users"], one["depth"]): one for one in rows}
    table = Table()
    table.add_column("depth")
    table.add_column("tokens a round", justify="right")
    for count in users:
        table.add_column(f"{count} user{'s' if count > 1 else ''}", justify="right")
    for depth in dict.fromkeys(one["depth"] for one in rows):
        cells = [at[count, depth] for count in users]
        table.add_row(
            str(depth) if depth else "plain",
            f"{cells[0]['length']:.2f}",
            *(f"{_ms(one['step_seconds'])}  {one['tokens_per_second']:,.0f}  {one['speedup']:.2f}x" for one in cells),
        )
    return table


def _how_fast(record: Record) -> Iterator[str]:
    """Yield the formulas of the speeds."""
    said, depth, users = record["formulas"], record["recommended_depth"], record["asked"]["users"]
    yield f"step      plain, {users} users: {said['step']}"
    if depth:
        yield f"step      depth {depth}: {said['drafting_step']}"
        yield f"round     depth {depth}: {said['length']} tokens"
    yield f"tokens/s  {said['tokens_per_second']}" + (f"; speedup {said['speedup']}" if depth else "")


def _advice(record: Record) -> Iterator[str]:
    users, depth, blocks = record["asked"]["users"], record["recommended_depth"], record["kv_blocks"]
    if record["drafter"] is not None and depth:
        yield (
            f"depth     {depth} for {users} users: {record['recommended_speedup']:.2f}x expected; eyas on auto "
            f"{record['auto_speedup']:.2f}x"
        )
    elif record["drafter"] is not None:
        yield f"depth     none for {users} users: drafts would not pay"
    if blocks is not None:
        yield (
            f"blocks    {blocks['blocks']:,} of {blocks['block_size']} tokens, {size(blocks['bytes'])}; room for "
            f"{record['users_fit']:,} users of {record['asked']['context']:,} tokens: {record['formulas']['users_fit']}"
        )
    yield (
        f"context   {record['longest_context']:,} tokens at most for {users} users; a prompt of "
        f"{record['asked']['context'] // 2:,} is read in {_ms(record['prompt_seconds'])} ms"
    )


def _errors(found: Record) -> str:
    told = "each measured step told from the others: "
    told += f"{found['mean_error']:.1%} off, {found['worst_error']:.1%} at worst"
    if found["mean_speedup_error"] is not None:
        told += f"; speedups {found['mean_speedup_error']:.1%}, {found['worst_speedup_error']:.1%} at worst"
    return told


def _calibration(found: Record) -> "Table":
    from rich.table import Table

    table = Table()
    for heading in ("users", "depth", "step, ms", "predicted", "off", "speedup", "predicted", "off"):
        table.add_column(heading, justify="right")
    for one in found["steps"]:
        gains = ["-"] * 3
        if one["speedup"] is not None:
            gains = [f"{one['speedup']:.2f}x", f"{one['predicted_speedup']:.2f}x", f"{one['speedup_error']:+.1%}"]
        table.add_row(
            str(one["users"]),
            f"{one['depth']:.3g}",
            _ms(one["seconds"]),
            _ms(one["predicted_seconds"]),
            f"{one['error']:+.1%}",
            *gains,
        )
    return table


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _explained_table(title: str | None, unit: str) -> "Table":
    """A table of figures, each with its formula."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column(unit, justify="right")
    table.add_column("how", overflow="fold")
    return table


def print_training(plan: "TrainingPlan", target: str) -> None:
    """Print the plan of a training run, with the formula of every figure."""

    run, console = plan.run, wide_console(120, highlight=False)
    where = "beside the trainer, on its card" if plan.source == "live" else f"on {plan.servers} servers"
    console.print(f"training  a drafter of {target}, {run.drafter.config.family}, on {run.card.name}", markup=False)
    console.print(f"states    {plan.source}: the target is {where}", markup=False)
    table = _explained_table(None, "")
    for figure in plan.figures:
        table.add_row(figure.name, _figure_words(figure), figure.formula)
    console.print(table)
    hint = "lower --step-tokens, or divide the target over more cards (--tensor-parallel-size)"
    for note in plan.notes:
        console.print(f"note      {note}", markup=False)
    console.print("fits" if plan.fits else f"does not fit: {hint}")


def _figure_words(figure: "TrainingFigure") -> str:
    """A figure's value with its unit."""
    if figure.unit == "bytes":
        return size(figure.value) if figure.value < 2**40 else f"{figure.value / 2**40:,.1f} TiB"
    if figure.unit == "bytes/s":
        return f"{figure.value / 1e9:,.2f} GB/s"
    whole = figure.value >= 100 or figure.value == int(figure.value)
    number = f"{figure.value:,.0f}" if whole else f"{figure.value:.2f}"
    return f"{number} {figure.unit}".strip()
