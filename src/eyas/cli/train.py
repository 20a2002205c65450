"""`eyas train`: from a recipe to a drafter that servers load."""

import functools
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.log import LOGGER
from eyas.cli.options import AsJson, Cache, Ticker, report
from eyas.cli.stop import StopRequest

if TYPE_CHECKING:
    from rich.live import Live

    from eyas.target.model import Target
    from eyas.target.parts import TargetParts
    from eyas.train.estimate import RoundCounts
    from eyas.train.features import OpenSource
    from eyas.train.loop import TrainMetrics
    from eyas.train.ranks import Ranks
    from eyas.train.recipe import Recipe


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
    as_json: AsJson = False,
    cache: Cache = None,
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
        ranks = _join_ranks()
        if ranks.is_main:
            report(to_toml(chosen))
        try:
            _train(chosen, ranks, stop, resume=resume, as_json=as_json, cache=cache)
        finally:
            ranks.leave()


def _train(
    recipe: "Recipe", ranks: "Ranks", stop: StopRequest, *, resume: bool, as_json: bool, cache: Path | None
) -> None:
    from eyas.target.facts import read_facts
    from eyas.train.preflight import check_run
    from eyas.train.run import run
    from eyas.train.trackers import open_tracker

    folder = Path(recipe.output.folder)
    facts = read_facts(recipe.target.source, cache=cache)
    check_run(recipe, facts, processes=ranks.world, resuming=resume)
    trackers = [open_tracker(name, folder, recipe.resolved()) for name in recipe.output.trackers if ranks.is_main]
    tick = Ticker()
    with (
        _open_target(recipe, ranks, stop, cache) as (parts, open_source, source_record),
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
    _say_what_next(recipe, outcome.drafters)


def _say_what_next(recipe: "Recipe", drafters: dict[str, Path]) -> None:
    """The commands that measure and serve what was trained; of several drafters, the first."""
    target, drafter = recipe.target.source, str(next(iter(drafters.values())))
    typer.echo("measure it: " + shlex.join(["eyas", "eval", "PROMPTS.jsonl", "--target", target, "--drafter", drafter]))
    config = json.dumps({"model": drafter, "method": "eagle3"})
    typer.echo("serve it: " + shlex.join(["eyas", "serve", target, "--speculative-config", config]))


@contextmanager
def _open_target(
    recipe: "Recipe", ranks: "Ranks", stop: StopRequest, cache: Path | None
) -> "Iterator[tuple[TargetParts, OpenSource, Callable[[], dict[str, Any]]]]":
    """What training needs of the target, what computes its states, and what there is to record of that."""
    from eyas.target.parts import TargetParts

    if not recipe.features.servers:
        from eyas.train.sources.live import LiveSource

        target = load_training_target(recipe, ranks, cache)
        yield TargetParts.of(target), functools.partial(LiveSource, target, chunk=recipe.train.chunk), dict
        return
    from eyas.train.preflight import layers_read
    from eyas.train.served.open import open_served, states_server

    parts = TargetParts.load(
        recipe.target.source,
        dtype=recipe.target.dtype,
        device=choose_training_device(recipe.target.device),
        cache=cache,
        chat_format=recipe.target.chat_format(),
    )
    layer_ids = layers_read(recipe, parts.facts)
    with open_served(recipe, parts, layer_ids, ranks=ranks, stop=stop.asked) as open_source:
        if ranks.is_main:
            line = states_server(recipe, layer_ids, parts.facts.num_hidden_layers, cache).line()
            report(f"states come from {', '.join(recipe.features.servers)}; such a server is started by: {line}")
        yield parts, open_source, open_source.record


def load_training_target(recipe: "Recipe", ranks: "Ranks", cache: Path | None) -> "Target":
    """Load the target, where weights pass through the host's memory one process of a machine after the other."""
    from eyas.loading import load_target
    from eyas.target.model import Target, loads_onto_device

    device = choose_training_device(recipe.target.device)

    def load() -> Target:
        if recipe.target.quantization != "none":
            return load_target(
                recipe.target.source,
                dtype=recipe.target.dtype,
                device=device,
                quantization=recipe.target.quantization,
                cache=cache,
                chat_format=recipe.target.chat_format(),
            )
        return Target.load(
            recipe.target.source,
            dtype=recipe.target.dtype,
            device=device,
            quantization="none",
            spread=recipe.target.spread,
            cache=cache,
            chat_format=recipe.target.chat_format(),
        )

    if ranks.world == 1 or device == "cpu" or loads_onto_device():
        return load()
    report("accelerate is not installed: the processes load the target one after another, through the host's memory")
    loaded = None
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world)))):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            loaded = load()
        ranks.barrier()
    assert loaded is not None
    return loaded


class TrainScreen:
    """A table that is drawn over where there is a terminal, and lines where there is none."""

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


def _join_ranks() -> "Ranks":
    from eyas.train.ranks import Ranks

    ranks = Ranks.join()
    if not ranks.is_main:  # what all of them would say is said once
        LOGGER.setLevel(logging.WARNING)
    return ranks


def choose_training_device(asked: str) -> str:
    """The device of this process, where a recipe says auto: its own GPU, or the CPU."""
    import torch

    if asked != "auto":
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local)
    return f"cuda:{local}"
