"""A drafter stored in 8 bits runs in 8 bits, and drafts almost as the one it was made from."""

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from each import each
from engine.common import OFF, Prompts, at_depth, requests, tokens_of
from eyas import loading
from eyas.drafter.checkpoint import checkpoint_of, load_drafter, write_checkpoint
from eyas.drafter.model import Drafter
from eyas.drafter.quantise import quantised
from eyas.drafter.quantised_linears import KINDS, linear_names
from eyas.engine.config import EngineConfig
from eyas.engine.engine import Engine
from eyas.engine.runner.draft_passes import DraftPasses
from eyas.engine.runner.fused_drafter import fused_drafter
from eyas.kernels.linear.packed_linear import PackedLinear
from eyas.kernels.linear.quantised_linear import QuantisedLinear, as_blocks, load_quantised, quantise
from eyas.kernels.linear.quantised_weight import QuantisedWeight, quantise_float8, quantise_int4, quantise_int8
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.loading import load_drafter_for
from eyas.target.model import Target
from tiny import drafter_config, random_drafter


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, tiny_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / str(request.param)
    write_checkpoint(quantised(checkpoint_of(tiny_drafter), request.param, "it"), folder)
    return folder


def needs_kernel() -> None:
    kernel, words = load_quantised()
    if kernel is None:
        pytest.skip(f"no integer products here: {words}")


def accepted(target: Target, drafter: Drafter | None, prompts: Prompts) -> tuple[Prompts, float]:
    """Answers, and mean tokens per round."""
    speculation = OFF if drafter is None else at_depth(3)
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=7, max_model_len=128))
    outputs = engine.generate(requests(prompts, max_new_tokens=24, speculation=speculation))
    rounds = sum(one.stats.drafts for one in outputs)
    hits = sum(one.stats.accepted for one in outputs)
    return tokens_of(outputs), 1 + hits / max(rounds, 1)


def test_a_cpu_multiplies_it_as_integers_beside_any_target(
    target: Target, stored: Path, prompts: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    needs_kernel()
    with caplog.at_level(logging.INFO):
        drafter = load_drafter_for(target, str(stored))
    assert f"{stored.name} (compressed-tensors), are multiplied as int8" in caplog.text
    assert drafter.quantization == "int8"
    for name in linear_names(drafter.config):
        assert isinstance(drafter.get_submodule(name), QuantisedLinear), name
    assert isinstance(drafter.lm_head, PackedLinear | nn.Linear), "the head is not quantised"
    assert type(fused_drafter(drafter)) is not DraftPasses
    beside = load_drafter_for(replace(target, quantization="int8"), str(stored))
    assert isinstance(beside.lm_head, QuantisedLinear), "like every drafter's beside a quantised target"
    dense = load_drafter(str(stored)).share_target(*target.tables())
    said, _ = accepted(target, None, prompts[:7])
    drafted, length = accepted(target, drafter, prompts[:7])
    _, exact = accepted(target, dense, prompts[:7])
    assert drafted == said
    assert length > 1.5
    assert length == pytest.approx(exact, rel=0.1)


def test_weights_that_cannot_be_multiplied_are_dequantised_with_a_log_line(
    target: Target, stored: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_quantised", lambda **_: (None, "no compiler"))
    with caplog.at_level(logging.INFO):
        drafter = load_drafter_for(target, str(stored))
    assert "are dequantised to float32: there are no integer products here (no compiler)" in caplog.text
    assert drafter.quantization == "none"
    assert not any(isinstance(part, QuantisedLinear) for part in drafter.modules())
    half = replace(target, model=deepcopy(target.model).to(torch.bfloat16))
    with caplog.at_level(logging.INFO):
        load_drafter_for(half, str(stored))
    assert "integer products take rows of float32, not of bfloat16" in caplog.text


def test_a_gpu_multiplies_it_as_it_is(
    target: Target, stored: Path, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's products on a CPU."""
    monkeypatch.setattr(
        loading, "_multiply_integers", lambda model, linears, _: loading._multiply_on_gpu(model, linears)
    )
    monkeypatch.setattr(loading, "multiplies", lambda *_: None)
    drafter = load_drafter_for(target, str(stored))
    assert drafter.quantization == stored.name
    for name in linear_names(drafter.config):
        assert isinstance(drafter.get_submodule(name), W8A8Linear), name
    said, _ = accepted(target, None, prompts[:7])
    drafted, length = accepted(target, drafter, prompts[:7])
    assert drafted == said
    assert length > 1.5


@each("inputs", [32, 192, 100])
def test_published_integers_are_kept(inputs: int) -> None:
    weight = quantise_int8(torch.randn(24, inputs) * torch.logspace(-2, 1, 24)[:, None])
    blocks = as_blocks(weight)
    assert torch.equal(blocks.q_NK, weight.q_EK)
    torch.testing.assert_close(blocks.weight(), weight.dequantised(), rtol=2**-10, atol=0)
    groups = QuantisedWeight(
        q_EK=weight.q_EK, scale_EG=weight.scale_EG.expand(-1, -(-inputs // 64)) * 2, bits=8, group=64
    )
    assert torch.equal(as_blocks(groups).q_NK, weight.q_EK)
    torch.testing.assert_close(as_blocks(groups).weight(), groups.dequantised(), rtol=2**-10, atol=0)


def test_other_weights_are_rounded_to_blocks() -> None:
    weight_EK = torch.randn(24, 256)
    tiny = quantise_int8(weight_EK * 1e-5)  # scales that 16 bits do not hold
    for weight in (quantise_float8(weight_EK), quantise_int4(weight_EK), tiny):
        made, meant = as_blocks(weight), quantise(weight.dequantised(), 8)
        assert torch.equal(made.weight(), meant.weight())


@each("quantization", ["none", "int8"])
def test_a_drafter_without_a_head_of_its_own_is_packed_with_the_targets(
    target: Target, tmp_path: Path, quantization: str
) -> None:
    write_checkpoint(checkpoint_of(random_drafter(drafter_config(), own_head=False)), tmp_path / "drafter")
    drafter = load_drafter_for(replace(target, quantization=quantization), str(tmp_path / "drafter"))
    assert drafter.lm_head is not None
    assert (drafter.lm_head.out_features, drafter.lm_head.in_features) == tuple(target.tables()[1].shape)
    x_ND = torch.randn(3, drafter.config.hidden_size)
    expected = nn.functional.linear(x_ND, target.tables()[1])
    assert torch.nn.functional.cosine_similarity(drafter.logits(x_ND), expected).min() > 0.99
