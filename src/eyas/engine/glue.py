"""What stands between the matrix products of a block, each in one call of compiled code (`glue.c`).

Little is computed here, but torch takes several operations for each step, and its silu on some processors takes longer
than the attention beside it. All is float32 on the processor; rows lie densely unless it says
otherwise.

Shapes: N tokens, D hidden size, I intermediate size, B query and key heads, K head dim.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from eyas.target.native import load_native

SOURCE = Path(__file__).with_name("glue.c")


@dataclass(frozen=True, eq=False)
class Glue:
    """The compiled steps."""

    library: ctypes.CDLL

    def __post_init__(self) -> None:
        pointer, size, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        library = self.library
        library.rms_norm.argtypes = [pointer, size, size, pointer, ctypes.c_float, pointer, threads]
        library.gated.argtypes = [pointer, size, size, pointer, threads]
        library.rotate.argtypes = [pointer, size, size, size, size, pointer, pointer, pointer, threads]
        for function in (library.rms_norm, library.gated, library.rotate):
            function.restype = None

    def norm(self, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """The root-mean-square norm of every row."""
        assert x_ND.is_contiguous()
        y_ND = torch.empty_like(x_ND)
        tokens, width = x_ND.shape
        self.library.rms_norm(
            *(x_ND.data_ptr(), tokens, width, weight_D.data_ptr(), eps, y_ND.data_ptr(), torch.get_num_threads())
        )
        return y_ND

    def gate(self, gate_up_NI: Tensor) -> Tensor:
        """Multiply the second half of every row, up, by silu of the first."""
        tokens, both = gate_up_NI.shape
        y_NI = gate_up_NI.new_empty(tokens, both // 2)
        self.library.gated(gate_up_NI.data_ptr(), tokens, both // 2, y_NI.data_ptr(), torch.get_num_threads())
        return y_NI

    def rotate(self, qk_NBK: Tensor, cos_NK: Tensor, sin_NK: Tensor, turned_NBK: Tensor) -> None:
        """Turn queries and keys; a token's heads lie side by side, tokens may lie apart."""
        self.library.rotate(
            *(qk_NBK.data_ptr(), *qk_NBK.shape, qk_NBK.stride(0), cos_NK.data_ptr(), sin_NK.data_ptr()),
            *(turned_NBK.data_ptr(), torch.get_num_threads()),
        )


@cache
def load_glue() -> Glue | None:
    """The compiled steps, tried; None where there is no compiler or it cannot be trusted."""
    library, _ = load_native(SOURCE)
    if library is None:
        return None
    glue = Glue(library)
    return glue if _is_right(glue) else None


@torch.no_grad()
def _is_right(glue: Glue) -> bool:
    """Try it: the compiler is one that nobody here has met."""
    x_ND = torch.linspace(-9, 9, 3 * 44).mul(7).sin().mul(5).view(3, 44)
    weight_D, halves = x_ND[1] + 1, x_ND.view(3, 2, 22)
    cos, sin = x_ND[:, :22].cos(), x_ND[:, :22].sin()
    turned, crossed = torch.empty(3, 2, 22), torch.cat([-halves[..., 11:], halves[..., :11]], dim=-1)
    glue.rotate(halves, cos.contiguous(), sin.contiguous(), turned)
    pairs = (
        (glue.norm(x_ND, weight_D, 1e-5), functional.rms_norm(x_ND, (44,), weight_D, 1e-5)),
        (glue.gate(x_ND), functional.silu(x_ND[:, :22]) * x_ND[:, 22:]),
        (turned, halves * cos.unsqueeze(1) + crossed * sin.unsqueeze(1)),
    )
    return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) for ours, theirs in pairs)
