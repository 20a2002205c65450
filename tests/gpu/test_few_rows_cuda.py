"""Products of a few rows, fused with norm, gates and bias, equal torch's separate operations.

It also runs on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with `--noconftest` against the skip.
"""

import pytest
import torch
from torch import Tensor

from eyas.kernels.elementwise import Activation, FusedNorm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = (
    torch.bfloat16 if torch.cuda.is_available() else torch.float16
)  # the interpreter can neither multiply nor round bfloat16
CLOSE = {torch.float32: (1e-4, 1e-4), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1.6e-2, 3e-2)}


def near(ours: Tensor, exact: Tensor) -> None:
    relative, absolute = CLOSE[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=relative, atol=absolute)


def made(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


TILINGS = [(4, 1024, False), (8, 64, False), (16, 64, True), (32, 128, True)]


@pytest.mark.parametrize(("outputs", "inputs", "dot"), TILINGS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "size", "width", "biased", "adds", "fine"),
    [
        (1, 576, 36, False, True, False),
        (3, 80, 24, True, True, True),
        (4, 200, 33, True, False, False),
        (11, 80, 24, True, True, False),
    ],
)
def test_products_with_norm_and_gates(
    outputs: int, inputs: int, dot: bool, dtype: torch.dtype, rows: int, size: int, width: int,
    biased: bool, adds: bool, fine: bool,
) -> None:  # fmt: skip
    from eyas.kernels.linear.few_rows_triton import Tiling, few_linear, norm_gate_up, norm_linear

    torch.manual_seed(0)
    tiling = Tiling(outputs=outputs, inputs=inputs, warps=4, stages=2, dot=dot, rows=4)
    x, more = made(rows, size, dtype=dtype), made(rows, size, dtype=dtype) if adds else None
    norm = FusedNorm(torch.rand(size, device=DEVICE).add(0.5).to(torch.float32 if fine else dtype), 1e-5)
    weight = made(2 * width, size, dtype=dtype, scale=size**-0.5)
    bias = made(2 * width, dtype=dtype) if biased else None

    state = x if more is None else x + more
    normed = norm(state)
    exact = normed.double() @ weight.double().T + (0 if bias is None else bias.double())
    x_out, kept = torch.zeros_like(x), x.new_zeros(rows, 3 * size)[:, size : 2 * size]
    given = x.clone()
    ours = norm_linear(x, more, norm, weight, bias, x_out_ND=x_out, kept_ND=kept, tiling=tiling)
    near(ours, exact)
    assert torch.equal(x, given)
    assert torch.equal(kept, state)
    assert more is None or torch.equal(x_out, state)
    near(few_linear(normed, weight, bias, tiling=tiling), exact)
    again = norm_linear(x, more, norm, weight, bias, x_out_ND=x_out, kept_ND=kept, tiling=tiling)
    assert torch.equal(again, ours)
    if rows > 1:  # a row does not depend on the others
        only = torch.zeros_like(x)
        only[0] = x[0]
        more_only = None if more is None else torch.zeros_like(more)
        if more is not None and more_only is not None:
            more_only[0] = more[0]
        alone = norm_linear(only, more_only, norm, weight, bias, x_out_ND=x_out, tiling=tiling)
        assert torch.equal(alone[0], ours[0])

    for activation in Activation:
        gate, up = exact.to(dtype).chunk(2, dim=1)
        expected = (activation(gate.float()).to(dtype).double() * up.double()).to(dtype)
        x_out.zero_()
        opened = norm_gate_up(x, more, norm, weight, bias, activation, x_out_ND=x_out, tiling=tiling)
        near(opened, expected.double())
        assert more is None or torch.equal(x_out, state)
        near(norm_gate_up(normed, None, None, weight, bias, activation, tiling=tiling), expected.double())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 11, 32])
@pytest.mark.parametrize(
    ("size", "width"), [(576, 24), (1536, 20), (4096, 20), (80, 100), (2200, 1100), (2200, 2200), (4096, 3000)]
)
def test_the_chosen_tilings(rows: int, size: int, width: int) -> None:
    from eyas.kernels.linear.few_rows_triton import few_linear, norm_gate_up

    if DEVICE.type == "cpu" and width > 1000:
        pytest.skip("the interpreter would take minutes")
    torch.manual_seed(0)
    x, norm = made(rows, size, dtype=HALF), FusedNorm(torch.rand(size, device=DEVICE).add(0.5).to(HALF), 1e-5)
    weight = made(2 * width, size, dtype=HALF, scale=size**-0.5)
    normed = norm(x)
    exact = normed.double() @ weight.double().T
    near(few_linear(normed, weight), exact)
    gate, up = exact.to(HALF).chunk(2, dim=1)
    expected = (Activation.SILU(gate.float()).to(HALF).double() * up.double()).to(HALF)
    near(norm_gate_up(x, None, norm, weight, None, Activation.SILU), expected.double())
    near(norm_gate_up(normed, None, None, weight, None, Activation.SILU), expected.double())
