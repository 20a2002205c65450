from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from each import each
from eyas.kernels.linear.embedding_table import QuantisedEmbedding
from eyas.kernels.linear.quantised_linear import (
    BLOCK,
    FORMATS,
    FOUR_BITS,
    MINIMA,
    SCALES_OF_HALVES,
    Blocks,
    QuantisedKernel,
    QuantisedLinear,
    load_quantised,
    quantise,
)
from kernels.random_quantised import random_blocks

SHAPES = [(1, 1), (3, 33), (16, 64), (50, 300), (61, 1100), (192, 576)]  # outputs, inputs


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=[None, "PORTABLE"])
def kernel(request: pytest.FixtureRequest, native_cache: Path) -> QuantisedKernel:
    found, words = load_quantised(cache=native_cache, form=request.param)
    if found is None:
        pytest.skip(f"no kernel here: {words}")
    assert request.param is None or found.uses == "plain C"
    return found


def random_rows(rows: int, inputs: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) * (1 + 9 * torch.rand(1, inputs, generator=generator))


def slowly(x_MK: Tensor, blocks: Blocks) -> np.ndarray:
    """The integer arithmetic, block by block, with float64 outside of the integers."""
    rows, inputs = x_MK.shape
    count = -(-inputs // BLOCK)
    padding = (0, count * BLOCK - inputs)
    x = functional.pad(x_MK, padding).view(rows, count, BLOCK).numpy()
    most = np.abs(x).max(axis=-1, keepdims=True)
    scale = (most / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(127), most, where=most > 0, out=np.zeros_like(most))
    q = np.rint((x * inverse).astype(np.float32)).astype(np.int64)
    w = functional.pad(blocks.q_NK, padding).numpy().astype(np.int64).reshape(-1, count, BLOCK)
    halves = blocks.scale_NS.shape[1] // count
    y = np.zeros((rows, len(w)))
    for part in np.split(np.arange(BLOCK), halves):
        dots = np.einsum("mbi,nbi->mbn", q[..., part], w[..., part])
        scales = blocks.scale_NS.float().numpy().reshape(len(w), count, halves)[..., part[0] * halves // BLOCK]
        y += np.einsum("mbn,nb,mb->mn", dots, scales.astype(float), scale[..., 0].astype(float))
    if blocks.minimum_NB is not None:
        sums = q.sum(axis=-1) * scale[..., 0].astype(float)
        y += np.einsum("mb,nb->mn", sums, blocks.minimum_NB.double().numpy())
    return y


@each(("outputs", "inputs"), SHAPES)
@each("format_", FORMATS)
def test_it_computes_its_documented_integer_arithmetic(kernel, format_, outputs, inputs):
    blocks, x_MK = random_blocks(format_, outputs, inputs), random_rows(9, inputs)
    layer = QuantisedLinear.of(kernel, blocks)
    for rows in (1, 2, 3, 4, 9):
        expected = slowly(x_MK[:rows], blocks)
        error = np.abs(layer(x_MK[:rows]).numpy() - expected).max()
        assert error <= 3e-6 * np.abs(expected).max() + 1e-7


@each("format_", FORMATS)
def test_it_is_the_product_of_dequantised_weights_up_to_the_error_of_8_bits(kernel, format_):
    blocks, x_MK = random_blocks(format_, 64, 576), random_rows(5, 576)
    expected = functional.linear(x_MK, blocks.weight())
    error = (QuantisedLinear.of(kernel, blocks)(x_MK) - expected).norm() / expected.norm()
    assert 1e-4 < error < 1.5e-2


@each("inputs", [96, 100, 1100])
@each("format_", FORMATS)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(kernel, threads, format_, inputs):
    layer = QuantisedLinear.of(kernel, random_blocks(format_, 51, inputs), torch.randn(51))
    x_MK = random_rows(141, inputs)
    together = layer(x_MK)
    for rows in (1, 2, 3, 4, 5, 7, 16, 33, 65):
        for first in (0, 3, 64):
            assert torch.equal(layer(x_MK[first : first + rows]), together[first : first + rows])


def test_the_number_of_threads_changes_no_bit(kernel):
    layer, x_MK = QuantisedLinear.of(kernel, random_blocks(FOUR_BITS, 500, 320)), random_rows(9, 320)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(layer(x_MK))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], one) for one in results)


def test_linears_of_several_formats_are_joined_to_one_product(kernel):
    linears = [
        QuantisedLinear.of(kernel, random_blocks(format_, outputs, 96, seed=format_), bias)
        for format_, outputs, bias in (
            (0, 20, None),
            (FOUR_BITS | MINIMA, 3, torch.randn(3)),
            (SCALES_OF_HALVES, 17, None),
        )
    ]
    joined, x_MK = QuantisedLinear.join(linears), random_rows(6, 96)
    assert torch.equal(joined(x_MK), torch.cat([linear(x_MK) for linear in linears], dim=1))
    assert torch.equal(joined.weight, torch.cat([linear.weight for linear in linears]))
    assert joined.nbytes == sum(linear.nbytes for linear in linears)
    assert joined.panels[0].bytes_PBX.data_ptr() == linears[0].panels[0].bytes_PBX.data_ptr()


@each("format_", FORMATS)
def test_embeddings_are_rows_of_the_packed_matrix(kernel, format_):
    blocks = random_blocks(format_, 37, 90)
    table = QuantisedLinear.of(kernel, blocks)
    ids = torch.tensor([[0, 36, 5], [5, 8, 7]])
    torch.testing.assert_close(QuantisedEmbedding(table)(ids), blocks.weight()[ids], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(table.weight, blocks.weight(), rtol=1e-6, atol=1e-6)
    assert torch.equal(QuantisedEmbedding(table, 3.0)(ids), QuantisedEmbedding(table)(ids) * 3.0)


def test_packed_weights_take_the_bits_they_say(kernel):
    weight_NK = torch.randn(96, 320)
    sizes = {4: 5.0, 8: 8.5}
    for bits, per_weight in sizes.items():
        assert QuantisedLinear.of(kernel, quantise(weight_NK, bits)).nbytes * 8 == per_weight * weight_NK.numel()


@each(("bits", "allowed"), [(8, 6e-3), (4, 9e-2)])
@each("inputs", [40, 256])
def test_quantised_weights_are_near_the_weights(bits, allowed, inputs):
    weight_NK = torch.randn(48, inputs)
    weight_NK[0] = 0
    blocks = quantise(weight_NK, bits)
    assert (blocks.weight() - weight_NK).norm() < allowed * weight_NK.norm()
    assert torch.equal(blocks.weight()[0], weight_NK[0])


def test_nan_and_infinity_stay_so(kernel):
    layer = QuantisedLinear.of(kernel, random_blocks(0, 16, 64))
    for odd in (float("nan"), float("inf")):
        x_MK = torch.ones(2, 64)
        x_MK[0, 40] = odd
        y_MN = layer(x_MK)
        assert not y_MN[0].isfinite().any()
        assert y_MN[1].isfinite().all()


def test_zeros_and_subnormal_numbers(kernel):
    layer = QuantisedLinear.of(kernel, random_blocks(0, 16, 64), torch.arange(16.0))
    assert torch.equal(layer(torch.zeros(1, 64)), torch.arange(16.0)[None])
    assert layer(torch.full((1, 64), 1e-40)).isfinite().all()


def test_copies_have_weights_of_their_own_and_training_is_refused(kernel):
    layer = QuantisedLinear.of(kernel, random_blocks(0, 16, 64), torch.arange(16.0))
    model = nn.Sequential(layer)
    copied, x_MK = deepcopy(model), torch.randn(2, 64)
    before_MN = layer(x_MK)
    for panels in layer.panels:
        panels.bytes_PBX.zero_()
        panels.bias_N.zero_()
    assert torch.equal(copied(x_MK), before_MN)
    assert not layer(x_MK).any()
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no gradient"):
        layer(torch.ones(1, 64, requires_grad=True))


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found, words = load_quantised(cache=tmp_path)
    assert found is None
    assert "no C compiler" in words
