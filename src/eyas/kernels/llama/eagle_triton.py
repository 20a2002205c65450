# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A drafter's depth on a GPU: the operations between its products and its attention, as kernels.

Its only layer is a decoder block, with the kernels of `block_triton.py` between the products. A drafter has two more
kernels:

    norm states   norms auxiliary states of the target, wherever they are, side by side as `fc` reads them
    begin         the normed embedding of a token beside the normed state; the residual of the layer; cosines and sines
                  of the position

For very few tokens, products of plain weights are kernels of their own with add, norm and gate fused
(`kernels/linear/few_rows_triton.py`).

Invariant, as in `block_triton.py`: every number is rounded where the drafter's own code rounds it (`drafter/model.py`).
Nothing here reads device memory on the host, so all of it can be captured in a CUDA graph.

Shapes: N tokens of a pass, M of them whose outcome is wanted, S stored states, V vocabulary, D drafter hidden, A
auxiliary states, X all of them side by side, H query heads, G key heads, C slots of the cache, K head dim, E inputs or
outputs of a product.
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
from eyas.kernels.llama.block import PlainProduct, Product, ServedProduct
from eyas.kernels.llama.block_triton import add_norm, gate, rotate
from eyas.kernels.llama.cpu import LlamaSizes
from eyas.kernels.llama.triton import plain_weights

DECODED_ROWS = 64
"""Up to this many rows, 8-bit weights use the decoding kernel; a draft may depend on its batch."""


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
    """Norm one of the auxiliary states of one token, each with its own weight."""
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
    """Compute one part of a token's inputs: its embedding, its state or its rotation."""
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
    """Norm the first SIZE numbers; the rest are zeros."""
    at = tl.arange(0, PADDED)
    exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / SIZE + eps)
    return weighted(value, scale, tl.load(weight + at, mask=at < SIZE, other=0.0), False)


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonEagle:
    """The pass of a drafter of one layer; all its weights have one dtype."""

    input_norm: FusedNorm | None
    """The norm over all auxiliary states of a token together."""
    states_norm: FusedNorm | None
    """Over each of them, after `input_norm`; the weights [X] of all."""
    num_states: int
    fc: Product
    embedding_VD: Tensor
    token_norm: FusedNorm
    hidden_norm: FusedNorm
    normed_residual: bool
    """Whether the residual of the layer is the normed state."""
    frequency: Tensor
    """Radians per position: float32 [K / 2]."""
    turn_scale: float
    """Cosines and sines are multiplied by it."""
    qkv: Product
    kv: Product
    """The product that yields keys and values only."""
    qk_norm: FusedNorm | None
    """The norm of every query and key head, with weights [B, K]."""
    output: Product
    mlp_norm: FusedNorm
    gate_up: Product
    down: Product
    last_norm: FusedNorm
    sizes: LlamaSizes
    few_rows: int = 0
    """Passes of up to this many tokens have products of their own."""

    @property
    def phased(self) -> bool:
        """Whether products have a separate kernel for decoding: weights of 8 or 4 bits."""
        return isinstance(self.qkv, ServedProduct)

    def with_few_rows(self) -> "TritonEagle | None":
        """A copy with products of their own for few tokens; None if a weight is not supported."""
        products = (self.fc, self.qkv, self.kv, self.output, self.gate_up, self.down)
        if any(not isinstance(x, PlainProduct) or not x.weight_ED.is_contiguous() for x in products):
            return None
        few_rows = most_rows_of_all(x.weight_ED for x in products if isinstance(x, PlainProduct))
        return replace(self, few_rows=few_rows)

    def fuse(self, aux_SX: Tensor, row_N: Tensor | None = None) -> Tensor:
        """Compute the depth-0 states [N, D] from all auxiliary states, or from some rows of them; their dtype may
        differ.
        """
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
        """Compute the state after the layer and its norm, for all tokens or those kept.

        Keys and values [G, C, K] of all tokens are written to their slots.
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
        """Only write keys and values [G, C, K] to their slots."""
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
        if isinstance(product, ServedProduct) and len(x_NE) <= DECODED_ROWS:
            return product.decode(x_NE)
        return product(x_NE, None)

    def _normed_states(self, aux_SX: Tensor, row_N: Tensor | None, norm: FusedNorm, count: int) -> Tensor:
        """Norm each of `count` parts of the given rows, or of all rows."""
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
        """The layer's input [N, 2 D], its residual [N, D], and cosines and sines [N, K]."""
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
    """Make each row contiguous; rows may be strided."""
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _warps(numbers: int) -> int:
    """The number of warps for a norm of this size."""
    return 4 if numbers <= 2048 else 8 if numbers <= 8192 else 16
