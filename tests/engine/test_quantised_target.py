"""Drafts and batches do not change what a quantised target answers."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from each import each
from engine.common import OFF, Prompts, at_depth, request
from eyas.drafter.model import Drafter
from eyas.drafter.shipped import DEFAULT_DRAFTER
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.fused_drafter import fused_drafter
from eyas.engine.runner.fused_target import fused_target
from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.quantised_linear import (
    Blocks,
    QuantisedKernel,
    QuantisedLinear,
    load_quantised,
    quantise,
)
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.loading import load_pair, load_target
from eyas.sampling import Sampling
from eyas.target.gguf_blocks import blocks_of
from eyas.target.locate import DEFAULT_TARGET
from eyas.target.model import Target
from eyas.target.quantise import replace_linears
from tiny import LAYERS, language

NEW_TOKENS = 12


def by_halves(weight_NK: Tensor) -> Blocks:
    """8 bits with a scale per 16 weights, as in Q6_K."""
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
    engine: Engine, prompts: Prompts, speculation: Speculation, sampling: Sampling, *, seed: int = 0
) -> list[list[int]]:
    how: dict[str, Any] = {"sampling": sampling, "max_new_tokens": NEW_TOKENS, "speculation": speculation}
    asked = [request(prompt, seed=seed + index, **how) for index, prompt in enumerate(prompts)]
    return [list(answer.tokens) for answer in engine.generate(asked)]


def assert_drafts_and_batches_change_no_token(target: Target, drafter: Drafter) -> None:
    assert fused_target(target) is not None, "the fused pass is the one under test"
    rows = language(32, 40, torch.Generator().manual_seed(5)).tolist()
    prompts = [tuple(row[: 3 + index]) for index, row in enumerate(rows)]
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=32, max_model_len=128))
    for sampling in (Sampling(), Sampling(temperature=0.9)):
        alone = [answers(engine, [prompt], OFF, sampling, seed=seed)[0] for seed, prompt in enumerate(prompts)]
        for count in (1, 7, 32):
            for speculation in (OFF, at_depth(3)):
                assert answers(engine, prompts[:count], speculation, sampling) == alone[:count]
    assert engine.stats.accepted > 0


@each("format_", FORMATS)
def test_integer_blocks_on_a_cpu(
    format_: str, kernel: QuantisedKernel, tiny_target: Target, tiny_drafter: Drafter
) -> None:
    assert_drafts_and_batches_change_no_token(quantised(tiny_target, kernel, FORMATS[format_]), tiny_drafter)


@each(("kind", "linear"), [("fp8", W8A8Linear), ("int4", W4A16Linear)])
def test_linears_of_a_gpu(kind: str, linear: type, tiny_target: Target, tiny_drafter: Drafter) -> None:
    """Here by torch, in the arithmetic of the GPU's kernels; on a GPU in tests/gpu/test_quantised_engine_cuda.py."""
    target = replace(tiny_target, model=deepcopy(tiny_target.model))
    assert replace_linears(target.model, kind) == 7 * LAYERS
    assert type(target.model.get_output_embeddings()) is nn.Linear, "the head is not quantised"
    assert isinstance(target.model.model.layers[0].mlp.up_proj, linear)
    fused = fused_target(target)
    assert fused is not None
    assert fused.phased
    assert_drafts_and_batches_change_no_token(target, tiny_drafter)


def test_kinds_that_need_a_gpu_are_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="fp8 runs on a GPU only"):
        load_target("smollm2", dtype="auto", device="cpu", quantization="fp8")


@pytest.mark.default
def test_the_default_target_in_its_stored_format_answers_the_same_with_drafts(kernel: QuantisedKernel) -> None:
    target, drafter = load_pair(DEFAULT_TARGET, DEFAULT_DRAFTER[DEFAULT_TARGET], dtype="auto", device="cpu")
    assert target.quantization == "gguf"
    assert drafter is not None
    assert isinstance(drafter.embed_tokens, QuantisedEmbedding), "the target's own"
    assert isinstance(drafter.fc, QuantisedLinear), "8 bits, beside a quantised target"
    assert type(fused_drafter(drafter)) is not DraftPasses
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=7, max_model_len=256))
    questions = ["What is the capital of France?", "Count from 1 to 5.", "Name three colours.", "What do cats eat?"]
    prompts = [tuple(target.encode_chat([{"role": "user", "content": question}])) for question in questions]
    alone = [answers(engine, [prompt], OFF, Sampling())[0] for prompt in prompts]
    before = engine.stats.accepted
    assert answers(engine, prompts, at_depth(3), Sampling()) == alone
    assert engine.stats.accepted - before > NEW_TOKENS, "drafts must have been accepted"
