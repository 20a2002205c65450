"""A drafter's depth in one call of compiled code: what stands before its only layer, the layer, and the norm behind it.

Shapes: N tokens, D drafter hidden, V target vocabulary, K head dim, T positions.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.linear.quantised_linear import QuantisedEmbedding
from eyas.kernels.llama.cpu import Compiled, Layers, LlamaSizes, Norm, NormWeight, Parts

FIRST_POSITIONS = 1024

Rope = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
"""Cosines and sines [T, 1, K] of the rotation at positions [T]."""


class RotaryTable:
    """Cosines and sines of the rotation, worked out once for every position, and as far as they were asked for."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self.cos_TK, self.sin_TK = self._worked_out(FIRST_POSITIONS)

    def at(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Those of positions, [N, K]."""
        self.reach(1 + int(position_N.max()))
        return self.cos_TK.index_select(0, position_N), self.sin_TK.index_select(0, position_N)

    def reach(self, positions: int) -> None:
        """Have so many."""
        if positions > len(self.cos_TK):
            self.cos_TK, self.sin_TK = self._worked_out(2 * positions)

    def _worked_out(self, count: int) -> tuple[Tensor, Tensor]:
        cos_TGK, sin_TGK = self._rope(torch.arange(count), torch.float32)
        return cos_TGK[:, 0].contiguous(), sin_TGK[:, 0].contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class Surroundings:
    """What the layer reads, and what is done to its output."""

    embedding_VD: Tensor | QuantisedEmbedding
    token_norm: Norm
    hidden_norm: Norm
    normed_residual: bool
    """Whether the layer adds to the normed state instead of the state."""
    last_norm: Norm
    turns: RotaryTable


class _Depth(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "cos", "sin", "token", "position", "hidden")),
        *((name, NormWeight) for name in ("token_norm", "hidden_norm", "last_norm")),
        ("normed", ctypes.c_void_p),
        ("normed_residual", ctypes.c_int64),
    )


class DraftLayer(Layers):
    """The layer of one drafter, over whose weights it runs."""

    def __init__(self, layer: Parts, around: Surroundings, sizes: LlamaSizes, compiled: Compiled) -> None:
        super().__init__([layer], sizes, compiled)
        assert compiled.library.depth_bytes() == ctypes.sizeof(_Depth)
        self._around = around

    def run_depth(
        self,
        hidden_ND: Tensor,
        token_N: Tensor,
        position_N: Tensor,
        attention: AttentionBackend,
        kv: tuple[Tensor, Tensor],
        window: int | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The state behind the layer, and the same normed; None where the attention is not compiled."""
        waves = self.waves(attention, {0: kv}, len(hidden_ND), [window])
        if waves is None:
            return None
        assert all(x.is_contiguous() for x in (hidden_ND, token_N, position_N))
        (tokens, size), head_dim, around = hidden_ND.shape, self.sizes.head_dim, self._around
        around.turns.reach(1 + int(position_N.max()))
        x_ND, normed_ND = torch.empty(2, tokens, size, dtype=torch.float32).unbind()
        memory = torch.empty(tokens, self.numbers_per_token + 2 * size + 2 * head_dim, dtype=torch.float32)
        input_at = memory.data_ptr() + 4 * tokens * self.numbers_per_token
        cos_at = input_at + 4 * tokens * 2 * size
        run = self.prepared(
            waves,
            tokens=tokens,
            x=x_ND.data_ptr(),
            cos=cos_at,
            sin=cos_at + 4 * tokens * head_dim,
            memory=memory.data_ptr(),
            first_input=input_at,
        )
        norms = (around.token_norm, around.hidden_norm, around.last_norm)
        table = around.embedding_VD
        if isinstance(table, QuantisedEmbedding):  # the rows alone, in the order of the tokens
            table, token_N = table.rows(token_N), torch.arange(tokens)
        depth = _Depth(
            *(table.data_ptr(), around.turns.cos_TK.data_ptr(), around.turns.sin_TK.data_ptr()),
            *(token_N.data_ptr(), position_N.data_ptr(), hidden_ND.data_ptr()),
            *(*map(NormWeight.of, norms), normed_ND.data_ptr(), around.normed_residual),
        )
        self.library.run_depth(ctypes.addressof(run), ctypes.addressof(depth))
        return x_ND, normed_ND
