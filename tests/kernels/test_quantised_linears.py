"""8- and 4-bit linears by torch: results, packing, joining, and supported weights."""

from typing import Any

import pytest
import torch

from each import each
from eyas.kernels.linear.quantised_weight import QuantisedWeight, quantise_float8, quantise_int4
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear


@each("group", [32, 64, 128, 1024, 0])
@each("inputs", [512, 200, 1500])
def test_four_bits_are_packed_and_unpacked(group: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = quantise_int4(torch.randn(24, inputs), group or inputs)
    linear = W4A16Linear.of(weight, torch.randn(24), torch.float32)
    assert torch.equal(linear.weight, weight.dequantised())
    x = torch.randn(3, 5, inputs)
    expected = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_four_bits_round_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    dense = torch.randn(16, 300)
    found = quantise_int4(dense)
    step = found.scale_EG.repeat_interleave(128, dim=1)[:, :300]
    # Scales are rounded to bfloat16, so the ends of a range may be outside of it by part of a level.
    assert float(((found.dequantised() - dense).abs() / step).max()) < 0.6
    assert found.q_EK.min() >= 0
    assert found.q_EK.max() <= 15


def test_fp8_keeps_the_largest_weight_of_an_output() -> None:
    torch.manual_seed(0)
    dense = torch.randn(16, 300) * torch.logspace(-3, 3, 16)[:, None]
    found = quantise_float8(dense)
    torch.testing.assert_close(found.dequantised().abs().amax(1), dense.abs().amax(1))
    assert float(((found.dequantised() - dense).norm(dim=1) / dense.norm(dim=1)).max()) < 0.04


@each("kind", ["fp8", "int4"])
def test_joined_layers_are_their_parts(kind: str) -> None:
    torch.manual_seed(0)
    parts: list[Any] = []
    for outputs in (16, 24, 8):
        dense, bias = torch.randn(outputs, 260), torch.randn(outputs)
        if kind == "fp8":
            parts.append(W8A8Linear.of(quantise_float8(dense), bias, torch.float32))
        else:
            parts.append(W4A16Linear.of(quantise_int4(dense), bias, torch.float32))
    x = torch.randn(5, 260)
    expected = torch.cat([part(x) for part in parts], dim=1)
    whole: Any = type(parts[0]).join(parts)
    assert torch.equal(whole.product(x), expected)
    assert torch.equal(torch.cat([part(x) for part in parts], dim=1), expected)
    memory = whole.weight_EK if kind == "fp8" else whole.words_EW
    part = parts[1].weight_EK if kind == "fp8" else parts[1].words_EW
    assert part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "parts are views"
    assert whole.nbytes == sum(one.nbytes for one in parts)
    parts[0].bias = None
    assert (type(parts[0]).join(parts)) is None


def test_a_row_is_rounded_by_its_own_scale() -> None:
    torch.manual_seed(0)
    linear = W8A8Linear.of(quantise_float8(torch.randn(16, 256)), None, torch.float32)
    x = torch.randn(4, 256)
    expected = linear(x)
    x[1:] *= 1e4
    assert torch.equal(linear(x)[0], expected[0])
    exact = x @ linear.weight.t()
    assert float((linear(x) - exact).norm() / exact.norm()) < 0.05
    assert not linear(torch.zeros(1, 256)).any()


def test_inputs_are_reordered_by_group() -> None:
    torch.manual_seed(0)
    found = quantise_int4(torch.randn(16, 256))
    order = torch.randperm(256)
    sorted_ = QuantisedWeight(
        q_EK=found.q_EK, scale_EG=found.scale_EG, zero_EG=found.zero_EG, bits=4, group=128, order_K=order
    )
    linear = W4A16Linear.of(sorted_, None, torch.float32)
    assert torch.equal(linear.weight, sorted_.dequantised())
    x = torch.randn(3, 256)
    torch.testing.assert_close(linear(x), x @ sorted_.dequantised().t(), rtol=1e-4, atol=1e-4)


def test_unsupported_weights_are_not_taken() -> None:
    q, scale = torch.zeros(8, 96, dtype=torch.int8), torch.ones(8, 2)
    assert not W4A16Linear.takes(QuantisedWeight(q_EK=q, scale_EG=scale, bits=4, group=48))
    assert not W4A16Linear.takes(QuantisedWeight(q_EK=q, scale_EG=scale, bits=8, group=48))
    assert not W8A8Linear.takes(QuantisedWeight(q_EK=q, scale_EG=scale, bits=8, group=48))
    assert W8A8Linear.takes(QuantisedWeight(q_EK=q, scale_EG=scale[:, :1], bits=8, group=96))
    with pytest.raises(RuntimeError, match="no gradient"):
        W8A8Linear.of(quantise_float8(torch.ones(8, 8)), None, torch.float32)(torch.ones(1, 8, requires_grad=True))
