"""Fused passes of targets (`kernels/llama/`), each tried against the model's own code before it is used.

Shapes: N tokens of a pass, M logits asked for.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from functools import cache as cache_results
from functools import partial
from typing import Any

from torch import Tensor, nn

from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.target import TargetRunner
from eyas.errors import UserError
from eyas.kernels.attention.choose import has_triton
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.llama import trial
from eyas.kernels.llama.block import FusedLlama, NotLlamaError
from eyas.kernels.llama.experts import Experts, Router, Routes
from eyas.kernels.llama.recognise import recognise
from eyas.target.attention import AttendFor, attending_by
from eyas.target.capture import capture, decoder_layers
from eyas.target.model import Target

logger = logging.getLogger(__name__)


def fused_target(target: Target) -> FusedLlama | None:
    """Return the fused pass of a target, or None, with the reason logged, if the model's own code must run."""
    try:
        fused = recognised(target)
        if target.device.type == "cuda" and has_triton():
            from eyas.kernels.llama.triton import TritonLlama  # torch for CPUs has no triton

            by_kernels = TritonLlama(**{part.name: getattr(fused, part.name) for part in fields(fused)})
            if _holds(by_kernels, target, "between its products"):
                few = by_kernels.with_few_rows()
                # A separate trial: trials have few tokens, so theirs would not reach kernels for longer passes.
                return few if few is not None and _holds(few, target, "for few tokens") else by_kernels
        if target.device.type == "cuda" and any(isinstance(block.mlp, Experts) for block in fused.blocks):
            raise NotLlamaError("its experts need our kernels on a GPU")  # torch's code waits for the device
        require_same(fused, target)
    except (NotLlamaError, UserError) as reason:
        logger.info(f"{target.facts.source} runs by transformers' own code: {reason}")
        return None
    return fused


def _holds(by_kernels: FusedLlama, target: Target, what: str) -> bool:
    """Whether a pass with our kernels agrees with the target; the reason is logged if not."""
    try:
        require_same(by_kernels, target)
    except Exception as reason:  # serve without the kernels, whatever failed
        # Warn for quantised weights, which are no faster without the kernels.
        level = logging.WARNING if by_kernels.phased else logging.INFO
        logger.log(level, f"{target.facts.source} runs without kernels of its own {what}: {reason}")
        return False
    return True


def recognised(target: Target) -> FusedLlama:
    """Build the fused pass of a target, untried; `NotLlamaError` if its parts do not match."""
    return recognise(target.model, TargetRunner(target, KVCache(blocks=1, block_size=trial.BLOCK_SIZE)).calls)


def require_same(fused: FusedLlama, target: Target) -> None:
    """Compare a fused pass with the target; `NotLlamaError` if the results differ."""
    cache, precise_cache = (KVCache(blocks=trial.BLOCKS, block_size=trial.BLOCK_SIZE) for _ in range(2))
    runner = TargetRunner(target, cache)
    states, layers = range(len(fused.blocks) + 1), decoder_layers(target.model)
    configs = target.model.config, target.model.config.get_text_config()

    @cache_results
    def in_float32(behind: int) -> nn.Module:
        # Share the configuration objects, which select the attention function.
        return deepcopy(layers[behind - 1], {id(config): config for config in configs}).float()

    def own(ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor, precisely: Collection[int]) -> trial.OwnOutput:
        attend = runner.attend(metadata, precise_cache)
        beside = [(behind, layers[behind - 1], in_float32(behind)) for behind in precisely]
        with (
            _running_beside(beside, attend) as precise,
            capture(target.model, states) as captured,
            _routing(fused) as routed,
        ):
            logits_MV = runner.forward(ids_N, metadata, keep_M)
        return trial.OwnOutput(captured.aux_hidden()[0].chunk(len(states), dim=-1), logits_MV, routed, precise)

    trial.require_same(fused, own, max_position_embeddings=target.facts.max_position_embeddings)


@contextmanager
def _running_beside(
    layers: Sequence[tuple[int, nn.Module, nn.Module]], attend: AttendFor
) -> Iterator[Mapping[int, Tensor]]:
    """Also run float32 copies of some layers on the layers' inputs; yields their outputs [N, D] by number."""
    states: dict[int, Tensor] = {}
    hooks = []

    def run(number: int, copied: nn.Module, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        with attending_by(attend):
            output = copied(*_in_float32(given), **_in_float32(named) | {"eyas_attend": attend})
        states[number] = (output[0] if isinstance(output, tuple) else output)[0]

    try:
        for number, layer, copied in layers:
            hooks.append(layer.register_forward_pre_hook(partial(run, number, copied), with_kwargs=True))
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _in_float32(given: Any) -> Any:
    """Cast all floating-point tensors in some arguments."""
    if isinstance(given, Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, tuple):
        return tuple(_in_float32(part) for part in given)
    return {name: _in_float32(part) for name, part in given.items()} if isinstance(given, dict) else given


@contextmanager
def _routing(fused: FusedLlama) -> Iterator[Mapping[int, trial.Routed]]:
    """Record the inputs and choices of the model's own routers, by layer."""
    routed: dict[int, trial.Routed] = {}
    hooks = []

    def note(
        layer: int, _: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], chosen: tuple[Tensor, ...]
    ) -> None:
        (x, *_others), (_scores, weight_NK, expert_NK) = (*given, *named.values()), chosen
        routed[layer] = trial.Routed(x.reshape(len(expert_NK), -1), Routes(expert_NK, weight_NK))

    for layer, block in enumerate(fused.blocks):
        if isinstance(block.mlp, Experts) and isinstance(block.mlp.router, Router):
            hooks.append(block.mlp.router.module.register_forward_hook(partial(note, layer), with_kwargs=True))
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()
