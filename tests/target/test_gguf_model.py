"""A GGUF file's matrices stay packed and act like their dequantised weights, up to 8-bit activations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from each import each
from eyas.engine.runner.fused_target import fused_target
from eyas.errors import UserError
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.quantised_linear import QuantisedLinear, load_quantised, quantise
from eyas.kernels.llama.packed_experts import PackedExperts
from eyas.loading import load_target
from eyas.target.gguf_blocks import blocks_of, is_packable
from eyas.target.model import Target
from tiny_gguf import tiny_model, write_gguf

FACTORS_AT = {Kind.Q6_K: (208,), Kind.Q4_0: (0,), Kind.Q5_0: (0,), Kind.Q8_0: (0,)}
"""Where a block has its half-precision factors; other kinds have two at the beginning."""
KINDS = [kind for kind in Kind if is_packable(kind)]


Load = Callable[..., Target]


@pytest.fixture(scope="module")
def load(native_cache: Path) -> Load:
    kernel, words = load_quantised(cache=native_cache)
    if kernel is None:
        pytest.skip(f"no kernel here: {words}")

    def loaded(path: Path, quantization: str = "auto", dtype: str = "auto") -> Target:
        return load_target(str(path), dtype=dtype, device="cpu", quantization=quantization, cache=native_cache)

    return loaded


@torch.no_grad()
def logits_of(target: Target) -> torch.Tensor:
    ids_BT = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(3))
    logits: torch.Tensor = target.model(input_ids=ids_BT).logits
    return logits


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_common_quantization_types_are_packable() -> None:
    assert {kind.name for kind in KINDS} >= {"Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
    assert not any(is_packable(kind) for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.IQ2_XXS))


@each("kind", KINDS)
def test_blocks_are_what_the_gguf_package_dequantises(kind: Kind) -> None:
    generator = np.random.default_rng(0)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = generator.integers(0, 256, (5, 3, size), dtype=np.uint8)
    for at in FACTORS_AT.get(kind, (0, 2)):
        factors = generator.normal(size=(5, 3, 1)).astype(np.float16)
        stored[..., at : at + 2] = factors.view(np.uint8)
    rows = stored.reshape(5, -1)
    expected = gguf.dequantize(rows, kind)
    ours = blocks_of(rows, kind, 3 * per_block).weight().numpy()
    scales_of_scales = kind.name.endswith("_K")
    assert np.abs(ours - expected).max() <= (1e-3 if scales_of_scales else 0) * np.abs(expected).max()


@each(
    ("family", "kind"),
    [
        ("llama", Kind.Q8_0),
        ("llama", Kind.Q4_0),
        ("llama", Kind.Q4_1),
        ("qwen2", Kind.Q5_0),
        ("qwen3", Kind.Q4_0),
        ("gemma3_text", Kind.Q8_0),
        ("phi3", Kind.Q4_0),
        ("qwen3_moe", Kind.Q8_0),
        ("qwen3_moe", Kind.Q4_1),
    ],
)
def test_a_packed_model_is_near_its_dequantised_weights(load: Load, family: str, kind: Kind, tmp_path: Path) -> None:
    # All experts are chosen: a near-tie could be decided differently, and change all later layers.
    everyone = {"num_experts_per_tok": 6} if family == "qwen3_moe" else {}
    path = write_gguf(tiny_model(family, **everyone), tmp_path / "m.gguf", kind=kind)
    packed, dense = load(path), load(path, "none")
    assert (packed.quantization, dense.quantization) == ("gguf", "none")
    assert 1e-5 < distance(logits_of(packed), logits_of(dense)) < 0.06
    matrices = [module for module in packed.model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert matrices == []
    assert isinstance(packed.model.get_input_embeddings(), QuantisedEmbedding)
    torch.testing.assert_close(packed.embedding(), dense.embedding().float(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(packed.head(), dense.head().float(), rtol=1e-2, atol=1e-3)
    assert packed.stop_ids() == dense.stop_ids()


@each("tied", [False, True])
def test_a_tied_head_is_the_memory_of_the_embeddings(tied: bool, load: Load, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(tie_word_embeddings=tied), tmp_path / "m.gguf", kind=Kind.Q8_0)
    model: Any = load(path).model
    assert (model.lm_head is model.model.embed_tokens.table) == tied


@each("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_a_packed_model_runs_fused_in_one_call(load: Load, family: str, tmp_path: Path) -> None:
    fused = fused_target(load(write_gguf(tiny_model(family), tmp_path / "m.gguf", kind=Kind.Q4_1)))
    assert fused is not None
    assert fused.layers is not None
    assert fused.quantised


def test_packed_experts_run_fused_and_as_the_models_own_code_does(load: Load, tmp_path: Path) -> None:
    target = load(write_gguf(tiny_model("qwen3_moe"), tmp_path / "m.gguf", kind=Kind.Q8_0))
    fused, model = fused_target(target), target.model
    assert fused is not None
    assert fused.quantised
    assert fused.layers is None  # experts are not part of the single call
    experts = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == 3
    assert all(isinstance(product, QuantisedLinear) for one in experts for pair in one.products for product in pair)
    x_ND, route = torch.randn(7, 64), (torch.tensor([[0, 5]] * 7), torch.rand(7, 2))
    whole = experts[0](x_ND, *route)
    assert all(
        torch.equal(whole[n : n + 1], experts[0](x_ND[n : n + 1], *(x[n : n + 1] for x in route))) for n in range(7)
    )


def test_experts_without_an_integer_product_are_computed_from_bfloat16(load: Load, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_experts_per_tok=6)
    names = [f"blk.{layer}.ffn_down_exps.weight" for layer in range(3)]
    path = write_gguf(model, tmp_path / "m.gguf", kind=Kind.Q8_0, kinds=dict.fromkeys(names, Kind.F16))
    packed = load(path)
    assert packed.quantization == "gguf"
    assert distance(logits_of(packed), logits_of(load(path, "none"))) < 0.06


def test_the_packed_weights_keep_the_size_of_the_file(load: Load, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", kind=Kind.Q4_1)
    linears = [module for module in load(path).model.modules() if isinstance(module, QuantisedLinear)]
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    assert sum(linear.nbytes for linear in linears) <= 5.2 / 8 * weights


def test_types_without_an_integer_kernel_are_computed_from_bfloat16_and_logged(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    with caplog.at_level(logging.INFO):
        load(write_gguf(model, tmp_path / "m.gguf", kind=Kind.Q8_0))
    assert "bfloat16" not in caplog.text
    mixed = write_gguf(
        model, tmp_path / "mixed.gguf", kind=Kind.Q8_0, kinds={"token_embd.weight": Kind.F16, "output.weight": Kind.F16}
    )
    with caplog.at_level(logging.INFO):
        target = load(mixed)
    assert "computed from bfloat16: " in caplog.text
    assert "F16" in caplog.text
    assert distance(logits_of(target), logits_of(load(mixed, "none"))) < 0.06


def test_a_file_without_quantised_matrices_is_not_packed(load: Load, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    assert load(path).quantization == "none"
    with pytest.raises(UserError, match="is not a GGUF file with quantised matrices"):
        load(path, "gguf")


def test_a_requested_dtype_is_used_or_refused(load: Load, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", kind=Kind.Q8_0)
    assert load(path, dtype="float32").quantization == "none"
    assert load(path, "gguf", dtype="float32").quantization == "gguf"
    with pytest.raises(UserError, match="computes in float32, not in bfloat16"):
        load(path, "gguf", dtype="bfloat16")


@each("quantization", ["int8", "int4"])
@each("tied", [False, True])
def test_any_target_is_quantised_on_the_fly(load: Load, quantization: str, tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(tie_word_embeddings=tied), tmp_path / "m.gguf")
    ours, theirs = load(path, quantization), Target.load(str(path), dtype="float32", cache=tmp_path)
    dense: Any = theirs.model
    with torch.no_grad():
        for name, linear in [(name, part) for name, part in dense.named_modules() if isinstance(part, nn.Linear)]:
            bits: Literal[4, 8] = 4 if quantization == "int4" and name != "lm_head" else 8
            linear.weight.copy_(quantise(linear.weight, bits).weight())
    assert ours.quantization == quantization
    assert 1e-5 < distance(logits_of(ours), logits_of(theirs)) < 0.06
    assert not any(isinstance(module, nn.Linear) for module in ours.model.modules())
    assert isinstance(ours.model.get_input_embeddings(), QuantisedEmbedding) == tied
    fused = fused_target(ours)
    assert fused is not None
    assert fused.layers is not None


def test_an_unknown_quantization_is_refused(load: Load, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    with pytest.raises(UserError, match="unknown quantization 'fp7'; use one of auto, none, fp8, int8, int4, gguf"):
        load(path, "fp7")


def test_without_a_compiler_a_file_is_dequantised_and_logged(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", kind=Kind.Q8_0)
    monkeypatch.setattr("eyas.loading.load_quantised", lambda **_: (None, "no C compiler found"))
    with caplog.at_level(logging.INFO):
        assert load(path).quantization == "none"
    assert "dequantised to bfloat16: there are no integer products here (no C compiler found)" in caplog.text
    with pytest.raises(UserError, match="--quantization gguf needs a C compiler"):
        load(path, "gguf")
