"""The steps between a block's matrix products and after the last: norms, gates, rotations, argmax.

They compute little, but torch takes several operations for each, and its silu on some CPUs takes longer than the
attention beside it. So in float32 on a CPU each is one call of compiled code (`elementwise.c`), over contiguous rows
unless stated. `rms_norm` chooses by itself; for the others, `elementwise_for` returns the compiled steps.

Shapes: N tokens, D hidden size, I intermediate size, B query and key heads, K head dim, R rotary dim, V logits.
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from eyas.kernels.native import load_native

SOURCE = Path(__file__).with_name("elementwise.c")


class Activation(IntEnum):
    """A gate's activation; numbered as in `elementwise.c`."""

    SILU = 0
    GELU_TANH = 1

    def __call__(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self is Activation.SILU else functional.gelu(x, approximate="tanh")


@dataclass(frozen=True, eq=False)
class Elementwise:
    """The compiled steps."""

    library: ctypes.CDLL

    def __post_init__(self) -> None:
        pointer, size, threads = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        library = self.library
        library.rms_norm.argtypes = [pointer, size, size, size, pointer, ctypes.c_float, pointer, size, threads]
        library.norm_heads.argtypes = [pointer, size, size, size, size, pointer, ctypes.c_float, threads]
        library.gated.argtypes = [pointer, size, size, ctypes.c_int, pointer, threads]
        library.rotate.argtypes = [pointer, size, size, size, size, size, pointer, pointer, pointer, threads]
        library.most_likely.argtypes = [pointer, size, size, pointer, pointer, threads]
        for name in ("rms_norm", "norm_heads", "gated", "rotate", "most_likely"):
            getattr(library, name).restype = None

    def norm(self, x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor | None = None) -> Tensor:
        """The root-mean-square norm of every row; rows may be strided."""
        y_ND = x_ND.new_empty(x_ND.shape) if out_ND is None else out_ND
        (tokens, width), (x_stride, x_step), (y_stride, y_step) = x_ND.shape, x_ND.stride(), y_ND.stride()
        assert x_step == y_step == 1
        self.library.rms_norm(
            *(x_ND.data_ptr(), x_stride, tokens, width, weight_D.data_ptr(), eps),
            *(y_ND.data_ptr(), y_stride, torch.get_num_threads()),
        )
        return y_ND

    def norm_heads(self, qk_NBK: Tensor, weight_BK: Tensor, eps: float) -> None:
        """Norm every head in place; a token's heads are contiguous, tokens may be strided."""
        self.library.norm_heads(
            *(qk_NBK.data_ptr(), *qk_NBK.shape, qk_NBK.stride(0), weight_BK.data_ptr(), eps, torch.get_num_threads())
        )

    def gate(self, gate_up_NI: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        """activation(gate) * up; gate is the first half of every row."""
        tokens, both = gate_up_NI.shape
        y_NI, threads = gate_up_NI.new_empty(tokens, both // 2), torch.get_num_threads()
        self.library.gated(gate_up_NI.data_ptr(), tokens, both // 2, activation, y_NI.data_ptr(), threads)
        return y_NI

    def rotate(self, qk_NBK: Tensor, cos_NR: Tensor, sin_NR: Tensor, turned_NBK: Tensor) -> None:
        """Rotate queries and keys; a token's heads are contiguous, tokens may be strided."""
        self.library.rotate(
            *(qk_NBK.data_ptr(), *qk_NBK.shape, cos_NR.shape[1], qk_NBK.stride(0), cos_NR.data_ptr()),
            *(sin_NR.data_ptr(), turned_NBK.data_ptr(), torch.get_num_threads()),
        )

    def most_likely(self, logits_NV: Tensor) -> Tensor:
        """The index of the largest logit of each row [N], the first of equals."""
        place_N = torch.empty(logits_NV.shape[0], dtype=torch.int64)
        self._most_likely(logits_NV, place_N, None)
        return place_N

    def most_likely_and_chance(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """The index of the largest logit of each row [N], and its softmax probability [N]."""
        place_N, chance_N = torch.empty(len(logits_NV), dtype=torch.int64), torch.empty(len(logits_NV))
        self._most_likely(logits_NV, place_N, chance_N)
        return place_N, chance_N

    def _most_likely(self, logits_NV: Tensor, place_N: Tensor, chance_N: Tensor | None) -> None:
        assert logits_NV.is_contiguous()
        chance = None if chance_N is None else chance_N.data_ptr()
        threads = torch.get_num_threads()
        self.library.most_likely(logits_NV.data_ptr(), *logits_NV.shape, place_N.data_ptr(), chance, threads)


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """A root-mean-square norm with its weight [D], or one for each of several heads [B, K].

    A float32 weight multiplies numbers of any dtype before they are rounded; one of their own dtype, after.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the last dimension as transformers does: statistics in float32, rounded to x's dtype before the weight.

    A weight of a finer dtype is applied before rounding. A row's result does not depend on the rows beside it. There is
    no gradient.
    """
    compiled = elementwise_for(x) if weight.ndim == 1 and x.ndim == 2 else None
    if compiled is not None:
        return compiled.norm(x, weight, eps)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.to(weight.dtype), weight.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    return functional.rms_norm(x, weight.shape[-1:], None, eps) * weight


def elementwise_for(like: Tensor) -> Elementwise | None:
    """Compiled steps for tensors like this one, if there are any."""
    return load_elementwise() if like.is_cpu and like.dtype == torch.float32 else None


@cache
def load_elementwise() -> Elementwise | None:
    """The compiled steps; None if there is no compiler, or they failed their trial."""
    library, _ = load_native(SOURCE)
    if library is None:
        return None
    compiled = Elementwise(library)
    return compiled if _is_right(compiled) else None


@torch.no_grad()
def _is_right(compiled: Elementwise) -> bool:
    """Try it: this compiler may never have been tested."""
    x_ND = torch.linspace(-9, 9, 3 * 44).mul(7).sin().mul(5).view(3, 44)
    weight_D, halves = x_ND[1] + 1, x_ND.view(3, 2, 22)
    cos, sin = x_ND[:, :22].cos(), x_ND[:, :22].sin()
    turned, crossed = torch.empty(3, 2, 22), torch.cat([-halves[..., 11:], halves[..., :11]], dim=-1)
    compiled.rotate(halves, cos.contiguous(), sin.contiguous(), turned)
    partly, heads, weight_BK = torch.empty(3, 2, 22), halves.clone(), halves[1] + 1
    compiled.rotate(halves, cos[:, :4].contiguous(), sin[:, :4].contiguous(), partly)
    crossed_4 = torch.cat([-halves[..., 2:4], halves[..., :2]], dim=-1)
    rotated_4 = halves[..., :4] * cos[:, None, :4] + crossed_4 * sin[:, None, :4]
    compiled.norm_heads(heads, weight_BK, 1e-5)
    wide_ND = torch.zeros(3, 88)
    compiled.norm(x_ND, weight_D, 1e-5, wide_ND[:, 44:])
    place_N, chance_N = compiled.most_likely_and_chance(x_ND)
    pairs = (
        (wide_ND[:, 44:], functional.rms_norm(x_ND, (44,), weight_D, 1e-5)),
        (place_N, x_ND.argmax(dim=-1)),
        (chance_N, x_ND.softmax(dim=-1).amax(dim=-1)),
        (compiled.norm(x_ND, weight_D, 1e-5), functional.rms_norm(x_ND, (44,), weight_D, 1e-5)),
        *((compiled.gate(x_ND, how), how(x_ND[:, :22]) * x_ND[:, 22:]) for how in Activation),
        (turned, halves * cos.unsqueeze(1) + crossed * sin.unsqueeze(1)),
        (partly, torch.cat([rotated_4, halves[..., 4:]], dim=-1)),
        (heads, functional.rms_norm(halves, (22,), None, 1e-5) * weight_BK),
    )
    return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) for ours, theirs in pairs)
