"""Products with 8- and 4-bit weights equal torch's in float32; rows do not depend on each other.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.linear.quantised_weight import (
    FLOAT8,
    QuantisedWeight,
    quantise_float8,
    quantise_int4,
)
from eyas.kernels.linear.w4a16_linear import W4A16Linear
from eyas.kernels.linear.w8a8_linear import W8A8Linear

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cannot multiply bfloat16


def made(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def near(ours: Tensor, exact: Tensor) -> None:
    relative, absolute = (1.6e-2, 3e-2) if ours.dtype == torch.bfloat16 else (2e-3, 4e-3)
    torch.testing.assert_close(ours.float(), exact.float(), rtol=relative, atol=absolute)


def near_sums(ours: Tensor, exact: Tensor, linear: W8A8Linear, x: Tensor) -> None:
    """Deviation by rounding of outputs and sums; the device keeps about 13 bits of the largest term."""
    terms = x.float().abs() @ linear.weight.float().abs().t()
    assert ((ours.float() - exact.float()).abs() <= 2**-8 * exact.abs() + 2**-12 * terms).all()


def eight_bits(kind: str, weight_EK: Tensor) -> QuantisedWeight:
    outputs, inputs = weight_EK.shape
    if kind == "fp8":
        return quantise_float8(weight_EK)
    if kind == "int8":
        scale = weight_EK.abs().amax(dim=1, keepdim=True) / 127
        return QuantisedWeight(q_EK=(weight_EK / scale).round().to(torch.int8), scale_EG=scale, bits=8, group=inputs)
    scale = torch.rand(outputs, -(-inputs // 128), device=DEVICE) + 0.5
    q_EK = (weight_EK * 100).to(FLOAT8)
    return QuantisedWeight(q_EK=q_EK, scale_EG=scale * 0.01, bits=8, group=128)


def rounded_rows(x: Tensor, dtype: torch.dtype, padded: int) -> tuple[Tensor, Tensor]:
    """By the kernel, or by torch instead of the interpreter, which loses carries while rounding to fp8."""
    from eyas.kernels.linear.w8a8_triton import quantise_rows

    if DEVICE.type == "cuda" or dtype != FLOAT8:
        return quantise_rows(x, dtype, padded)
    most = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    q = torch.nn.functional.pad(x.float() * (448 / most), (0, padded - x.shape[1])).clamp(-448, 448).to(FLOAT8)
    return q, (most / 448).flatten()


def decoded(linear: W8A8Linear | W4A16Linear, x: Tensor) -> Tensor:
    """By the kernels, on any device."""
    from eyas.kernels.linear import w8a8_triton as kernels

    out = x.new_empty(len(x), linear.out_features)
    if isinstance(linear, W4A16Linear):
        from eyas.kernels.linear.w4a16_triton import w4a16_decode

        weight = linear.words_EW, linear.scales_GE, linear.scale_dtype, linear.group, linear.plane
        return w4a16_decode(x, *weight, linear.bias, out, arrived=linear.arrived)
    q, scale = rounded_rows(x, linear.weight_EK.dtype, linear.weight_EK.shape[1])
    return kernels.w8a8_decode(
        q, scale, linear.weight_EK, linear.scale_EG, linear.group, linear.bias, out, arrived=linear.arrived
    )


@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks"])
@pytest.mark.parametrize(("inputs", "outputs", "biased"), [(256, 48, True), (200, 33, False), (400, 80, True)])
def test_eight_bits(kind: str, inputs: int, outputs: int, biased: bool) -> None:
    from eyas.kernels.linear.w8a8_triton import scale_outputs

    torch.manual_seed(0)
    weight = eight_bits(kind, made(outputs, inputs, scale=inputs**-0.5))
    linear = W8A8Linear.of(weight, made(outputs) if biased else None, HALF)
    x = made(16, inputs, dtype=HALF)
    x[1] *= 100
    x[2] = 0
    expected = linear._by_torch(x)
    ours = decoded(linear, x)
    near_sums(ours, expected, linear, x)
    for rows in (1, 4, 9):
        assert torch.equal(decoded(linear, x[:rows]), ours[:rows])
        assert torch.equal(decoded(linear, x[-rows:].contiguous()), ours[-rows:])
    if kind != "blocks":
        q, scale = rounded_rows(x, weight.q_EK.dtype, linear.weight_EK.shape[1])
        product = (q.float() @ linear.weight_EK.float().t()).contiguous()
        behind = scale_outputs(product, scale, linear.scale_EG, linear.bias, torch.empty_like(ours))
        near_sums(behind, expected, linear, x)


@pytest.mark.parametrize("kind", [FLOAT8, torch.int8])
@pytest.mark.parametrize("size", [64, 200])
def test_rows_are_rounded_as_torch_rounds_them(kind: torch.dtype, size: int) -> None:
    from eyas.kernels.linear.w8a8_triton import quantise_rows

    torch.manual_seed(0)
    x, largest = made(5, size, dtype=HALF), 448.0 if kind == FLOAT8 else 127.0
    padded = 256
    q, scale = quantise_rows(x, kind, padded)
    most = x.float().abs().amax(dim=1)
    torch.testing.assert_close(scale, most / largest)
    exact = x.float() * (largest / most[:, None])
    rounded = exact.to(FLOAT8).float() if kind == FLOAT8 else (exact + 0.5).floor()
    # The last bit of a division may matter, and the interpreter loses carries while rounding to fp8.
    allowed = 0.05 if kind == FLOAT8 and DEVICE.type == "cpu" else 0.01
    assert (q[:, :size].float() != rounded).float().mean() < allowed
    assert not q[:, size:].float().any()


@pytest.mark.parametrize("kind", [FLOAT8, torch.int8])
@pytest.mark.parametrize(("size", "padded"), [(64, 128), (200, 256), (5000, 5120)])
def test_norms_and_gates_round_rows_as_if_apart(kind: torch.dtype, size: int, padded: int) -> None:
    from eyas.kernels.linear.w8a8_triton import gate_quantise, quantise_rows, rows_for
    from eyas.kernels.llama.block_triton import add_norm, gate, launch_add_norm

    torch.manual_seed(0)
    weight = torch.zeros(16, padded, device=DEVICE).to(kind)
    x, more = made(3, size, dtype=HALF), made(3, size, dtype=HALF)
    norm = FusedNorm(torch.rand(size, device=DEVICE).add(0.5).to(HALF), 1e-5)
    apart, together = x.clone(), x.clone()
    expected = quantise_rows(add_norm(apart, more, None, norm), kind, padded)
    ours = rows_for(3, weight)
    launch_add_norm(together, more, None, norm, *ours)
    assert torch.equal(together, apart)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, expected, strict=True))

    for activation in Activation:
        gate_up, let_through = made(3, 2 * size, dtype=HALF), made(3, size, dtype=HALF)
        gate(gate_up, activation, let_through)
        expected = quantise_rows(let_through, kind, padded)
        ours = gate_quantise(gate_up, activation, *rows_for(3, weight))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("group", [32, 64, 128, 512, 0])
@pytest.mark.parametrize(("inputs", "outputs", "biased"), [(512, 48, True), (640, 33, False), (1024, 16, True)])
def test_four_bits(group: int, inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight = quantise_int4(made(outputs, inputs, scale=inputs**-0.5), group or inputs)
    assert W4A16Linear.takes(weight)
    linear = W4A16Linear.of(weight, made(outputs) if biased else None, HALF)
    x = made(16, inputs, dtype=HALF)
    exact = x.float() @ weight.dequantised().t() + (0 if linear.bias is None else linear.bias.float())
    ours = decoded(linear, x)
    near(ours, exact)
    for rows in (1, 4, 9):
        assert torch.equal(decoded(linear, x[:rows]), ours[:rows])
        assert torch.equal(decoded(linear, x[-rows:].contiguous()), ours[-rows:])


@pytest.mark.parametrize("group", [32, 128])
def test_four_bits_alone(group: int) -> None:
    from eyas.kernels.linear.w4a16_triton import w4a16_dequantise

    torch.manual_seed(0)
    weight = quantise_int4(made(20, 640), group)
    linear = W4A16Linear.of(weight, None, HALF)
    packed = linear.words_EW, linear.scales_GE, linear.scale_dtype, linear.group, linear.plane
    ours = w4a16_dequantise(*packed, 640, HALF)
    assert torch.equal(ours, weight.dequantised().to(HALF))


@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks", "int4"])
def test_a_row_is_the_same_in_every_tile(kind: str) -> None:
    """Across the tilings of 1 to 200 rows, which `w8a8_tiling` and `w4a16_tiling` choose on a GPU."""
    torch.manual_seed(0)
    outputs, inputs, most = (4400, 1024, 200) if DEVICE.type == "cuda" else (80, 512, 70)
    dense = made(outputs, inputs, scale=inputs**-0.5)
    linear: W8A8Linear | W4A16Linear
    if kind == "int4":
        linear = W4A16Linear.of(quantise_int4(dense), None, HALF)
    else:
        linear = W8A8Linear.of(eight_bits(kind, dense), None, HALF)
    x = made(most, inputs, dtype=HALF)
    every = decoded(linear, x)
    for rows in (1, 3, 8, 9, 16, 17, 32, 33, 64):
        assert torch.equal(decoded(linear, x[:rows]), every[:rows])


@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks", "int4"])
@pytest.mark.parametrize("splits", [2, 3])
def test_programs_that_share_outputs(kind: str, splits: int) -> None:
    """Partial sums are added in the same order in every run, and counters are zero afterwards."""
    from eyas.kernels.linear.w4a16_triton import w4a16_decode, w4a16_tiling
    from eyas.kernels.linear.w8a8_triton import w8a8_decode, w8a8_tiling

    torch.manual_seed(0)
    dense, x = made(100, 1280, scale=1 / 36), made(20, 1280, dtype=HALF)
    arrived = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    four = W4A16Linear.of(quantise_int4(dense), None, HALF)
    eight = None if kind == "int4" else W8A8Linear.of(eight_bits(kind, dense), None, HALF)

    def ours(splits: int) -> Tensor:
        out = x.new_empty(20, 100)
        if eight is None:
            packed = four.words_EW, four.scales_GE, four.scale_dtype, four.group, four.plane
            tiling = replace(w4a16_tiling(20, 100, 1280), splits=splits)
            return w4a16_decode(x, *packed, None, out, arrived=arrived, tiling=tiling)
        tiling = replace(w8a8_tiling(20, 100, 1280), splits=splits)
        rows, weight = rounded_rows(x, eight.weight_EK.dtype, 1280), (eight.weight_EK, eight.scale_EG, eight.group)
        return w8a8_decode(*rows, *weight, None, out, arrived=arrived, tiling=tiling)

    parts = ours(splits)
    near(parts, ours(1))
    assert torch.equal(ours(splits), parts)
    assert not arrived.any()


@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks", "int4"])
def test_prompts_and_decoding_agree(kind: str) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("the general products are those of a GPU")
    torch.manual_seed(0)
    dense, x = made(512, 1024, scale=1 / 32), made(300, 1024, dtype=HALF)
    linear: W8A8Linear | W4A16Linear
    if kind == "int4":
        linear = W4A16Linear.of(quantise_int4(dense), made(512), HALF)
    else:
        linear = W8A8Linear.of(eight_bits(kind, dense), made(512), HALF)
    near(linear.product(x), linear.product(x, decoding=True))
    near(linear(x[None])[0], linear.product(x, decoding=True))
