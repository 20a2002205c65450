"""The fused pass of a target where it has one (`kernels/llama/`), tried against the model's own code before it is used.

Shapes: N tokens of a pass, M logits asked for.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

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
from eyas.target.capture import capture
from eyas.target.model import Target

logger = logging.getLogger(__name__)


def fused_target(target: Target) -> FusedLlama | None:
    """The fused pass of a target; None where the model's own code must run, and why is logged."""
    try:
        fused = recognised(target)
        if target.device.type == "cuda" and has_triton():
            from eyas.kernels.llama.triton import TritonLlama  # torch for CPUs comes without triton

            by_kernels = TritonLlama(**{part.name: getattr(fused, part.name) for part in fields(fused)})
            for tried, without in (
                (by_kernels.with_few_rows(), "for few tokens"),
                (by_kernels, "between its products"),
            ):
                try:
                    if tried is not None:
                        require_same(tried, target)
                        return tried
                except Exception as reason:  # kernels fail in many ways, and none is a reason not to serve
                    # Quantised weights gain nothing without them.
                    level = logging.WARNING if by_kernels.phased else logging.INFO
                    logger.log(level, f"{target.facts.source} runs without kernels of its own {without}: {reason}")
        if target.device.type == "cuda" and any(isinstance(block.mlp, Experts) for block in fused.blocks):
            raise NotLlamaError("its experts need kernels of ours on a GPU")  # by torch they wait for the device
        require_same(fused, target)
    except (NotLlamaError, UserError) as reason:
        logger.info(f"{target.facts.source} runs by transformers' own code: {reason}")
        return None
    return fused


def recognised(target: Target) -> FusedLlama:
    """The fused pass of a target, not yet tried; `NotLlamaError` where its parts are others."""
    return recognise(target.model, TargetRunner(target, KVCache(blocks=1, block_size=trial.BLOCK_SIZE)).calls)


def require_same(fused: FusedLlama, target: Target) -> None:
    """Try a fused pass against the target; `NotLlamaError` where it computes anything else."""
    runner = TargetRunner(target, KVCache(blocks=trial.BLOCKS, block_size=trial.BLOCK_SIZE))
    states = range(len(fused.blocks) + 1)

    def own(
        ids_N: Tensor, metadata: AttentionMetadata, keep_M: Tensor
    ) -> tuple[Sequence[Tensor], Tensor, Mapping[int, trial.Routed]]:
        with capture(target.model, states) as captured, _routing(fused) as routed:
            logits_MV = runner.forward(ids_N, metadata, keep_M)
        return captured.aux_hidden()[0].chunk(len(states), dim=-1), logits_MV, routed

    trial.require_same(fused, own, max_position_embeddings=target.facts.max_position_embeddings)


@contextmanager
def _routing(fused: FusedLlama) -> Iterator[Mapping[int, trial.Routed]]:
    """What the routers of the model's own code are given and choose meanwhile, by layer."""
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
