"""Commands that serve a planned deployment with eyas or vLLM, and notes on what they assume."""

import json
import shlex
from math import ceil
from pathlib import Path

from eyas.drafter.shipped import SHIPPED, shipped_folder
from eyas.plan.forecast import Forecast
from eyas.target.locate import DEFAULT_TARGET

DEFAULT_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
UNTRAINED = "my-drafter"
"""Name of a drafter that is yet to be trained."""


def eyas_command(forecast: Forecast, target: str, drafter: str | None) -> str:
    """Build the `eyas serve` command; its controller measures and chooses depths itself."""
    deployment = forecast.deployment
    words = ["eyas", "serve", _model(target), "--device", deployment.card.device, *_limits(forecast)]
    if deployment.quantisation.plain:
        words += ["--dtype", deployment.quantisation.dtype]
    elif deployment.quantisation.option:
        words += ["--quantization", deployment.quantisation.option]
    words += _kv_cache(forecast)
    if forecast.budget is not None:
        words += ["--memory-gib", f"{ceil(forecast.budget.bytes / 2**30 * 100) / 100:g}"]
    if deployment.drafter is None:
        words += ["--speculative-config", "none"]
    elif drafter is not None:
        words += ["--speculative-config", json.dumps({"model": drafter, "method": deployment.drafter.config.method})]
    return shlex.join(words)


def vllm_command(forecast: Forecast, target: str, drafter: str | None) -> str:
    """Build the `vllm serve` command, which drafts at one depth: the best one for this number of users."""
    deployment = forecast.deployment
    words = ["vllm", "serve", DEFAULT_ON_HUB if target == DEFAULT_TARGET else _model(target), *_limits(forecast)]
    if deployment.cards > 1:
        words += ["--tensor-parallel-size", str(deployment.cards)]
    if deployment.card.device != "cpu":
        # vLLM takes all of this share, and measures its own working memory within it.
        words += ["--gpu-memory-utilization", "0.9" if forecast.needed < 0.85 * deployment.card.memory else "0.95"]
    if deployment.quantisation.plain:
        words += ["--dtype", deployment.quantisation.dtype]
    elif deployment.quantisation.name == "fp8":
        words += ["--quantization", "fp8"]
    words += _kv_cache(forecast)
    if deployment.drafter is not None and drafter is not None and forecast.best.depth:
        place = str(shipped_folder(drafter)) if drafter in SHIPPED else drafter
        method = deployment.drafter.config.method
        config = {"model": place, "method": method, "num_speculative_tokens": forecast.best.depth}
        words += ["--speculative-config", json.dumps(config)]
    return shlex.join(words)


def command_notes(forecast: Forecast, target: str) -> list[str]:
    """List what the commands assume."""
    deployment, notes = forecast.deployment, []
    kept = deployment.quantisation
    if _model(target) != target:
        notes.append(f"{target} is a configuration; the commands name its folder, which must hold the weights too")
    if deployment.drafter is not None and deployment.drafter.assumed:
        notes.append(f"no drafter was named: {UNTRAINED} is one of the usual shape, yet to be trained (`eyas train`)")
    if deployment.card.device == "cpu" and not kept.plain:
        notes.append(f"the target's matrices are {kept.name}, and the drafter's take 8 bits; vLLM keeps 16")
    elif kept.expert_bits is not None:
        notes.append(f"experts stay {kept.name} as they are published, other matrices take {kept.bits:g} bits")
    elif not kept.plain:
        how = "; eyas and vLLM can do that while they load" if kept.name == "fp8" else ", by AWQ or GPTQ for instance"
        how += "; eyas can do that while it loads" if kept.option == "int4" else ""
        notes.append(f"{kept.name} needs a checkpoint that is quantised so{how}")
    if any(layer.window for layer in deployment.decoder.layers):
        notes.append("eyas caches every position of layers with a window; vLLM frees those outside of it")
    if deployment.decoder.latent:
        notes.append(
            "keys and values are counted as one latent, as vLLM keeps them; an engine that keeps heads needs more"
        )
    if deployment.cards > 1:
        notes.append("times of all-reduces are assumed, not measured; eyas' own engine runs on one card")
    return notes + ([deployment.decoder.note] if deployment.decoder.note else [])


def _limits(forecast: Forecast) -> list[str]:
    deployment = forecast.deployment
    return ["--max-model-len", str(deployment.context), "--max-num-seqs", str(deployment.users)]


def _kv_cache(forecast: Forecast) -> list[str]:
    kept = forecast.deployment.kv_cache_dtype
    return [] if kept == "auto" else ["--kv-cache-dtype", kept]


def _model(target: str) -> str:
    """Name the model for a server: of a config.json, the folder around it."""
    return str(Path(target).parent) if target.endswith(".json") else target
