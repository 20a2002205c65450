"""`eyas plan`: what will fit and how fast it will be, before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.help import CARD, MEMORY, MODEL, OUTPUT, SPECULATION, TRAINING
from eyas.cli.options import AsJson, KVCacheDtype
from eyas.errors import UserError

if TYPE_CHECKING:
    from eyas.plan.acceptance import AcceptanceProfile
    from eyas.plan.decoder import Decoder
    from eyas.plan.footprint import DrafterShape
    from eyas.plan.forecast import Forecast
    from eyas.plan.measured import Measurements
    from eyas.plan.quantisation import Quantisation
    from eyas.plan.resolve import Json
    from eyas.plan.roofline import Pair
    from eyas.plan.training import TrainingRun

CONTEXT = 8192
"""Tokens of a request unless told, for targets that could hold more; as `eyas serve` has it."""
GPU = "rtx4090"


def plan(
    target: Annotated[
        str, typer.Argument(help="smollm2, a config.json, a folder, a GGUF file or a hub id.")
    ] = "smollm2",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter's name, config.json, folder or hub id, or none.",
            show_default="the target's own, if shipped, else the usual shape",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    quantisation: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "--quantisation",
            help="auto, none, gguf (on a CPU), float32, bfloat16, float16, fp8, int8, int4, int4-g64.",
            show_default="as stored",
            rich_help_panel=MODEL,
        ),
    ] = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    gpu: Annotated[
        str | None,
        typer.Option(help="A card of the table, cpu, or a name of yours.", show_default=GPU, rich_help_panel=CARD),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory in GiB.", show_default="the card's", rich_help_panel=CARD)
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth in GB/s.", show_default="the card's", rich_help_panel=CARD)
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Arithmetic of matrix products, in TFLOPS.", show_default="the card's", rich_help_panel=CARD),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Cards that a target is divided over.", min=1, rich_help_panel=CARD)
    ] = 1,
    link: Annotated[
        float | None,
        typer.Option(
            help="GB/s from a card to others, one direction.", show_default="the card's", rich_help_panel=CARD
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Plan training a drafter on so many tokens instead: 500M.", rich_help_panel=TRAINING),
    ] = None,
    trainers: Annotated[int, typer.Option(help="Cards that train.", min=1, rich_help_panel=TRAINING)] = 1,
    step_tokens: Annotated[
        int, typer.Option(help="Tokens of a trainer's step.", min=1, rich_help_panel=TRAINING)
    ] = 32768,
    taught: Annotated[
        float, typer.Option(help="Share of the tokens that are answers.", rich_help_panel=TRAINING)
    ] = 0.5,
    network: Annotated[
        float, typer.Option(help="GB/s of a node to others.", min=0.001, rich_help_panel=TRAINING)
    ] = 50.0,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer.",
            show_default="the target's, at most 8192",
            min=2,
            rich_help_panel=MEMORY,
        ),
    ] = None,
    users: Annotated[int, typer.Option(help="Answers at the same time.", min=1, rich_help_panel=MEMORY)] = 4,
    depth: Annotated[
        int, typer.Option(help="The deepest drafts to consider.", min=1, max=16, rich_help_panel=SPECULATION)
    ] = 7,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Share of rounds that accept each position: 0.73,0.52,0.35.", rich_help_panel=SPECULATION),
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Or tokens per round at a depth: 2.7@3.", rich_help_panel=SPECULATION)
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="JSON of a bench on that machine: calibrate with it and say the error.", rich_help_panel=CARD
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Load the pair on this machine, time its steps for a minute, write them to this file and use it as "
            "--measured.",
            rich_help_panel=CARD,
        ),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Change what must be changed until it fits.", rich_help_panel=MEMORY)
    ] = False,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON to this file as well.", rich_help_panel=OUTPUT)
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Draw it: write an HTML page to this file as well.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Say what a target with its drafter takes on a card, who fits, how fast it is and how to start it.

    Nothing is loaded: sizes come from config.json, times from the card's figures. Exit code 1 means it does not fit.
    """
    from eyas.cli.plan_tables import print_forecast
    from eyas.cli.plan_training import read_tokens
    from eyas.plan.calibrate import MachineCalibration, find_calibration
    from eyas.plan.cards import CARDS, find_card
    from eyas.plan.commands import UNTRAINED, command_notes, eyas_command, vllm_command
    from eyas.plan.decoder import read_decoder
    from eyas.plan.fit import fit as find_fit
    from eyas.plan.forecast import Deployment, forecast_of
    from eyas.plan.kv_cache_dtype import read_kv_cache_dtype
    from eyas.plan.measured import read_measured
    from eyas.plan.record import calibration_of, record_of
    from eyas.plan.resolve import target_config
    from eyas.plan.roofline import Pair, Speed, speed_of
    from eyas.plan.training import TrainingRun

    kept = read_kv_cache_dtype(kv_cache_dtype, "--kv-cache-dtype")
    config = target_config(target)
    decoder = read_decoder(config, target)
    if calibrate is not None and measured is not None:
        raise UserError("--calibrate measures what --measured would read; give one of them")
    described = gpu is None and (memory is not None or bandwidth is not None or tflops is not None)
    if calibrate is not None and gpu in (None, "cpu") and not described:
        from eyas.cli.plan_calibrate import this_processor

        card = this_processor()
    else:
        name_of = gpu if described or gpu is not None else GPU
        card = find_card(name_of, memory=memory, bandwidth=bandwidth, tflops=tflops, link=link)
    if kept == "fp8" and card.name in CARDS and "fp8" not in CARDS[card.name].flops:
        raise UserError(
            f"--kv-cache-dtype {kv_cache_dtype} needs a card that computes in fp8, which {card.name} does not; use auto"
        )
    name, shape = _drafter(drafter, target, decoder)
    stored = _quantisation(quantisation, config, target, decoder, card.device)
    if train is not None:
        if shape is None:
            raise UserError("--train plans for a drafter, and --drafter none says that there is none; leave it out")
        if shape.config.eagle1:
            raise UserError(
                f"--train plans for EAGLE-3 drafters, which eyas trains, and {name} is EAGLE-1; leave it out"
            )
        run = TrainingRun(
            decoder=decoder,
            drafter=shape,
            quantisation=stored,
            card=card,
            tokens=read_tokens(train),
            trainers=trainers,
            server_cards=tensor_parallel_size,
            length=context or min(4096, decoder.context or 4096),
            taught=taught,
            step_tokens=step_tokens,
            network=network * 1e9,
        )
        _finish_training(run, target, as_json=as_json, out=out)
        return
    if calibrate is not None:
        from eyas.cli import plan_calibrate

        if shape is not None and name is None:
            raise UserError(
                f"--calibrate loads a drafter, and there is none for {target}; name one, or give --drafter none"
            )
        plan_calibrate.calibrate(target, name, calibrate, quantisation=quantisation, device=card.device)
        measured = calibrate
    bench = None if measured is None else read_measured(measured)

    def pair_in(kind: "Quantisation") -> Pair:
        return Pair(decoder=decoder, drafter=shape, quantisation=kind, kv_cache_dtype=kept, cards=tensor_parallel_size)

    found: MachineCalibration | None = None
    if bench is not None:
        if bench.halved and stored.name == "float32":
            stored = replace(stored, halved=True)
        pair = pair_in(stored) if bench.target is None else _measured_pair(bench, card.device)
        found = find_calibration(pair, speed_of(card, pair.quantisation, cards=pair.cards), bench.steps)

    def speed(kind: "Quantisation") -> Speed:
        start = speed_of(card, kind, cards=tensor_parallel_size)
        return start if found is None else found.apply(start, pair_in(kind))

    deployment = Deployment(
        decoder=decoder,
        drafter=shape,
        quantisation=stored,
        card=card,
        speed=speed(stored),
        profile=_profile(acceptance, length, name, bench.profile if bench is not None else None),
        users=users,
        context=context or min(CONTEXT, decoder.context or CONTEXT),
        deepest=depth,
        kv_cache_dtype=kept,
        cards=tensor_parallel_size,
    )
    forecast, changes = find_fit(deployment, speed) if fit else (forecast_of(deployment), [])
    record = record_of(forecast)
    record["changes"] = changes
    model = None if forecast.deployment.drafter is None else name or UNTRAINED
    # The engine here runs on one card.
    own = [eyas_command(forecast, target, model)] if tensor_parallel_size == 1 else []
    record["commands"] = [*own, vllm_command(forecast, target, model)]
    record["notes"] = command_notes(forecast, target) + _more_cards(forecast)
    if found is not None:
        record["calibration"] = calibration_of(str(measured), found, forecast)
    if out is not None:
        _write(out, "--out", json.dumps(record, indent=1))
    if page is not None:
        from eyas.plan.report import render_report

        _write(page, "--page", render_report(record))
    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_forecast(record)
    if not forecast.fits:
        raise typer.Exit(1)


def _finish_training(run: "TrainingRun", target: str, *, as_json: bool, out: Path | None) -> None:
    """Print the plan of a training run; exit code 1 if it does not fit."""
    from eyas.cli.plan_training import print_training, training_record
    from eyas.plan.training import plan_training

    found = plan_training(run)
    record = training_record(found, target)
    if out is not None:
        _write(out, "--out", json.dumps(record, indent=1))
    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_training(found, target)
    if not found.fits:
        raise typer.Exit(1)


def _more_cards(forecast: "Forecast") -> list[str]:
    """How many cards would do, where these do not."""
    from eyas.plan.forecast import forecast_of
    from eyas.plan.roofline import speed_of

    deployment = forecast.deployment
    if forecast.fits or deployment.card.device == "cpu" or not deployment.card.link:
        return []
    for cards in (2, 4, 8, 16):
        if cards <= deployment.cards or deployment.decoder.heads % cards:
            continue
        speed = speed_of(deployment.card, deployment.quantisation, cards=cards)
        if forecast_of(replace(deployment, cards=cards, speed=speed)).fits:
            return [f"{cards} cards hold it: --tensor-parallel-size {cards}"]
    return []


def _quantisation(asked: str | None, config: "Json", target: str, decoder: "Decoder", device: str) -> "Quantisation":
    """What the target's weights are on this device: as loading would have them, or what was asked for."""
    from eyas.plan.quantisation import PLAIN, gguf_quantisation, in_blocks, parse_quantisation, stored_quantisation
    from eyas.plan.resolve import gguf_kinds

    if device != "cpu":
        if asked == "gguf":
            raise UserError("--quantization gguf runs on the CPU only; leave it out, use fp8 or int4, or --gpu cpu")
        if asked == "none":
            return PLAIN["bfloat16"]
        return stored_quantisation(config, target) if asked in (None, "auto") else parse_quantisation(asked)
    if asked in ("int8", "int4"):
        return in_blocks(asked, tied=decoder.tied)
    if asked in (None, "auto", "gguf"):
        kinds = gguf_kinds(target)
        packed = None if kinds is None else gguf_quantisation(kinds, tied=decoder.tied)
        if packed is None and asked == "gguf":
            raise UserError(f"{target} is not a GGUF file with quantised matrices; use int8 or int4, or leave it out")
        # A processor computes everything else in float32; one with arithmetic for bfloat16 can be told so.
        return packed or PLAIN["float32"]
    if asked == "fp8":
        raise UserError("--quantization fp8 runs on a GPU only, and the plan is for a CPU; use int8")
    return PLAIN["float32"] if asked == "none" else parse_quantisation(asked)


def _drafter(asked: str | None, target: str, decoder: "Decoder") -> "tuple[str | None, DrafterShape | None]":
    """What drafts: the name a server would be told, and its shape."""
    from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
    from eyas.plan.resolve import drafter_shape, require_match, usual_drafter

    if asked == NO_DRAFTER:
        return None, None
    name = choose_drafter(asked, target)
    shape = usual_drafter(decoder) if name is None else drafter_shape(name)
    require_match(decoder, shape)
    return name, shape


def _measured_pair(bench: "Measurements", device: str) -> "Pair":
    """What a bench measured, which may be another target: constants are the machine's."""
    from eyas.plan.decoder import read_decoder
    from eyas.plan.quantisation import stored_quantisation
    from eyas.plan.resolve import target_config
    from eyas.plan.roofline import Pair

    assert bench.target is not None
    config = target_config(bench.target)
    decoder = read_decoder(config, bench.target)
    stored = stored_quantisation(config, bench.target)
    if bench.quantisation:
        stored = _quantisation(bench.quantisation, config, bench.target, decoder, device)
    stored = replace(stored, halved=bench.halved and stored.name == "float32")
    return Pair(decoder=decoder, drafter=_drafter(bench.drafter, bench.target, decoder)[1], quantisation=stored)


def _profile(
    acceptance: str | None, length: str | None, drafter: str | None, bench: "AcceptanceProfile | None"
) -> "AcceptanceProfile":
    """How often drafts are accepted: what was said, what a bench counted, what is known, what is usual."""
    from eyas.plan.acceptance import SHIPPED, read_acceptance, read_length, usual_profile

    if acceptance is not None and length is not None:
        raise UserError("--acceptance and --length say the same thing in two ways; give one of them")
    if acceptance is not None:
        return read_acceptance(acceptance)
    if length is not None:
        return read_length(length)
    return bench or SHIPPED.get(drafter or "") or usual_profile()


def _write(path: Path, option: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give {option} another place") from error
