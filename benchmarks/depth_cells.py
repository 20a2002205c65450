"""Prints the simulated cells by which the depth policy is judged, with and without each of its mechanisms.

    python benchmarks/depth_cells.py                     all cells, and what the bars say of them
    python benchmarks/depth_cells.py --without           worst and median of every kind of cells, mechanism by mechanism
    python benchmarks/depth_cells.py --without "looks"   all cells with and without one mechanism

No model is loaded: machines, users and acceptances are made of numbers (`tests/engine/depth_cells.py`). A run of all
cells takes some minutes on one core.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from statistics import median
from unittest.mock import PropertyMock, patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from engine import depth_cells as cells
from engine.depth_cells import Cell
from eyas.engine.speculation.choice import Purpose

PACKAGE = "eyas.engine.speculation"
MECHANISMS = {
    "looks": lambda: patch(f"{PACKAGE}.controller.Controller._look", lambda *_: None),
    "probes": lambda: patch(f"{PACKAGE}.controller.Controller._probe", lambda *_: None),
    "fading": lambda: patch(f"{PACKAGE}.acceptance.MEMORY", 1e9),
    "change test": lambda: patch(f"{PACKAGE}.acceptance.SURPRISE", inf),
    "trust in drafts that were accepted": lambda: patch(
        f"{PACKAGE}.acceptance.Acceptance.proven", new_callable=PropertyMock, return_value=False
    ),
    "limit of a spell's losses": lambda: patch(
        f"{PACKAGE}.probes.Account.overdrawn", new_callable=PropertyMock, return_value=False
    ),
    "savings put by": lambda: patch(f"{PACKAGE}.probes.PUT_BY", 0.0),
    "parts of the balance": lambda: patch(f"{PACKAGE}.probes.AT_ONCE", 1.0),
    "early steps": lambda: patch(f"{PACKAGE}.step_times.EARLY", 0.0),
    "old times dropped": lambda: patch(f"{PACKAGE}.step_times.MEMORY", inf),
    "lateness of plain steps": lambda: patch(f"{PACKAGE}.step_times.StepTimes._late", lambda *_: 0.0),
    "larger rehearsed steps": lambda: patch(f"{PACKAGE}.step_times._mended", lambda steps, rows, arm: steps[rows, arm]),
    "charge for reading": lambda: patch(
        f"{PACKAGE}.controller.Purpose", lambda **given: Purpose(**given | {"backlog": False})
    ),
    "trees": lambda: patch.object(cells.device, "WITH_TREES", cells.SHAPES),
}


def run_cells() -> Iterator[Cell]:
    """Simulate all cells."""
    yield from cells.host_cells(rehearsed=False)
    yield from cells.host_cells(rehearsed=True)
    yield from cells.late_cells()
    yield from cells.device_cells()
    yield from cells.short_cells()
    yield from cells.tree_cells()
    yield from cells.changing_cells()


@contextmanager
def without(name: str) -> Iterator[None]:
    """The policy without one of its mechanisms."""
    with ExitStack() as stack:
        stack.enter_context(MECHANISMS[name]())
        yield


def summary(made: list[Cell]) -> dict[str, str]:
    """By kind, the worst and the median."""
    told = {}
    for kind in dict.fromkeys(cell.kind for cell in made):
        plain = [cell.of_plain for cell in made if cell.kind == kind]
        best = [cell.of_best for cell in made if cell.kind == kind]
        lost = max((cell.lost for cell in made if cell.kind == kind and cell.useless), default=0.0)
        told[kind] = f"plain {min(plain):.3f} {median(plain):.3f}  best {min(best):.3f} {median(best):.3f}" + (
            f"  lost {lost:.2f}" if kind.startswith("short") else ""
        )
    return told


def bars(made: list[Cell]) -> Iterator[tuple[str, float, float, bool]]:
    """Bars with their values, and whether they hold."""
    long = [cell for cell in made if cell.kind in ("host", "host rehearsed", "device")]
    short = [cell for cell in made if cell.kind.startswith("short")]
    good = [cell.of_best for cell in short if not cell.useless and int(cell.name.split(", ")[1]) >= 128]
    for name, value, bar in (
        ("worst against plain", min(cell.of_plain for cell in long), 0.97),
        ("median against plain", median(cell.of_plain for cell in long), 1.0),
        ("worst useless drafter", min(cell.of_plain for cell in long if cell.useless), 0.98),
        ("worst against the best fixed depth", min(cell.of_best for cell in long), 0.88),
        ("median against the best fixed depth", median(cell.of_best for cell in long), 0.98),
        ("short requests, good drafter, from 128 tokens on", min(good), 0.9),
    ):
        yield name, value, bar, value >= bar
    lost = max(cell.lost for cell in short if cell.useless)
    yield "short requests, useless drafter, plain steps lost", lost, 4.0, lost <= 4.0


def main() -> int:
    """Print the tables; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", nargs="?", const="all", choices=["all", *MECHANISMS])
    wanted = parser.parse_args().without
    made = list(run_cells())
    if wanted is None:
        for cell in made:
            print(cell)
        found = list(bars(made))
        for name, value, bar, holds in found:
            print(f"{name:50s} {value:.3f} (bar {bar}) {'' if holds else 'MISSED'}")
        return int(not all(holds for *_, holds in found))
    for name in MECHANISMS if wanted == "all" else [wanted]:
        with without(name):
            less = list(run_cells())
        print(f"without {name}: with | without, worst and median of plain and of the best fixed depth")
        before, after = summary(made), summary(less)
        for kind in before:
            print(f"    {kind:16s} {before[kind]} | {after[kind]}")
        for cell, other in zip(made, less, strict=True):
            if wanted != "all" or abs(other.of_plain - cell.of_plain) > 0.03 * cell.of_plain:
                print(f"    {cell}  | plain {other.of_plain:.3f}  best {other.of_best:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
