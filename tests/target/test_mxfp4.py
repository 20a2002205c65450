"""gpt-oss as published, with MXFP4 experts, is read as transformers reads it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from each import each
from engine.test_quantised_target import answers
from eyas.engine.config import EngineConfig, weight_bytes
from eyas.engine.engine import Engine
from eyas.engine.request import Speculation
from eyas.engine.runner.fused_target import fused_target
from eyas.errors import UserError
from eyas.kernels.linear.mxfp4_weight import Mxfp4Weight, dequantised_mxfp4
from eyas.kernels.llama.mxfp4_experts import FourBitExperts, Mxfp4Experts
from eyas.loading import load_target
from eyas.plan.decoder import read_decoder
from eyas.plan.footprint import target_bytes
from eyas.plan.quantisation import stored_quantisation
from eyas.sampling import Sampling
from eyas.target import quantised_checkpoint
from eyas.target.model import Target
from mxfp4_checkpoint import random_mxfp4, save_mxfp4, write_mxfp4


def drawn(*shape: int, exponents: tuple[int, int] = (119, 124)) -> tuple[Tensor, Tensor]:
    return random_mxfp4(*shape, generator=torch.Generator().manual_seed(3), exponents=exponents)


def transformers_own(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint."""
    config = Mxfp4Config(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()
    return model.float() if dtype == torch.float32 else model  # experts would stay in bfloat16


@each("dtype", [torch.bfloat16, torch.float32])
@each("inputs", [32, 96, 128, 160, 416])
def test_numbers_are_those_of_transformers(inputs: int, dtype: torch.dtype) -> None:
    pairs, exponents = drawn(3, 10, inputs, exponents=(1, 250))
    theirs = convert_moe_packed_tensors(pairs, exponents, dtype=dtype).mT
    assert torch.equal(dequantised_mxfp4(pairs, exponents, dtype), theirs)
    packed = Mxfp4Weight.of(pairs, exponents)
    assert all(torch.equal(packed.dequantised(expert, dtype), theirs[expert]) for expert in range(3))
    assert (packed.count, packed.outputs, packed.inputs) == (3, 10, inputs)


def test_the_least_exponent_is_valid() -> None:
    pairs, exponents = torch.full((1, 1, 1, 16), 0x21, dtype=torch.uint8), torch.zeros(1, 1, 1, dtype=torch.uint8)
    expected = torch.tensor([0.5, 1.0]).repeat(16) * 2.0**-127
    assert torch.equal(dequantised_mxfp4(pairs, exponents, torch.float32)[0, 0], expected)


def test_packed_weights_take_four_and_a_quarter_bits() -> None:
    weight = Mxfp4Weight.of(*drawn(2, 8, 1024))
    assert sum(x.nbytes for x in weight.packed()) * 8 == 4.25 * 2 * 8 * 1024


@each("dtype", ["bfloat16", "float32"])
def test_logits_are_those_of_transformers(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_mxfp4(tmp_path)
    caplog.set_level(logging.INFO, logger="eyas")
    target = Target.load(str(tmp_path), dtype=dtype)
    assert f"6 matrices of mxfp4 are dequantised to {dtype}" in caplog.text
    assert "MB): kernels for this kind of 8- and 4-bit weights run on a GPU only" in caplog.text
    assert target.quantization == "none"
    theirs = transformers_own(tmp_path, getattr(torch, dtype))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(target.model.state_dict()[name].float(), weight.float()), name
    for name, weight in theirs.named_parameters():  # another memory layout changes the order of sums
        if weight.ndim == 3:
            assert name.endswith("_proj")
            weight.data = weight.data.mT.contiguous().mT
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(target.forward(ids, (1,)).logits_BTV, theirs(ids).logits)


@pytest.fixture
def packed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts stay packed; torch computes what the kernels do on a GPU."""
    monkeypatch.setattr(quantised_checkpoint, "multiplies", lambda *_: None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.usefixtures("packed_on_a_cpu")
def test_packed_experts_give_the_same_logits(dtype: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    target = Target.load(str(tmp_path), dtype=dtype)
    experts = [part for part in target.model.modules() if isinstance(part, Mxfp4Experts)]
    assert len(experts) == 3
    assert target.quantization == "mxfp4"
    ids = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(2))
    theirs = transformers_own(tmp_path, getattr(torch, dtype))
    with torch.no_grad():
        ours, expected = target.forward(ids, (1,)).logits_BTV, theirs(ids).logits
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(ours, expected, **close)
    in_16_bits = sum(2 * experts[0].gate_up.count * w.outputs * w.inputs for w in (experts[0].gate_up, experts[0].down))
    assert experts[0].nbytes < in_16_bits / 2.5
    others = sum(x.nbytes for x in (*target.model.parameters(), *target.model.buffers()))
    assert weight_bytes(target.model) == others + sum(part.nbytes for part in experts)


@pytest.mark.usefixtures("packed_on_a_cpu")
def test_batches_change_nothing_of_packed_experts(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32")
    fused = fused_target(target)
    assert fused is not None, "the fused pass must be the one that is tested"
    assert all(isinstance(block.mlp, FourBitExperts) for block in fused.blocks)
    engine = Engine(target, None, config=EngineConfig(max_num_seqs=3, max_model_len=64))
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(3, 90, (3 + k,), generator=generator).tolist()) for k in range(3)]
    off = Speculation(mode="off")
    alone = [answers(engine, [prompt], off, Sampling(), seed=seed)[0] for seed, prompt in enumerate(prompts)]
    assert answers(engine, prompts, off, Sampling()) == alone
    theirs = transformers_own(tmp_path, torch.float32)
    theirs.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, alone, strict=True):
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False)
        assert answer == made[0, len(prompt) :].tolist()


def test_a_cpu_serves_it_dequantised(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    target = load_target(str(tmp_path), dtype="auto", device="cpu")
    assert target.quantization == "none"
    assert fused_target(target) is not None


@pytest.mark.usefixtures("packed_on_a_cpu")
def test_planned_bytes_are_loaded_bytes(tmp_path: Path) -> None:
    write_mxfp4(tmp_path, hidden_size=256, intermediate_size=384)
    config = json.loads((tmp_path / "config.json").read_text())
    planned = stored_quantisation(config, "gpt-oss")
    assert (planned.name, planned.bits, planned.expert_bits, planned.dtype) == ("mxfp4", 16, 4.25, "bfloat16")
    loaded = weight_bytes(Target.load(str(tmp_path), dtype="bfloat16").model)
    assert target_bytes(read_decoder(config, "gpt-oss"), planned, device="cuda") == pytest.approx(loaded, rel=1e-3)


def without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def without_bias(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_bias"]


def of_another_shape(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name][:, :, :-1]


def no_number(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.experts.gate_up_proj_scales"][0, 3, 1] = 255


def of_another_type(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].float()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, r"layers\.1\.mlp\.experts\.down_proj has no down_proj_scales, which MXFP4 needs"),
        (without_bias, r"lacks 1 weights of its architecture, the first is model\.layers\.1.*down_proj_bias"),
        (
            of_another_shape,
            r"uint8 of shape \(6, 320, 2, 16\) in the file, and config.json makes .*3, 16\)",
        ),
        (of_another_type, r"down_proj has float32 of shape \(6, 96, 5\) in the file"),
        (no_number, r"layers\.2.*gate_up_proj has scales of 255, which stands for NaN"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["dequantised", "packed"])
def test_broken_checkpoints_are_refused(
    change: Callable[[dict[str, Tensor]], None], words: str, packed: bool, tmp_path: Path, request: Any
) -> None:
    if packed:
        request.getfixturevalue("packed_on_a_cpu")
    tensors = write_mxfp4(tmp_path)
    change(tensors)
    save_mxfp4(tmp_path, tensors, json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UserError, match=words):
        Target.load(str(tmp_path), dtype="float32")


def test_weights_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    tensors = write_mxfp4(tmp_path)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][:] = 127 + 16
    save_mxfp4(tmp_path, tensors, json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UserError, match="weights above 65504"):
        Target.load(str(tmp_path), dtype="float16")
