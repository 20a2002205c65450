"""`eyas train`: from a recipe to a drafter that servers load."""

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.options import AsJson, CacheOptions, command
from eyas.cli.stop import StopRequest
from eyas.cli.terminal import LOGGER, Ticker, report

if TYPE_CHECKING:
    from rich.live import Live

    from eyas.train.estimate import RoundCounts
    from eyas.train.loop import TrainMetrics
    from eyas.train.ranks import Ranks
    from eyas.train.recipe import Recipe


@command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file, see recipes/ and docs/training.md.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Set a value of the recipe: train.lr=1e-3. Repeatable.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="The recipe's target.quantization: none, auto, gguf, int8, int4, fp8.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in output.folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
    *,
    kept: CacheOptions,
    as_json: AsJson = False,
) -> None:
    """Train drafters as a recipe says.

    Ctrl-C saves and stops after the step under way; --resume goes on as if nothing had happened, or on to a later end
    (--set train.steps=...). Several processes (torchrun) share the work of every step.
    """
    from eyas.train.recipe_file import load_recipe, to_toml

    quantized = [] if quantization is None else [f"target.quantization={quantization}"]
    chosen = load_recipe(recipe, [*(overrides or []), *quantized])
    if dry_run:
        typer.echo(to_toml(chosen))
        return
    with StopRequest() as stop:
        from eyas.train.ranks import Ranks

        ranks = Ranks.join()
        if ranks.is_main:
            report(to_toml(chosen))
        else:  # what all processes would log is logged once
            LOGGER.setLevel(logging.WARNING)
        try:
            _train(chosen, ranks, stop, resume=resume, as_json=as_json, cache=kept.cache)
        finally:
            ranks.leave()


def _train(
    recipe: "Recipe", ranks: "Ranks", stop: StopRequest, *, resume: bool, as_json: bool, cache: Path | None
) -> None:
    from eyas.target.facts import read_facts
    from eyas.train import load_target
    from eyas.train.journal import open_tracker
    from eyas.train.preflight import check_run
    from eyas.train.run import run

    folder = Path(recipe.output.folder)
    facts = read_facts(recipe.target.source, cache=cache)
    check_run(recipe, facts, processes=ranks.world, resuming=resume)
    trackers = [open_tracker(name, folder, recipe.resolved()) for name in recipe.output.trackers if ranks.is_main]
    tick = Ticker()
    with (
        load_target.open_training_target(recipe, ranks, stop.asked, cache) as (parts, open_source, source_record),
        TrainScreen(shown=ranks.is_main) as screen,
    ):
        outcome = run(
            recipe,
            parts,
            open_source,
            source_record=source_record,
            observers=[screen, *trackers],
            ranks=ranks,
            stop=stop.asked,
            on_first_step=stop.saves_from_now_on,
            resuming=resume,
            on_encoded=lambda progress: tick(str(progress), at_once=not progress.conversations),
            cache=cache,
        )
    if not ranks.is_main:
        return
    if not outcome.finished:
        report(f"stopped at step {outcome.step} of {outcome.length}; `eyas train ... --resume` goes on from there")
        raise typer.Exit(130)
    if as_json:
        typer.echo((folder / "record.json").read_text())
        return
    held_out = json.loads((folder / "record.json").read_text())["held_out"]
    for name, place in outcome.drafters.items():
        length = f", acceptance length {held_out[name]['acceptance_length']:.2f} held out" if name in held_out else ""
        typer.echo(f"{name}: {place}{length}")
    typer.echo(f"log, plot and record: {folder}")
    say_what_next(recipe.target.source, str(next(iter(outcome.drafters.values()))))


def say_what_next(target: str, drafter: str) -> list[str]:
    """Print the commands that measure and serve a drafter; return the arguments of the latter."""
    typer.echo("measure it: " + shlex.join(["eyas", "eval", "PROMPTS.jsonl", "--target", target, "--drafter", drafter]))
    config = json.dumps({"model": drafter, "method": "eagle3"})
    served = ["serve", target, "--speculative-config", config]
    typer.echo("serve it: " + shlex.join(["eyas", *served]))
    return served


class TrainScreen:
    """Shows metrics as a live table where there is a terminal, as lines where there is none."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._live: Live | None = None
        self._lengths: dict[str, str] = {}

    def __enter__(self) -> "TrainScreen":
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def progressed(self, progress: "TrainMetrics") -> None:
        of = "" if progress.length.steps is None else f"/{progress.length.steps}"
        left = progress.seconds_left
        head = f"step {progress.step}{of}  {progress.tokens_per_second:,.0f} tokens/s"
        if left is not None:
            head += f"  {left // 60:.0f} min {left % 60:.0f} s left"
        if self._live is None:
            for name, own in progress.drafters.items():
                accuracy = " ".join(f"{value:.3f}" for value in own.accuracy)
                report(f"{head}  {name}: loss {own.loss:.4f}  accuracy {accuracy}{self._lengths.get(name, '')}")
            return
        from rich.table import Table

        table = Table(title=head, title_justify="left")
        for column in ("drafter", "loss", "gradient", "accuracy by depth", "held out"):
            table.add_column(column)
        for name, own in progress.drafters.items():
            accuracy = " ".join(f"{value:.3f}" for value in own.accuracy)
            table.add_row(name, f"{own.loss:.4f}", f"{own.gradient_norm:.3g}", accuracy, self._lengths.get(name, ""))
        self._live.update(table)

    def estimated(self, step: int, counts: "dict[str, RoundCounts]") -> None:
        self._lengths = {name: f"  length {own.acceptance_length:.3f}" for name, own in counts.items()}
        if self._live is None and self._shown:
            for name, own in counts.items():
                report(f"step {step}  {name}: estimated acceptance length {own.acceptance_length:.3f} on held-out text")

    def saved(self, step: int, place: Path) -> None:
        if self._live is None and self._shown:
            report(f"saved {place}")
