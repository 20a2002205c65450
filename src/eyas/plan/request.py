"""Reads what a plan is asked for: weights, drafter, acceptance and tokens."""

import re
from dataclasses import asdict, replace
from typing import Any

from eyas.drafter.shipped import NO_DRAFTER, choose_drafter
from eyas.errors import UserError
from eyas.plan.acceptance import SHIPPED, AcceptanceProfile, read_acceptance, read_length, usual_profile
from eyas.plan.calibrate import MachineCalibration, find_calibration
from eyas.plan.cards import Card
from eyas.plan.commands import UNTRAINED, command_notes, eyas_command, vllm_command
from eyas.plan.decoder import Decoder, read_decoder
from eyas.plan.footprint import DrafterShape
from eyas.plan.forecast import Forecast, forecast_of
from eyas.plan.measured import Measurements
from eyas.plan.quantisation import (
    PLAIN,
    Quantisation,
    gguf_quantisation,
    in_blocks,
    parse_quantisation,
    stored_quantisation,
)
from eyas.plan.record import record_of
from eyas.plan.resolve import Json, drafter_shape, gguf_kinds, require_match, target_config, usual_drafter
from eyas.plan.roofline import Pair, speed_of
from eyas.plan.training import TrainingPlan

FORMAT = "eyas-train-plan-1"
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def more_cards(forecast: Forecast) -> list[str]:
    """Name the number of cards that would do, where these do not."""
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


def choose_quantisation(asked: str | None, config: Json, target: str, decoder: Decoder, device: str) -> Quantisation:
    """Types of the target's weights on this device: as loading would have them, or as asked for."""
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


def choose_shape(asked: str | None, target: str, decoder: Decoder) -> tuple[str | None, DrafterShape | None]:
    """The drafter's name for a server, and its shape."""
    if asked == NO_DRAFTER:
        return None, None
    name = choose_drafter(asked, target)
    shape = usual_drafter(decoder) if name is None else drafter_shape(name)
    require_match(decoder, shape)
    return name, shape


def measured_pair(bench: Measurements, device: str) -> Pair:
    """The pair that a bench measured; another target will do, as constants are the machine's."""
    assert bench.target is not None
    config = target_config(bench.target)
    decoder = read_decoder(config, bench.target)
    stored = stored_quantisation(config, bench.target)
    if bench.quantisation:
        stored = choose_quantisation(bench.quantisation, config, bench.target, decoder, device)
    stored = replace(stored, halved=bench.halved and stored.name == "float32")
    return Pair(decoder=decoder, drafter=choose_shape(bench.drafter, bench.target, decoder)[1], quantisation=stored)


def choose_profile(
    acceptance: str | None, length: str | None, drafter: str | None, bench: AcceptanceProfile | None
) -> AcceptanceProfile:
    """How often drafts are accepted: as given, else as a bench counted, else as known or usual."""
    if acceptance is not None and length is not None:
        raise UserError("--acceptance and --length say the same thing in two ways; give one of them")
    if acceptance is not None:
        return read_acceptance(acceptance)
    if length is not None:
        return read_length(length)
    return bench or SHIPPED.get(drafter or "") or usual_profile()


def read_tokens(text: str) -> float:
    """Read a number of tokens: 500M, 2.5B, 100000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbgt]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise UserError(f"--train {text!r} is no number of tokens such as 500M")
    return float(found[1]) * SUFFIXES[found[2]]


def training_record(plan: TrainingPlan, target: str) -> dict[str, Any]:
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


def trainable(name: str | None, shape: DrafterShape | None) -> DrafterShape:
    """Refuse to plan the training of no drafter, or of one that eyas does not train."""
    if shape is None:
        raise UserError("--train plans for a drafter, and --drafter none says that there is none; leave it out")
    if shape.config.eagle1:
        raise UserError(f"--train plans for EAGLE-3 drafters, which eyas trains, and {name} is EAGLE-1; leave it out")
    return shape


def calibration_for(bench: Measurements, pair: Pair, card: Card) -> MachineCalibration:
    """Fit the machine's constants to a bench of this pair, or of the pair that the bench names."""
    pair = pair if bench.target is None else measured_pair(bench, card.device)
    return find_calibration(pair, speed_of(card, pair.quantisation, cards=pair.cards), bench.steps)


def full_record(forecast: Forecast, changes: list[str], target: str, drafter: str | None) -> dict[str, Any]:
    """Everything that was found, with command lines and notes, as JSON."""
    record = record_of(forecast)
    record["changes"] = changes
    model = None if forecast.deployment.drafter is None else drafter or UNTRAINED
    # The engine here runs on one card.
    own = [eyas_command(forecast, target, model)] if forecast.deployment.cards == 1 else []
    record["commands"] = [*own, vllm_command(forecast, target, model)]
    record["notes"] = command_notes(forecast, target) + more_cards(forecast)
    return record
