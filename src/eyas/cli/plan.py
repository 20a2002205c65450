"""`eyas plan`: what will fit and how fast it will be, before anything is loaded."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.help import CARD, MEMORY, MODEL, OUTPUT, SPECULATION, TRAINING
from eyas.cli.options import AsJson, KVCacheOptions, build, command, load_libraries, options
from eyas.cli.terminal import ProgressDisplay, make_folder, print_result, text_file, write_results
from eyas.errors import UserError
from eyas.target.locate import DEFAULT_TARGET

if TYPE_CHECKING:
    from eyas.plan.calibrate import MachineCalibration
    from eyas.plan.cards import Card
    from eyas.plan.footprint import DrafterShape
    from eyas.plan.measured import Measurements
    from eyas.plan.quantisation import Quantisation

CONTEXT = 8192
"""Tokens of a request unless told, for targets that could hold more; as `eyas serve` has it."""
GPU = "rtx4090"


@options(CARD)
class CardOptions:
    """The device that a plan is for."""

    gpu: Annotated[str | None, Option(show_default=GPU)] = None
    """A card of the table, cpu, or a name of yours."""
    memory: Annotated[float | None, Option(show_default="the card's")] = None
    """Memory in GiB."""
    bandwidth: Annotated[float | None, Option(show_default="the card's")] = None
    """Memory bandwidth in GB/s."""
    tflops: Annotated[float | None, Option(show_default="the card's")] = None
    """Arithmetic of matrix products, in TFLOPS."""
    tensor_parallel_size: Annotated[int, Option(min=1)] = 1
    """Cards that a target is divided over."""
    link: Annotated[float | None, Option(show_default="the card's")] = None
    """GB/s from a card to others, one direction."""
    measured: Path | None = None
    """JSON of a bench on that machine: calibrate with it and print the error."""
    calibrate: Path | None = None
    """Load the pair on this machine, time its steps for a minute, write them to this file and use it as --measured."""

    def find(self, kv_cache_dtype: str) -> "Card":
        """Look the card up; refuse one that cannot compute with such keys and values."""
        from eyas.plan.cards import CARDS, find_card

        if self.calibrate is not None and self.measured is not None:
            raise UserError("--calibrate measures what --measured would read; give one of them")
        described = self.gpu is None and (self.memory, self.bandwidth, self.tflops) != (None, None, None)
        if self.calibrate is not None and self.gpu in (None, "cpu") and not described:
            from eyas.bench.step_times import this_processor

            card = this_processor()
        else:
            name = self.gpu if described or self.gpu is not None else GPU
            card = find_card(name, memory=self.memory, bandwidth=self.bandwidth, tflops=self.tflops, link=self.link)
        if kv_cache_dtype.startswith("fp8") and card.name in CARDS and "fp8" not in CARDS[card.name].flops:
            raise UserError(
                f"--kv-cache-dtype {kv_cache_dtype} needs a card that computes in fp8, which {card.name} does not; "
                "use auto"
            )
        return card


@options(TRAINING)
class TrainingPlanOptions:
    """A training run to plan instead."""

    train: str | None = None
    """Plan training a drafter on so many tokens instead: 500M."""
    trainers: Annotated[int, Option(min=1)] = 1
    """Cards that train."""
    step_tokens: Annotated[int, Option(min=1)] = 32768
    """Tokens of a trainer's step."""
    taught: float = 0.5
    """Share of the tokens that are answers."""
    network: Annotated[float, Option(min=0.001)] = 50.0
    """GB/s of a node to others."""


@options(SPECULATION)
class PlanOptions(KVCacheOptions):
    """What is to be served, and to how many."""

    drafter: Annotated[str | None, Option(show_default="the target's own, if shipped, else the usual shape")] = None
    """A drafter's name, folder or hub id, its config.json, or none."""
    quantization: Annotated[str | None, Option(show_default="as stored", rich_help_panel=MODEL)] = None
    """auto, none, gguf (on a CPU), float32, bfloat16, float16, fp8, int8, int4, int4-g64."""
    context: Annotated[int | None, Option(show_default="the target's, at most 8192", min=2, rich_help_panel=MEMORY)] = (
        None
    )
    """Tokens of prompt and answer."""
    users: Annotated[int, Option(min=1, rich_help_panel=MEMORY)] = 4
    """Answers at the same time."""
    depth: Annotated[int, Option(min=1, max=16)] = 7
    """The deepest drafts to consider."""
    acceptance: str | None = None
    """Share of rounds that accept each position: 0.73,0.52,0.35."""
    length: str | None = None
    """Or tokens per round at a depth: 2.7@3."""
    fit: Annotated[bool, Option("--fit", rich_help_panel=MEMORY)] = False
    """Change what must be changed until it fits."""
    out: Annotated[Path | None, Option(rich_help_panel=OUTPUT)] = None
    """Folder for plan.json and the page plan.html; earlier ones are replaced."""


@command()
def plan(
    target: Annotated[
        str, typer.Argument(help="smollm2, a GGUF file, a folder, a hub id or a config.json.")
    ] = DEFAULT_TARGET,
    *,
    given: PlanOptions,
    chosen: CardOptions,
    training: TrainingPlanOptions,
    as_json: AsJson = False,
) -> None:
    """Say what a target with its drafter takes on a card, who fits, how fast it is and how to start it.

    Nothing is loaded: sizes come from config.json, times from the card's figures. Exit code 1 means it does not fit.
    """
    from eyas.cli.plan_tables import print_forecast
    from eyas.plan import request
    from eyas.plan.decoder import read_decoder
    from eyas.plan.fit import fit as find_fit
    from eyas.plan.forecast import Deployment, forecast_of
    from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
    from eyas.plan.record import calibration_of
    from eyas.plan.resolve import target_config
    from eyas.plan.roofline import Pair, Speed, speed_of

    kept, cards = read_kv_cache_dtype(given.kv_cache_dtype, "--kv-cache-dtype"), chosen.tensor_parallel_size
    config = target_config(target)
    decoder = read_decoder(config, target)
    card = chosen.find(given.kv_cache_dtype)
    name, shape = request.choose_shape(given.drafter, target, decoder)
    stored = request.choose_quantisation(given.quantization, config, target, decoder, card.device)
    make_folder(given.out)
    if training.train is not None:
        parts = {"decoder": decoder, "drafter": request.trainable(name, shape), "quantisation": stored, "card": card}
        _plan_training(target, given, training, parts, server_cards=cards, as_json=as_json)
        return
    bench = _measurements(chosen, given, target, name, shape, card)

    def pair_in(kind: "Quantisation") -> Pair:
        return Pair(decoder=decoder, drafter=shape, quantisation=kind, kv_cache_dtype=kept, cards=cards)

    found: MachineCalibration | None = None
    if bench is not None:
        if bench.halved and stored.name == "float32":
            stored = replace(stored, halved=True)
        found = request.calibration_for(bench, pair_in(stored), card)

    def speed(kind: "Quantisation") -> Speed:
        start = speed_of(card, kind, cards=cards)
        return start if found is None else found.apply(start, pair_in(kind))

    deployment = Deployment(
        decoder=decoder,
        drafter=shape,
        quantisation=stored,
        card=card,
        speed=speed(stored),
        profile=request.choose_profile(
            given.acceptance, given.length, name, bench.profile if bench is not None else None
        ),
        users=given.users,
        context=given.context or min(CONTEXT, decoder.context or CONTEXT),
        deepest=given.depth,
        kv_cache_dtype=kept,
        cards=cards,
    )
    forecast, changes = find_fit(deployment, speed) if given.fit else (forecast_of(deployment), [])
    record = request.full_record(forecast, changes, target, name)
    if found is not None:
        record["calibration"] = calibration_of(str(chosen.calibrate or chosen.measured), found, forecast)
    if given.out is not None:
        from eyas.plan.report import render_report

        page = text_file(render_report(record))
        write_results(given.out, {"plan.json": text_file(json.dumps(record, indent=1)), "plan.html": page})
    print_result(record, lambda: print_forecast(record), as_json=as_json)
    if not forecast.fits:
        raise typer.Exit(1)


def _measurements(
    chosen: CardOptions,
    given: PlanOptions,
    target: str,
    drafter: str | None,
    shape: "DrafterShape | None",
    card: "Card",
) -> "Measurements | None":
    """Read the measurements of --measured, or make those of --calibrate."""
    from eyas.plan.measured import read_measured

    if chosen.calibrate is None:
        return None if chosen.measured is None else read_measured(chosen.measured)
    if shape is not None and drafter is None:
        raise UserError(
            f"--calibrate loads a drafter, and there is none for {target}; name one, or give --drafter none"
        )
    load_libraries(target, drafter)
    from eyas.bench.step_times import calibrate

    with ProgressDisplay() as display:
        show = partial(display.update, "calibrating")
        calibrate(target, drafter, chosen.calibrate, quantisation=given.quantization, device=card.device, show=show)
    return read_measured(chosen.calibrate)


def _plan_training(
    target: str,
    given: PlanOptions,
    training: TrainingPlanOptions,
    parts: dict[str, Any],
    *,
    server_cards: int,
    as_json: bool,
) -> None:
    """Print the plan of a training run; exit code 1 if it does not fit."""
    from eyas.cli.plan_tables import print_training
    from eyas.plan.request import read_tokens, training_record
    from eyas.plan.training import TrainingRun, plan_training

    run = build(
        TrainingRun,
        training,
        **parts,
        tokens=read_tokens(str(training.train)),
        server_cards=server_cards,
        length=given.context or min(4096, parts["decoder"].context or 4096),
        network=training.network * 1e9,
    )
    found = plan_training(run)
    record = training_record(found, target)
    write_results(given.out, {"plan.json": text_file(json.dumps(record, indent=1))})
    print_result(record, lambda: print_training(found, target), as_json=as_json)
    if not found.fits:
        raise typer.Exit(1)
