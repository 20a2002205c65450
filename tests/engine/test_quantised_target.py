"""Drafts change nothing about what a quantised target says, however many requests share a pass."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from each import each
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import DEFAULT_DRAFTER
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Request, Speculation
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.fused_drafter import fused_drafter
from eyas.engine.runner.fused_target import fused_target
from eyas.kernels.linear.quantised_linear import (
    Blocks,
    QuantisedEmbedding,
    QuantisedKernel,
    QuantisedLinear,
    load_quantised,
    quantise,
)
from eyas.loading import load_pair
from eyas.sampling import Sampling
from eyas.target.gguf_blocks import blocks_of
from eyas.target.locate import DEFAULT_TARGET
from eyas.target.model import Target
from tiny import language

NEW_TOKENS = 12


def by_halves(weight_NK: Tensor) -> Blocks:
    """8 bits with a scale for every 16, as Q6_K has them."""
    halves_NS1 = weight_NK.view(len(weight_NK), -1, 16).abs().amax(dim=-1, keepdim=True)
    scale_NS1 = (halves_NS1 / 31).half()
    q_NSI = (weight_NK.view(len(weight_NK), -1, 16) / scale_NS1.float()).round().clamp(-32, 31)
    return Blocks(q_NK=q_NSI.to(torch.int8).view(weight_NK.shape), scale_NS=scale_NS1[..., 0], minimum_NB=None, bits=8)


def stored_as(kind: Kind) -> Callable[[Tensor], Blocks]:
    return lambda weight_NK: blocks_of(gguf.quantize(weight_NK.numpy(), kind), kind, weight_NK.shape[1])


FORMATS: dict[str, Callable[[Tensor], Blocks]] = {
    "int8": lambda weight_NK: quantise(weight_NK, 8),
    "int4": lambda weight_NK: quantise(weight_NK, 4),
    **{kind.name: stored_as(kind) for kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q5_1)},
    "halves": by_halves,
}


@pytest.fixture(scope="module")
def kernel() -> QuantisedKernel:
    found, words = load_quantised()
    if found is None:
        pytest.skip(f"no kernel here: {words}")
    return found


def quantised(target: Target, kernel: QuantisedKernel, blocks: Callable[[Tensor], Blocks]) -> Target:
    model: Any = deepcopy(target.model)
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                setattr(parent, name, QuantisedLinear.of(kernel, blocks(linear.weight.detach())))
    model.set_input_embeddings(QuantisedEmbedding(QuantisedLinear.of(kernel, blocks(target.embedding()))))
    return replace(target, model=model)


def answers(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    speculation: Speculation,
    sampling: Sampling,
    *,
    seed: int = 0,
) -> list[list[int]]:
    keys = [
        engine.submit(
            Request(
                prompt=prompt,
                sampling=sampling,
                max_new_tokens=NEW_TOKENS,
                speculation=speculation,
                seed=seed + index,
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    told: dict[int, list[int]] = {key: [] for key in keys}
    while engine.busy:
        for piece in engine.step():
            told[piece.key] += piece.tokens
    return [told[key] for key in keys]


@each("format_", FORMATS)
def test_drafts_and_batches_change_no_token(
    format_: str, kernel: QuantisedKernel, tiny_target: Target, tiny_drafter: Drafter
) -> None:
    target = quantised(tiny_target, kernel, FORMATS[format_])
    rows = language(32, 40, torch.Generator().manual_seed(5)).tolist()
    prompts = [tuple(row[: 3 + index]) for index, row in enumerate(rows)]
    assert fused_target(target) is not None, "the fused pass must be the one that is tested"
    engine = Engine(target, tiny_drafter, config=EngineConfig(max_num_seqs=32, max_model_len=128))
    for sampling in (Sampling(), Sampling(temperature=0.9)):
        alone = [
            answers(engine, [prompt], Speculation(mode="off"), sampling, seed=seed)[0]
            for seed, prompt in enumerate(prompts)
        ]
        for count in (1, 7, 32):
            for speculation in (Speculation(mode="off"), Speculation(mode="fixed", depth=3)):
                assert answers(engine, prompts[:count], speculation, sampling) == alone[:count]


@pytest.mark.default
def test_the_default_target_as_its_file_has_it_says_the_same_with_drafts(kernel: QuantisedKernel) -> None:
    target, drafter = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER[DEFAULT_TARGET], dtype="auto", device="cpu")
    assert target.quantization == "gguf"
    assert drafter is not None
    assert isinstance(drafter.embed_tokens, QuantisedEmbedding), "the target's own"
    assert isinstance(drafter.fc, QuantisedLinear), "of 8 bits, beside a quantised target"
    assert type(fused_drafter(drafter)) is not DraftPasses
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=7, max_model_len=256))
    questions = ["What is the capital of France?", "Count from 1 to 5.", "Name three colours.", "What do cats eat?"]
    prompts = [tuple(target.encode_chat([{"role": "user", "content": question}])) for question in questions]
    alone = [answers(engine, [prompt], Speculation(mode="off"), Sampling())[0] for prompt in prompts]
    before = engine.stats.accepted
    assert answers(engine, prompts, Speculation(mode="fixed", depth=3), Sampling()) == alone
    assert engine.stats.accepted - before > NEW_TOKENS, "drafts must have been accepted"
