# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A drafter's depth on a GPU: what stands between its products and its attention, in kernels.

Its only layer is a decoder block, with the kernels of `block_triton.py` between the products. A drafter has two kernels
more:

    norm states   some of the target's auxiliary states, from wherever they lie, normed side by side as `fc` reads them
    begin         the normed embedding of a token and the normed state side by side; the state that the layer adds to;
                  cosines and sines of the position

For very few tokens the products are kernels of ours, too, and add, norm and gate are parts of them
(`kernels/linear/few_rows_triton.py`), where the weights are plain.

Invariant, as in `block_triton.py`: every number is rounded where the drafter's own code rounds it (`drafter/model.py`).
Nothing here looks at a number on the host, so all of it can be captured.

Shapes: N tokens of a pass, M of them whose outcome is asked for, S states that are kept, V vocabulary, D drafter
hidden, A auxiliary states, X all of them side by side, H query heads, G key heads, C slots of the cache, K head dim, E
inputs or outputs of a product.
"""

from dataclasses import dataclass, replace

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.dependent_launch_triton import begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.elementwise_triton import weighted
from eyas.kernels.linear.few_rows_triton import few_linear, fuses_norm, most_rows_of_all, norm_gate_up
from eyas.kernels.llama.block import PhasedProduct, PlainProduct, Product
from eyas.kernels.llama.block_triton import add_norm, gate, rotate
from eyas.kernels.llama.cpu import LlamaSizes
from eyas.kernels.llama.triton import plain_weights

DECODED_ROWS = 64
"""Rows up to which 8-bit weights are multiplied by the kernel for decoding; a draft may depend on its batch."""


@triton.jit
def _norm_states_kernel(
    states,
    row_of,
    weight,
    output,
    stride,
    eps,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    INDEXED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One of the states of one token, each with its own weight."""
    begin_dependent(DEPENDENT, EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token
    if INDEXED:
        row = tl.load(row_of + token).to(tl.int64)
    at = tl.arange(0, PADDED)
    value = tl.load(states + row * stride + part * SIZE + at, mask=at < SIZE, other=0.0).to(output.dtype.element_ty)
    normed = _normed(value, weight + part * SIZE, eps, SIZE, PADDED)
    tl.store(output + (token * COUNT + part) * SIZE + at, normed, mask=at < SIZE)


@triton.jit
def _begin_kernel(
    embedding,
    token_of,
    hidden,
    position_of,
    frequency,
    token_weight,
    hidden_weight,
    both,
    state,
    cos,
    sin,
    embedding_stride,
    hidden_stride,
    token_eps,
    hidden_eps,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    NORMED_STATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One part of what one token begins with: its embedding, its state, its position."""
    begin_dependent(DEPENDENT, EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    if part == 0:
        row = tl.load(token_of + token).to(tl.int64)
        value = tl.load(embedding + row * embedding_stride + at, mask=inside, other=0.0)
        tl.store(both + token * 2 * SIZE + at, _normed(value, token_weight, token_eps, SIZE, PADDED), mask=inside)
    elif part == 1:
        value = tl.load(hidden + token * hidden_stride + at, mask=inside, other=0.0)
        normed = _normed(value, hidden_weight, hidden_eps, SIZE, PADDED)
        tl.store(both + token * 2 * SIZE + SIZE + at, normed, mask=inside)
        tl.store(state + token * SIZE + at, normed if NORMED_STATE else value, mask=inside)
    else:
        turn = tl.arange(0, HALF_PADDED)
        angle = tl.load(position_of + token).to(tl.float32) * tl.load(frequency + turn, mask=turn < HALF, other=0.0)
        cosine = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
        sine = (tl.sin(angle) * scale).to(sin.dtype.element_ty)
        to = token * 2 * HALF + turn
        tl.store(cos + to, cosine, mask=turn < HALF)
        tl.store(cos + to + HALF, cosine, mask=turn < HALF)
        tl.store(sin + to, sine, mask=turn < HALF)
        tl.store(sin + to + HALF, sine, mask=turn < HALF)


@triton.jit
def _normed(value, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The norm of the first SIZE of these numbers; the rest are zeros."""
    at = tl.arange(0, PADDED)
    exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / SIZE + eps)
    return weighted(value, scale, tl.load(weight + at, mask=at < SIZE, other=0.0), False)


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonEagle:
    """The pass of a drafter of one layer, over its weights, which are all of one type."""

    input_norm: FusedNorm | None
    """Of all auxiliary states of a token as one."""
    states_norm: FusedNorm | None
    """Of each of them, behind that; the weights [X] of all."""
    num_states: int
    fc: Product
    embedding_VD: Tensor
    token_norm: FusedNorm
    hidden_norm: FusedNorm
    normed_residual: bool
    """Whether the layer adds to the normed state instead of the state."""
    frequency: Tensor
    """Turns of a head's pairs from one position to the next, in radians: float32 [K / 2]."""
    turn_scale: float
    """What cosines and sines are multiplied by."""
    qkv: Product
    kv: Product
    """Keys and values of it alone."""
    qk_norm: FusedNorm | None
    """Of every head of queries and keys, the weights [B, K] of all."""
    output: Product
    mlp_norm: FusedNorm
    gate_up: Product
    down: Product
    last_norm: FusedNorm
    sizes: LlamaSizes
    few_rows: int = 0
    """Passes of up to so many tokens have products of their own."""

    @property
    def phased(self) -> bool:
        """Whether products have a kernel of their own for decoding: weights of 8 or 4 bits."""
        return isinstance(self.qkv, PhasedProduct)

    def with_few_rows(self) -> "TritonEagle | None":
        """The same with products of their own for few tokens; None where a weight is none for them."""
        products = (self.fc, self.qkv, self.kv, self.output, self.gate_up, self.down)
        if any(not isinstance(x, PlainProduct) or not x.weight_ED.is_contiguous() for x in products):
            return None
        few_rows = most_rows_of_all(x.weight_ED for x in products if isinstance(x, PlainProduct))
        return replace(self, few_rows=few_rows)

    def fuse(self, aux_SX: Tensor, row_N: Tensor | None = None) -> Tensor:
        """The depth-0 states [N, D] of all auxiliary states, or of some rows of them; they may be of another type."""
        if self.input_norm is not None:
            aux_SX, row_N = self._normed_states(aux_SX, row_N, self.input_norm, 1), None
        if self.states_norm is not None:
            aux_SX, row_N = self._normed_states(aux_SX, row_N, self.states_norm, self.num_states), None
        if row_N is not None:
            aux_SX = aux_SX.index_select(0, row_N)
        return self._product(self.fc, aux_SX.to(self.embedding_VD.dtype))

    def run_depth(
        self,
        hidden_ND: Tensor,
        token_N: Tensor,
        position_N: Tensor,
        attention: AttentionBackend,
        kv: tuple[Tensor, Tensor],
        window: int | None,
        keep_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The state behind the layer, and the same normed, of all tokens or those kept.

        Keys and values [G, C, K] of all are written to their slots.
        """
        sizes = self.sizes
        both_NE, x_ND, cos_NK, sin_NK = self._begin(hidden_ND, token_N, position_N)
        qkv_NE = self._product(self.qkv, both_NE)
        q_NHK = x_ND.new_empty(len(x_ND), sizes.heads, sizes.head_dim)
        rotate(qkv_NE, cos_NK, sin_NK, attention.metadata.slot_mapping_N, self.qk_norm, q_NHK, *kv)
        mixed_NE = attention.attend(q_NHK, *kv, sizes.head_dim**-0.5, None, window).flatten(1)
        if keep_M is not None:
            mixed_NE, x_ND = mixed_NE.index_select(0, keep_M), x_ND.index_select(0, keep_M)
        tokens, more_ND = len(mixed_NE), self._product(self.output, mixed_NE)
        if tokens <= self.few_rows:
            gates = *plain_weights(self.gate_up), Activation.SILU
            if fuses_norm(*x_ND.shape):
                before_ND, x_ND = x_ND, torch.empty_like(x_ND)
                gated_NI = norm_gate_up(before_ND, more_ND, self.mlp_norm, *gates, x_out_ND=x_ND)
            else:
                gated_NI = norm_gate_up(add_norm(x_ND, more_ND, None, self.mlp_norm), None, None, *gates)
        else:
            gate_up = self._product(self.gate_up, add_norm(x_ND, more_ND, None, self.mlp_norm))
            gated_NI = x_ND.new_empty(tokens, sizes.intermediate)
            gate(gate_up, Activation.SILU, gated_NI)
        normed_ND = add_norm(x_ND, self._product(self.down, gated_NI), None, self.last_norm)
        return x_ND, normed_ND

    def remember(
        self,
        hidden_ND: Tensor,
        token_N: Tensor,
        position_N: Tensor,
        slot_mapping_N: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> None:
        """Write keys and values [G, C, K] alone to their slots."""
        both_NE, _, cos_NK, sin_NK = self._begin(hidden_ND, token_N, position_N)
        kv_NE = self._product(self.kv, both_NE)
        no_queries = kv_NE.new_empty(len(kv_NE), 0, self.sizes.head_dim)
        norm = self.qk_norm
        if norm is not None:
            norm = FusedNorm(norm.weight[self.sizes.heads :], norm.eps)
        rotate(kv_NE, cos_NK, sin_NK, slot_mapping_N, norm, no_queries, *kv)

    def _product(self, product: Product, x_NE: Tensor) -> Tensor:
        if len(x_NE) <= self.few_rows:
            return few_linear(x_NE.contiguous(), *plain_weights(product))
        if isinstance(product, PhasedProduct) and len(x_NE) <= DECODED_ROWS:
            return product.decode(x_NE)
        return product(x_NE, None)

    def _normed_states(self, aux_SX: Tensor, row_N: Tensor | None, norm: FusedNorm, count: int) -> Tensor:
        """Norm each of `count` parts of rows; of all if none are named."""
        aux_SX, row_N = _dense_rows(aux_SX), None if row_N is None else row_N.contiguous()
        tokens, width = len(aux_SX if row_N is None else row_N), aux_SX.shape[1]
        normed_NX = self.embedding_VD.new_empty(tokens, width)
        padded = triton.next_power_of_2(width // count)
        _norm_states_kernel[(tokens, count)](
            *(aux_SX, aux_SX if row_N is None else row_N, norm.weight, normed_NX, aux_SX.stride(0), norm.eps),
            COUNT=count,
            SIZE=width // count,
            PADDED=padded,
            INDEXED=row_N is not None,
            num_warps=_warps(padded),
            **dependent_launch(aux_SX.device),
        )
        return normed_NX

    def _begin(self, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the layer reads [N, 2 D], what it adds to [N, D], and cosines and sines [N, K]."""
        hidden_ND, embedding_VD = _dense_rows(hidden_ND), self.embedding_VD
        (tokens, size), half = hidden_ND.shape, len(self.frequency)
        both_NE, x_ND = hidden_ND.new_empty(tokens, 2 * size), hidden_ND.new_empty(tokens, size)
        cos_NK, sin_NK = (hidden_ND.new_empty(tokens, 2 * half) for _ in range(2))
        padded = triton.next_power_of_2(size)
        _begin_kernel[(tokens, 3)](
            *(embedding_VD, token_N.contiguous(), hidden_ND, position_N.contiguous(), self.frequency),
            *(self.token_norm.weight, self.hidden_norm.weight, both_NE, x_ND, cos_NK, sin_NK),
            *(embedding_VD.stride(0), hidden_ND.stride(0), self.token_norm.eps, self.hidden_norm.eps, self.turn_scale),
            SIZE=size,
            PADDED=padded,
            HALF=half,
            HALF_PADDED=triton.next_power_of_2(half),
            NORMED_STATE=self.normed_residual,
            num_warps=_warps(padded),
            **dependent_launch(hidden_ND.device),
        )
        return both_NE, x_ND, cos_NK, sin_NK


def _dense_rows(x_ND: Tensor) -> Tensor:
    """With a row's numbers side by side; rows may lie apart."""
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _warps(numbers: int) -> int:
    """That norm so many numbers."""
    return 4 if numbers <= 2048 else 8 if numbers <= 8192 else 16
