"""Loads a target and its drafter for decoding; used by the Python API, all commands and the server.

On a CPU the weights of both models are packed for its matrix products here, so that no caller can forget it.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.drafter.check import check
from eyas.drafter.checkpoint import drafter_of, find_folder, read_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.quantised_linears import QuantisedLinears
from eyas.errors import UserError
from eyas.freed_memory import give_back
from eyas.kernels.linear.packed_linear import pack_linears
from eyas.kernels.linear.quantised_linear import (
    QuantisedKernel,
    QuantisedLinear,
    as_blocks,
    load_quantised,
    quantise,
    replace_by_blocks,
)
from eyas.kernels.linear.served_linear import packed_bytes
from eyas.kernels.llama.packed_experts import pack_experts
from eyas.quantization.stored_linear import served_linear
from eyas.target.chat_template import ChatFormat
from eyas.target.device import choose_device
from eyas.target.facts import TargetFacts
from eyas.target.gguf_model import has_packed_matrices, packed_model
from eyas.target.locate import gguf_of
from eyas.target.model import Target
from eyas.target.quantise import ON_THE_FLY, quantise_linears
from eyas.target.quantised_checkpoint import multiplies
from eyas.threads import limit_threads

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4", "gguf")


def require_fit(drafter: str, target: TargetFacts) -> None:
    """Raise if a drafter does not fit the target, before weights are loaded."""
    faults = [found.message for found in check(drafter, target=target).findings if found.severity == "error"]
    if faults:
        more = f" (and {len(faults) - 1} more, see `eyas check`)" if len(faults) > 1 else ""
        raise UserError(f"{drafter} does not fit {target.source}: {faults[0]}{more}")


def load_target(
    target: str,
    *,
    dtype: str,
    device: str,
    quantization: str = "auto",
    cache: Path | None = None,
    revision: str | None = None,
    chat_format: ChatFormat | None = None,
) -> Target:
    """Load a target for decoding; on a CPU its weights are packed.

    `dtype="auto"` computes in the stored precision; on a CPU in float32, where matrices stored in bfloat16 can stay so
    (`pack_linears`). Embeddings, keys and values then take twice the memory.

    `quantization` is one of `QUANTIZATIONS`. With `auto`, a GGUF file stays quantised on a CPU, unless `dtype` names
    another type, and other quantised checkpoints stay quantised on a GPU.
    """
    where = choose_device(device)
    limit_threads()
    rest: dict[str, Any] = {"device": device, "cache": cache, "revision": revision, "chat_format": chat_format}
    if where.type != "cpu" and quantization in ("auto", "none", *ON_THE_FLY):
        loaded = Target.load(target, dtype=dtype, quantization=quantization, **rest)
        if loaded.quantization != "none":
            size = packed_bytes(loaded.model)
            what, others = "matrices", "embedding, head and norms"
            if loaded.quantization == "mxfp4":
                what, others = "experts", "other weights"
            logger.info(f"{what} are {loaded.quantization} ({size / 1e6:.0f} MB), {others} are not")
        return loaded
    chosen, kernel, path = _choose(target, quantization, dtype, where, cache)
    if kernel is None:
        loaded = Target.load(target, dtype=dtype, **rest)
    elif path is not None:
        loaded = Target.load(target, build=partial(packed_model, path, kernel, cache), **rest)
    else:
        loaded = Target.load(target, dtype="float32", **rest)
        quantise_linears(loaded.model, 8 if chosen == "int8" else 4, kernel)
    if kernel is not None:
        size = packed_bytes(loaded.model)
        logger.info(f"matrices stay quantised ({chosen}, {size / 1e6:.0f} MB), multiplied by {kernel.uses}")
    if loaded.device.type == "cpu":
        packing = pack_linears(loaded.model, widen=dtype == "auto" and kernel is None, cache=cache)
        pack_experts(loaded.model, cache=cache)
        if packing.linears or kernel is None:
            how = f"in float32, in panels, by {packing.words}" if packing.linears else f"by torch: {packing.words}"
            logger.info(f"{'other ' if kernel is not None else ''}matrix products {how}")
    return replace(loaded, quantization=chosen)


def _choose(
    target: str, quantization: str, dtype: str, device: torch.device, cache: Path | None
) -> tuple[str, QuantisedKernel | None, Path | None]:
    """Choose the quantization of a target on a CPU, its kernel, and the GGUF file to read, if any."""
    if quantization not in QUANTIZATIONS:
        raise UserError(f"unknown quantization {quantization!r}; use one of {', '.join(QUANTIZATIONS)}")
    asked = quantization not in ("auto", "none")
    if quantization == "fp8":
        raise UserError(
            f"--quantization fp8 runs on a GPU only, and the target goes to {device}; use int8, or --device cuda"
        )
    if asked and device.type != "cpu":
        raise UserError(
            f"--quantization {quantization} runs on the CPU only, and the target goes to {device}; "
            f"use {' or '.join(ON_THE_FLY)}, or --device cpu"
        )
    if asked and dtype not in ("auto", "float32"):
        raise UserError(
            f"--quantization {quantization} computes in float32, not in {dtype}; leave --dtype or --quantization out"
        )
    if quantization == "none" or device.type != "cpu" or (not asked and dtype != "auto"):
        return "none", None, None
    path = None if quantization in ("int8", "int4") else gguf_of(target, cache=cache)
    if path is not None and not has_packed_matrices(path):
        path = None
    if path is None and not asked:
        return "none", None, None
    if path is None and quantization == "gguf":
        raise UserError(
            f"{target} is not a GGUF file with quantised matrices; use --quantization int8 or int4, or leave it out"
        )
    kernel, words = load_quantised(cache=cache)
    if kernel is None and asked:
        raise UserError(f"--quantization {quantization} needs a C compiler ({words}); install one or use none")
    if kernel is None:
        logger.info(f"{target} is dequantised to bfloat16: there are no integer products here ({words})")
        return "none", None, None
    return (quantization if path is None else "gguf"), kernel, path


def load_drafter_for(target: Target, drafter: str, *, cache: Path | None = None) -> Drafter:
    """Load a drafter onto the device and dtype of its target, packed like it; shared weights are loaded once.

    For a quantised target its matrices are quantised to 8 bits, which may change drafts but no answer. Linear layers
    that are quantised on disk stay so for any target.
    """
    checkpoint = read_checkpoint(drafter)
    model = drafter_of(checkpoint).to(device=target.device, dtype=target.dtype)
    model.share_target(*target.tables(), target.last_norm())
    linears, on_cpu = checkpoint.quantised, target.device.type == "cpu"
    if linears is not None:
        reason = _multiply_integers(model, linears, cache) if on_cpu else _multiply_on_gpu(model, linears)
        dtype = str(target.dtype).removeprefix("torch.")
        how = f"multiplied as {model.quantization}" if reason is None else f"dequantised to {dtype}: {reason}"
        logger.info(f"the drafter's matrices, {linears.scheme.words}, are {how}")
    if on_cpu:
        kernel = load_quantised(cache=cache)[0] if target.quantization != "none" else None
        if kernel is not None:
            replace_by_blocks(model, kernel, lambda linear: quantise(linear.weight, 8))
            model.quantization = "int8"
        pack_linears(model, halve=True, cache=cache)
    return model


def _multiply_integers(model: Drafter, linears: QuantisedLinears, cache: Path | None) -> str | None:
    """Use 8-bit linear layers on a CPU; if this is not possible, return the reason and change nothing."""
    dtype = model.norm_weight.dtype
    if dtype != torch.float32:
        return f"integer products take rows of float32, not of {str(dtype).removeprefix('torch.')}"
    kernel, words = load_quantised(cache=cache)
    if kernel is None:
        return f"there are no integer products here ({words})"
    for name, weight in linears.weights.items():
        linear = model.get_submodule(name)
        if type(linear) is nn.Linear:
            model.set_submodule(name, QuantisedLinear.of(kernel, as_blocks(weight), linear.bias))
    model.quantization = "int8"
    return None


def _multiply_on_gpu(model: Drafter, linears: QuantisedLinears) -> str | None:
    """Keep quantised linear layers on a GPU; if this is not possible, return the reason and change nothing."""
    like_D, kept = model.norm_weight, dict[str, nn.Module]()
    reason = multiplies(like_D.device, linears.scheme.kind, like_D.dtype)
    if reason is not None:
        return reason
    for name, weight in linears.weights.items():
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear:
            continue
        inputs = linears.scheme.quantised_inputs
        served = served_linear(weight.to(like_D.device), linear.bias, like_D.dtype, quantised_inputs=inputs)
        if served is None:
            return f"there is no kernel for {name}"
        kept[name] = served
    for name, packed in kept.items():
        model.set_submodule(name, packed)
    model.quantization = linears.scheme.kind
    return None


def load_pair(
    target: str,
    drafter: str | None,
    *,
    dtype: str,
    device: str,
    quantization: str = "auto",
    cache: Path | None = None,
    revision: str | None = None,
    chat_format: ChatFormat | None = None,
) -> tuple[Target, Drafter | None]:
    """Load a target and, unless None, a drafter."""
    if drafter is not None:
        find_folder(drafter)  # a wrong name should fail before the target is loaded
    loaded = load_target(
        target,
        dtype=dtype,
        device=device,
        quantization=quantization,
        cache=cache,
        revision=revision,
        chat_format=chat_format,
    )
    model = None if drafter is None else load_drafter_for(loaded, drafter, cache=cache)
    give_back()
    return loaded, model


def load_another(target: Target, drafter: str, *, cache: Path | None = None) -> Drafter:
    """Load another drafter for a loaded target, after checking that it fits."""
    require_fit(drafter, target.facts)
    return load_drafter_for(target, drafter, cache=cache)
