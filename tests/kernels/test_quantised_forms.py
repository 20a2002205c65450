"""All forms of the integer products give the same bits on one CPU: AMX, AVX-512 VNNI, AVX2, NEON and plain C."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from each import each
from eyas.kernels.linear import quantised_linear
from eyas.kernels.linear.quantised_linear import (
    FORMATS,
    FOUR_BITS,
    MINIMA,
    SCALES_OF_HALVES,
    TILED_ROWS,
    Form,
    QuantisedKernel,
    QuantisedLinear,
    load_quantised,
)
from kernels.random_quantised import random_blocks

SHAPES = [(1, 1), (3, 33), (16, 64), (50, 300), (61, 1100), (192, 576)]  # outputs, inputs
ROWS = (1, 8, 15, 16, 17, 31, 32, 33, 47, 128, 129, 144, 300)  # groups have 16, stripes 128


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def of_form(form: Form | None, cache: Path) -> QuantisedKernel:
    kernel, words = load_quantised(cache=cache, form=form)
    if kernel is None:
        pytest.skip(f"no kernel here: {words}")
    return kernel


@pytest.fixture(scope="module")
def plain(native_cache: Path) -> QuantisedKernel:
    kernel = of_form("PORTABLE", native_cache)
    assert kernel.uses == "plain C"
    return kernel


@pytest.fixture(scope="module")
def best(native_cache: Path) -> QuantisedKernel:
    return of_form(None, native_cache)


@pytest.fixture
def tiled(best: QuantisedKernel):
    if not best.tiles:
        pytest.skip(f"no AMX int8 here, products are by {best.uses}; run on a Xeon whose lscpu names amx_int8")
    yield best
    best.use_tiles(True)


def random_rows(rows: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x_MK = torch.randn(rows, inputs, generator=generator) * (1 + 9 * torch.rand(1, inputs, generator=generator))
    x_MK[rows // 2] = 0.0
    return x_MK


@each("form", ["NEON", "VNNI", "AVX2"])
@each("format_", FORMATS)
def test_vectors_give_the_bits_of_plain_c(native_cache, plain, form, format_):
    kernel = of_form(form, native_cache)
    assert kernel.uses != plain.uses
    assert not kernel.tiles
    _assert_same(kernel, plain, format_, (1, 2, 5, 9, 33))


@each("format_", FORMATS)
def test_the_form_that_runs_gives_the_bits_of_plain_c(best, plain, format_):
    _assert_same(best, plain, format_, (1, 3, 16, 37))


@each("format_", FORMATS)
def test_tiles_give_the_bits_of_plain_c(tiled, plain, threads, format_):
    _assert_same(tiled, plain, format_, ROWS)


def _assert_same(kernel: QuantisedKernel, other: QuantisedKernel, format_: int, several: tuple[int, ...]) -> None:
    for outputs, inputs in SHAPES:
        blocks, bias_N, x_MK = random_blocks(format_, outputs, inputs), torch.randn(outputs), random_rows(300, inputs)
        layer, plainly = (QuantisedLinear.of(one, blocks, bias_N) for one in (kernel, other))
        for rows in several:
            y_MN, expected_MN = layer(x_MK[-rows:]), plainly(x_MK[-rows:])
            assert torch.equal(y_MN.view(torch.int32), expected_MN.view(torch.int32)), (outputs, inputs, rows)


@each("format_", FORMATS)
def test_a_row_has_the_same_bits_with_tiles_and_without(tiled, threads, format_):
    layer = QuantisedLinear.of(tiled, random_blocks(format_, 51, 1100), torch.randn(51))
    x_MK = random_rows(200, 1100)
    alone_MN = torch.cat([layer(x_M) for x_M in x_MK.split(1)])
    for rows in ROWS[:-1]:
        for first in (0, 3, 64):
            assert torch.equal(layer(x_MK[first : first + rows]), alone_MN[first : first + rows])
    tiled.use_tiles(False)
    assert not tiled.tiles
    assert torch.equal(layer(x_MK), alone_MN)


def test_formats_with_different_tile_shapes_are_joined(tiled, threads):
    kinds = (0, SCALES_OF_HALVES, FOUR_BITS | MINIMA, SCALES_OF_HALVES, FOUR_BITS)
    linears = [QuantisedLinear.of(tiled, random_blocks(kind, 20 + kind, 96, seed=kind)) for kind in kinds]
    x_MK = random_rows(40, 96)
    together_MN = torch.cat([linear(x_MK) for linear in linears], dim=1)
    assert torch.equal(QuantisedLinear.join(linears)(x_MK), together_MN)


def test_nan_stays_nan_in_tiles(tiled):
    layer, x_MK = QuantisedLinear.of(tiled, random_blocks(0, 16, 64)), torch.ones(TILED_ROWS, 64)
    x_MK[5, 40] = float("nan")
    finite_M = layer(x_MK).isfinite().all(dim=1)
    assert finite_M.tolist() == [row != 5 for row in range(TILED_ROWS)]


def test_wrong_tiles_are_switched_off_with_a_warning(best, native_cache, monkeypatch, caplog):
    """The trial is made to see a difference: no CPU here has one."""
    monkeypatch.setattr(QuantisedKernel, "tiles", True)
    monkeypatch.setattr(quantised_linear, "_differing_with_tiles", lambda kernel: "16 rows by 4 bits (format 1)")
    switched = []
    monkeypatch.setattr(QuantisedKernel, "use_tiles", lambda kernel, wanted: switched.append(wanted))
    with caplog.at_level(logging.WARNING):
        found, _ = load_quantised(cache=native_cache)
    assert found is not None
    assert switched == [False]
    assert "AMX int8 is off: 16 rows by 4 bits (format 1) gave other results" in caplog.text


def test_the_trial_sees_a_difference(best, monkeypatch):
    wanted = [True]
    monkeypatch.setattr(QuantisedKernel, "use_tiles", lambda kernel, now: wanted.append(now))
    assert quantised_linear._differing_with_tiles(best) == ""
    product = QuantisedKernel.linear

    def off_by_a_bit(kernel: QuantisedKernel, x: Tensor, layer: QuantisedLinear, out: Tensor | None = None) -> Tensor:
        y = product(kernel, x, layer, out)
        return torch.nextafter(y, y + 1) if wanted[-1] else y

    monkeypatch.setattr(QuantisedKernel, "linear", off_by_a_bit)
    assert quantised_linear._differing_with_tiles(best) == f"{TILED_ROWS} rows by 8 bits (format 0)"
