"""A drafter's depth in one call of compiled code: inputs, its only layer, and the norm after it.

Also the first depth, from the target's states on, and a chain of greedy drafts: Python between two depths takes as long
as half of a small drafter's depth.

Shapes: N tokens, X concatenated auxiliary states, D drafter hidden, V target vocabulary, W draft vocabulary.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.linear.embedding_table import EmbeddingTable, packed_table, table_addresses
from eyas.kernels.linear.served_linear import CompiledLinear, ProductWeight
from eyas.kernels.llama.cpu import (
    Compiled,
    Layers,
    LlamaSizes,
    Norm,
    NormWeight,
    Parts,
    Waves,
)
from eyas.kernels.llama.rotary_table import RotaryTable


@dataclass(frozen=True, kw_only=True, eq=False)
class Surroundings:
    """The layer's inputs and the last norm."""

    embedding_VD: EmbeddingTable
    token_norm: Norm
    hidden_norm: Norm
    normed_residual: bool
    """Whether the residual of the layer is the normed state."""
    last_norm: Norm
    turns: RotaryTable


@dataclass(frozen=True, kw_only=True, eq=False)
class StateFusion:
    """Combines the target's auxiliary states into one."""

    linear: CompiledLinear
    all_norm: Norm | None
    """The norm over all auxiliary states together."""
    norms: Sequence[Norm] | None
    """One norm for each auxiliary state."""
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftHead:
    """Chooses drafts and feeds the next depth."""

    linear: CompiledLinear
    target_id_W: Tensor
    logit_scale: float
    feeds_normed: bool
    """Whether the next depth reads the normed state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainsOutput:
    """Drafted chains."""

    token_KR: NDArray[np.int64]
    """Target ids, by depth."""
    chance_KR: NDArray[np.float32]
    """The drafter's probability of each."""
    feedback_RD: Tensor
    """The input of the depth after the last draft; valid until the next chains are drafted."""


class _Depth(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedding", "packed_embedding", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("token", "position", "hidden")),
        *((name, NormWeight) for name in ("token_norm", "hidden_norm", "last_norm")),
        ("normed", ctypes.c_void_p),
        ("normed_residual", ctypes.c_int64),
    )


class _Fusion(ctypes.Structure):
    _fields_ = (
        ("states", ctypes.c_void_p),
        ("all_norm", NormWeight),
        ("norms", ctypes.c_void_p),
        ("linear", ProductWeight),
        ("normed", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "size")),
    )


class _Chain(ctypes.Structure):
    _fields_ = (
        ("head", ProductWeight),
        *((name, ctypes.c_void_p) for name in ("target_ids", "position", "logits", "token", "chance")),
        *((name, ctypes.c_int64) for name in ("depths", "feeds_normed")),
        ("logit_scale", ctypes.c_float),
    )


class DraftLayer(Layers):
    """Runs the layer of one drafter."""

    def __init__(
        self,
        layer: Parts,
        around: Surroundings,
        fusion: StateFusion | None,
        head: DraftHead | None,
        sizes: LlamaSizes,
        compiled: Compiled,
    ) -> None:
        table, parts = packed_table(around.embedding_VD), [part for part in (fusion, head) if part is not None]
        others = [*([] if table is None else [table]), *(part.linear for part in parts)]
        super().__init__([layer], sizes, compiled, others)
        assert compiled.library.fusion_bytes() == ctypes.sizeof(_Fusion)
        assert compiled.library.depth_bytes() == ctypes.sizeof(_Depth)
        assert compiled.library.chain_bytes() == ctypes.sizeof(_Chain)
        self._around, self._head, self._fusion = around, head, fusion
        self._chain_memory = torch.empty(0, dtype=torch.float32)
        self._state_norms = None
        if fusion is not None and fusion.norms is not None:
            self._state_norms = (NormWeight * fusion.count)(*map(NormWeight.of, fusion.norms))
        self._norms = [NormWeight.of(norm) for norm in (around.token_norm, around.hidden_norm, around.last_norm)]
        self._embedding = table_addresses(around.embedding_VD)

    def run_depth(
        self,
        hidden_ND: Tensor,
        token_N: Tensor,
        position_N: Tensor,
        attention: AttentionBackend,
        kv: tuple[Tensor, Tensor],
        window: int | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Compute the state after the layer, and its norm; None if the attention is not compiled."""
        tokens, size = hidden_ND.shape
        waves = self.waves(attention, {0: kv}, tokens, [window])
        if waves is None:
            return None
        assert all(x.is_contiguous() for x in (hidden_ND, token_N, position_N))
        self._around.turns.reach(1 + int(position_N.max()))
        x_ND, normed_ND = torch.empty(2, tokens, size, dtype=torch.float32).unbind()
        memory = torch.empty(tokens * self._numbers(size), dtype=torch.float32)
        run = self._run(waves, tokens, size, x_ND.data_ptr(), memory)
        depth = self._depth(token_N.data_ptr(), position_N.data_ptr(), hidden_ND.data_ptr(), normed_ND.data_ptr())
        self.library.run_depth(ctypes.addressof(run), ctypes.addressof(depth))
        return x_ND, normed_ND

    def run_read(
        self,
        aux_NX: Tensor,
        token_N: Tensor,
        position_N: Tensor,
        attention: AttentionBackend,
        kv: tuple[Tensor, Tensor],
        window: int | None,
    ) -> tuple[Tensor, Tensor] | None:
        """`run_depth` from the target's states on; None also if their fusion is not compiled."""
        fusion, (tokens, width) = self._fusion, aux_NX.shape
        waves = None if fusion is None else self.waves(attention, {0: kv}, tokens, [window])
        if fusion is None or waves is None:
            return None
        assert all(x.is_contiguous() for x in (aux_NX, token_N, position_N))
        self._around.turns.reach(1 + int(position_N.max()))
        size = fusion.linear.out_features
        x_ND, normed_ND, hidden_ND = torch.empty(3, tokens, size, dtype=torch.float32).unbind()
        memory = torch.empty(tokens * (self._numbers(size) + width), dtype=torch.float32)
        run = self._run(waves, tokens, size, x_ND.data_ptr(), memory)
        depth = self._depth(token_N.data_ptr(), position_N.data_ptr(), hidden_ND.data_ptr(), normed_ND.data_ptr())
        fused = _Fusion(
            *(aux_NX.data_ptr(), NormWeight.of(fusion.all_norm)),
            None if self._state_norms is None else ctypes.addressof(self._state_norms),
            *(fusion.linear.product_weight(), memory.data_ptr() + 4 * tokens * self._numbers(size)),
            *(fusion.count, width // fusion.count),
        )
        self.library.run_read(ctypes.addressof(run), ctypes.addressof(depth), ctypes.addressof(fused))
        return x_ND, normed_ND

    def run_chains(
        self,
        feedback_RD: Tensor,
        normed_RD: Tensor,
        position_R: Tensor,
        attention: AttentionBackend,
        kv: tuple[Tensor, Tensor],
        window: int | None,
        depths: int,
    ) -> ChainsOutput | None:
        """Draft `depths` tokens for each request.

        The first drafts follow from the given states and are read at `position_R`, in the only slots of the pass. None
        if a step is not compiled.
        """
        head, ahead, rows = self._head, max(0, depths - 2), len(position_R)
        waves = None if head is None else self.waves(attention, {0: kv}, rows, [window], ahead=ahead)
        if head is None or waves is None:
            return None
        assert all(x.is_contiguous() for x in (feedback_RD, normed_RD))
        next_R = position_R.numpy().copy()  # advanced below
        self._around.turns.reach(int(next_R.max()) + depths)
        size, words = normed_RD.shape[1], head.linear.out_features
        numbers = rows * (self._numbers(size) + 2 * size + words)
        if len(self._chain_memory) < numbers:
            self._chain_memory = torch.empty(numbers, dtype=torch.float32)
        memory = self._chain_memory
        normed_at = memory.data_ptr() + 4 * rows * self._numbers(size)
        x_at, logits_at = normed_at + 4 * rows * size, normed_at + 4 * 2 * rows * size
        ctypes.memmove(normed_at, normed_RD.data_ptr(), 4 * rows * size)
        token_KR = np.empty((depths, rows), dtype=np.int64)
        chance_KR = np.empty((depths, rows), dtype=np.float32)
        run = self._run(waves, rows, size, x_at, memory)
        depth = self._depth(None, next_R.ctypes.data, feedback_RD.data_ptr(), normed_at)
        chain = _Chain(
            head.linear.product_weight(),
            *(head.target_id_W.data_ptr(), next_R.ctypes.data, logits_at),
            *(token_KR.ctypes.data, chance_KR.ctypes.data),
            *(depths, head.feeds_normed, head.logit_scale),
        )
        self.library.run_chain(ctypes.addressof(run), ctypes.addressof(depth), ctypes.addressof(chain))
        if depths > 1:
            first = rows * self._numbers(size) + (0 if head.feeds_normed else rows * size)
            feedback_RD = memory[first : first + rows * size].view(rows, size)
        return ChainsOutput(token_KR=token_KR, chance_KR=chance_KR, feedback_RD=feedback_RD)

    def _numbers(self, size: int) -> int:
        """Workspace per token of a depth, in float32 numbers."""
        return self.numbers_per_token + 2 * size + 2 * self.sizes.head_dim

    def _run(self, waves: "Waves", tokens: int, size: int, x: int, memory: Tensor) -> ctypes.Structure:
        input_at = memory.data_ptr() + 4 * tokens * self.numbers_per_token
        cos_at = input_at + 4 * tokens * 2 * size
        return self.prepared(
            waves,
            tokens=tokens,
            x=x,
            cos=cos_at,
            sin=cos_at + 4 * tokens * self.sizes.head_dim,
            memory=memory.data_ptr(),
            first_input=input_at,
        )

    def _depth(self, token: int | None, position: int, hidden: int, normed: int) -> _Depth:
        around = self._around
        return _Depth(
            *(*self._embedding, around.turns.cos_TK.data_ptr(), around.turns.sin_TK.data_ptr()),
            *(token, position, hidden, *self._norms, normed, around.normed_residual),
        )
