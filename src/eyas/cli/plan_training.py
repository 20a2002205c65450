"""`eyas plan --train`: what training a drafter takes, printed with the formula of every figure."""

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from eyas.cli.tables import wide_console
from eyas.errors import UserError
from eyas.plan.memory import size

if TYPE_CHECKING:
    from eyas.plan.training import TrainingFigure, TrainingPlan

FORMAT = "eyas-train-plan-1"
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def read_tokens(text: str) -> float:
    """Tokens as people write them: 500M, 2.5B, 100000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbgt]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise UserError(f"--train {text!r} is no number of tokens such as 500M")
    return float(found[1]) * SUFFIXES[found[2]]


def training_record(plan: "TrainingPlan", target: str) -> dict[str, Any]:
    """Everything that was found, as JSON."""
    run = plan.run
    return {
        "format": FORMAT,
        "target": target,
        "card": run.card.name,
        "tokens": run.tokens,
        "trainers": run.trainers,
        "states": plan.source,
        "servers": plan.servers,
        "nodes": plan.nodes,
        "memory": plan.memory,
        "tokens_per_second": plan.tokens_per_second,
        "hours": plan.hours,
        "fits": plan.fits,
        "notes": plan.notes,
        "figures": [asdict(figure) for figure in plan.figures],
    }


def print_training(plan: "TrainingPlan", target: str) -> None:
    """As a table."""
    from rich.table import Table

    run, console = plan.run, wide_console(120, highlight=False)
    where = "beside the trainer, on its card" if plan.source == "live" else f"on {plan.servers} servers"
    console.print(f"training  a drafter of {target}, {run.drafter.config.family}, on {run.card.name}", markup=False)
    console.print(f"states    {plan.source}: the target is {where}", markup=False)
    table = Table()
    table.add_column("what")
    table.add_column("", justify="right")
    table.add_column("how", overflow="fold")
    for figure in plan.figures:
        table.add_row(figure.name, figure_words(figure), figure.formula)
    console.print(table)
    hint = "lower --step-tokens, or divide the target over more cards (--tensor-parallel-size)"
    for note in plan.notes:
        console.print(f"note      {note}", markup=False)
    console.print("fits" if plan.fits else f"does not fit: {hint}")


def figure_words(figure: "TrainingFigure") -> str:
    """Its value for people."""
    if figure.unit == "bytes":
        return size(figure.value) if figure.value < 2**40 else f"{figure.value / 2**40:,.1f} TiB"
    if figure.unit == "bytes/s":
        return f"{figure.value / 1e9:,.2f} GB/s"
    whole = figure.value >= 100 or figure.value == int(figure.value)
    number = f"{figure.value:,.0f}" if whole else f"{figure.value:.2f}"
    return f"{number} {figure.unit}".strip()
