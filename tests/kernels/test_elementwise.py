"""The steps between products equal torch's, and rows are independent."""

import pytest
import torch
from torch.nn import functional

from each import each
from eyas.kernels.elementwise import Elementwise, load_elementwise

WIDTHS = [1, 2, 7, 32, 100, 576, 1536]
ROWS = [1, 2, 5, 16, 40]


@pytest.fixture
def glue() -> Elementwise:
    torch.manual_seed(0)  # the same numbers in every run, as the bounds are close
    found = load_elementwise()
    if found is None:
        pytest.skip("no C compiler here, or none that can be trusted")
    return found


@each("width", WIDTHS)
@each("rows", ROWS)
def test_norms_are_those_of_torch(glue: Elementwise, rows: int, width: int) -> None:
    x_ND, weight_D = torch.randn(rows, width) * 30, torch.randn(width)
    ours = glue.norm(x_ND, weight_D, 1e-5)
    torch.testing.assert_close(ours, functional.rms_norm(x_ND, (width,), weight_D, 1e-5), rtol=2e-6, atol=1e-6)
    assert torch.equal(ours, torch.cat([glue.norm(row, weight_D, 1e-5) for row in x_ND.split(1)]))


@each("width", WIDTHS)
@each("rows", ROWS)
def test_gates_are_those_of_torch(glue: Elementwise, rows: int, width: int) -> None:
    x_NI = torch.randn(rows, 2 * width) * 9
    ours, (gate, up) = glue.gate(x_NI), x_NI.chunk(2, dim=1)
    torch.testing.assert_close(ours, functional.silu(gate) * up, rtol=2e-6, atol=1e-6)
    assert torch.equal(ours, torch.cat([glue.gate(row) for row in x_NI.split(1)]))


def test_extreme_gates_are_finite_and_nan_stays_nan(glue: Elementwise) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30])
    ours = glue.gate(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(ours, functional.silu(gate), rtol=1e-6, atol=1e-30)
    assert glue.gate(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@each("size", [2, 6, 8, 64, 80])
@each("rows", ROWS)
def test_rotations_are_those_of_transformers(glue: Elementwise, rows: int, size: int) -> None:
    qkv = torch.randn(rows, 7, size)
    qk, angle = qkv[:, :5], torch.randn(rows, size)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.empty(rows, 5, size)
    glue.rotate(qk, cos, sin, turned)
    crossed = torch.cat([-qk[..., size // 2 :], qk[..., : size // 2]], dim=-1)
    torch.testing.assert_close(turned, qk * cos[:, None] + crossed * sin[:, None], rtol=2e-6, atol=1e-6)
    for n in range(rows):
        alone = torch.empty(1, 5, size)
        glue.rotate(qk[n : n + 1], cos[n : n + 1], sin[n : n + 1], alone)
        assert torch.equal(alone[0], turned[n])


@each("width", [*WIDTHS, 16384])
@each("rows", ROWS)
def test_the_most_likely_is_the_first_of_the_largest_with_its_softmax(glue: Elementwise, rows: int, width: int) -> None:
    logits = (torch.randn(rows, width) * 4).round()  # integers, so that there are ties
    place, chance = glue.most_likely_and_chance(logits)
    largest = logits.amax(dim=-1, keepdim=True)
    assert place.tolist() == [row.index(True) for row in (logits == largest).tolist()]
    exact = logits.double().softmax(dim=-1).amax(dim=-1).float()
    torch.testing.assert_close(chance, exact, rtol=1e-5, atol=0)
    assert torch.equal(glue.most_likely(logits), place)
    alone = [glue.most_likely_and_chance(row) for row in logits.split(1)]
    assert torch.equal(torch.cat([chance for _, chance in alone]), chance)


def test_minus_infinity_is_never_the_most_likely(glue: Elementwise) -> None:
    logits = torch.full((2, 37), float("-inf"))
    logits[0, 36], logits[1, 0] = -3e38, 5.0
    place, chance = glue.most_likely_and_chance(logits)
    assert place.tolist() == [36, 0]
    assert chance.tolist() == [1.0, 1.0]


def test_argmax_skips_nan(glue: Elementwise) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, 7], logits[0, 3333], logits[1, 4990] = float("nan"), 2.0, 1.0
    logits[2] = float("nan")
    assert glue.most_likely(logits).tolist() == [3333, 4990, 4999]


def test_norms_read_and_write_strided_rows(glue: Elementwise) -> None:
    wide, weight = torch.randn(5, 96), torch.randn(32)
    out = torch.zeros(5, 96)
    glue.norm(wide[:, 32:64], weight, 1e-5, out[:, 64:])
    assert torch.equal(out[:, 64:], glue.norm(wide[:, 32:64].contiguous(), weight, 1e-5))
    assert not out[:, :64].any()
