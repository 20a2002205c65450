"""Record of a forecast, as JSON."""

from dataclasses import asdict
from typing import Any

from eyas.plan.calibrate import MachineCalibration
from eyas.plan.depth_table import depth_table
from eyas.plan.forecast import Deployment, Forecast
from eyas.plan.formulas import formulas
from eyas.plan.roofline import Speed

FORMAT = "eyas-plan-1"


def record_of(forecast: Forecast) -> dict[str, Any]:
    """Record a forecast in bytes, seconds and tokens per second."""
    deployment, taken, budget = forecast.deployment, forecast.footprint, forecast.budget
    decoder, card, drafter = deployment.decoder, deployment.card, deployment.drafter
    return {
        "format": FORMAT,
        "target": {
            "source": decoder.source,
            "model_type": decoder.model_type,
            "parameters": decoder.parameters,
            "active_parameters": decoder.active_parameters,
            "layers": len(decoder.layers),
            "context": decoder.context,
        },
        "drafter": None
        if drafter is None
        else {"name": drafter.name, "family": drafter.config.family, "assumed": drafter.assumed},
        "quantisation": {"name": deployment.quantisation.name, "bits_per_weight": _bits(deployment)},
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "card": {
            "name": card.name,
            "count": deployment.cards,
            "device": card.device,
            "memory_bytes": card.memory,
            "bandwidth_bytes_per_second": card.bandwidth,
            "flops_per_second": card.speed_of(deployment.quantisation.arithmetic),
        },
        "constants": constants(deployment.speed),
        "asked": {"users": deployment.users, "context": deployment.context},
        "acceptance": {
            "source": deployment.profile.source,
            "length_by_depth": [deployment.profile.length(depth) for depth in range(1, deployment.deepest + 1)],
        },
        "formulas": formulas(forecast),
        "memory": {
            "weights": taken.weights,
            "drafter": taken.drafter,
            "kv_per_token": taken.token,
            "drafter_kv_per_token": taken.drafter_token,
            "working": taken.working,
            "recorded": taken.recorded,
            "runtime": taken.runtime,
            "beside_kv_blocks": taken.beside_blocks,
            "left_for_kv_blocks": forecast.for_blocks,
            "needed": forecast.needed,
            "usable": deployment.usable,
        },
        "kv_blocks": None
        if budget is None
        else {"blocks": budget.blocks, "block_size": budget.block_size, "bytes": budget.bytes},
        "fits": forecast.fits,
        "verdict": forecast.verdict(),
        "users_fit": forecast.users_fit,
        "longest_context": forecast.longest_context,
        "expected": [asdict(one) for one in forecast.table],
        "depths": [list(row) for row in depth_table(deployment)],
        "recommended_depth": forecast.best.depth,
        "recommended_speedup": forecast.best.speedup,
        "auto_speedup": forecast.auto_speedup,
        "prompt_seconds": forecast.prompt_seconds,
    }


def constants(speed: Speed) -> dict[str, float]:
    """The roofline's four constants, in the units that people use."""
    byte, flop, layer, pass_ = speed.parts
    return {
        "bytes_per_second": 1 / byte if byte else float("inf"),
        "flops_per_second": 1 / flop if flop else float("inf"),
        "seconds_per_layer": layer,
        "seconds_per_pass": pass_,
    }


def calibration_of(source: str, found: MachineCalibration, forecast: Forecast) -> dict[str, Any]:
    """Record measured steps beside their predictions from the other steps.

    `told` says for each row of `expected` where its step comes from: it was measured, interpolated between measured
    ones, extrapolated, or fitted, by the constants alone, since another pair was measured.
    """
    checked, factors = found.checked, found.factors
    used = forecast.deployment.speed.factors == factors
    errors = [abs(one.error) for one in checked]
    gains = [abs(one.speedup_error) for one in checked if one.speedup_error is not None]
    return {
        "source": source,
        "fitted": {"constants": list(found.constants), "overlap": found.overlap},
        "factors": {name: [list(point) for point in kind["points"]] for name, kind in asdict(factors).items()},
        "told": [_told(found, one.users, one.depth) if used else "fitted" for one in forecast.table],
        "steps": [
            {
                **asdict(one.step),
                "predicted_seconds": one.predicted_seconds,
                "error": one.error,
                "speedup": one.speedup,
                "predicted_speedup": one.predicted_speedup,
                "speedup_error": one.speedup_error,
            }
            for one in checked
        ],
        "mean_error": sum(errors) / len(errors),
        "worst_error": max(errors),
        "mean_speedup_error": sum(gains) / len(gains) if gains else None,
        "worst_speedup_error": max(gains) if gains else None,
    }


def _told(found: MachineCalibration, users: int, depth: int) -> str:
    """Source of a step's time, for the pair that was measured."""
    if any((one.step.users, one.step.depth) == (users, depth) for one in found.checked):
        return "measured"
    counts = [(users * (1 + depth), found.factors.verify.points)]
    if depth:
        counts += [(users, found.factors.first_draft.points), (users, found.factors.further_drafts.points)]
    between = all(not points or points[0][0] <= count <= points[-1][0] for count, points in counts)
    return "interpolated" if between else "extrapolated"


def _bits(deployment: Deployment) -> float:
    """Mean bits of a weight in the target's matrices."""
    kept, decoder = deployment.quantisation, deployment.decoder
    if kept.expert_bits is None:
        return kept.bits
    return 8 * kept.matrix_bytes(decoder.matrices, decoder.experts) / decoder.matrices
