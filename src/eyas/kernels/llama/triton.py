# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The decoder block on a GPU: what stands between its products and its attention, in three kernels.

A decoding step multiplies a few tokens, and then every small operation takes as long as its launch. So all that is done
to a number between two products is done in one kernel:

    add and norm       x += y, normed first where a block does that; the norm of x, which the next product reads
    rotate and store   queries and keys are normed where a block does that; queries are turned, keys are turned into the
                       cache, values are copied there
    gate               activation(gate) * up

For very few tokens the products, too, are kernels of ours, and add, norm and gate are parts of them
(`kernels/linear/few_rows_triton.py`), where the weights are plain. Experts have kernels of their own at any number
(`experts_triton.py`).

Invariant, as in `block.py`: every number is rounded where transformers rounds it. Whether that holds is tried before
a model is served so (`trial.py`).

Shapes: N tokens of a pass, M logits asked for, V vocabulary, D hidden size, I intermediate size, H query heads, G key
heads, K head dim, R numbers of a head that are rotated, T rotations, E outputs of a product, X concatenated auxiliary
states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.dependent_launch_triton import MOST_EARLY, begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.elementwise_triton import gated, weighted
from eyas.kernels.linear.few_rows_triton import (
    few_linear,
    fuses_norm,
    most_rows,
    most_rows_of_all,
    norm_gate_up,
    norm_linear,
)
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.kernels.linear.w8a8_triton import gate_quantise, largest_of, rounded, rows_for
from eyas.kernels.llama.block import (
    FusedLlama,
    GatedMlp,
    KVLayers,
    PhasedProduct,
    PlainProduct,
    Product,
    StaticRotary,
)
from eyas.kernels.llama.experts import Experts, PlainExperts, Router, Routes
from eyas.kernels.llama.experts_triton import mixture, route
from eyas.kernels.llama.mxfp4_experts import FourBitExperts


@triton.jit
def _add_norm_kernel(
    x,
    y,
    y_weight,
    weight,
    output,
    output_scale,
    y_eps,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS_Y: tl.constexpr,
    FINE: tl.constexpr,
    QUANTISES: tl.constexpr,
    LARGEST: tl.constexpr,
    INT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token: x += y, in place, and its norm; that in 8 bits where it is asked for, zeros up to WIDTH."""
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    value = tl.load(x + token * SIZE + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(y + token * SIZE + at, mask=inside, other=0.0)
        if NORMS_Y:
            exact = more.to(tl.float32)
            scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / SIZE + y_eps)
            more = weighted(more, scale, tl.load(y_weight + at, mask=inside, other=0.0), FINE)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + token * SIZE + at, value, mask=inside)
    exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / SIZE + eps)
    normed = weighted(value, scale, tl.load(weight + at, mask=inside, other=0.0), FINE)
    if QUANTISES:
        exact = tl.where(inside, normed.to(tl.float32), 0.0)
        most = tl.maximum(tl.max(tl.abs(exact), axis=0), 1e-12)
        tl.store(output_scale + token, most / LARGEST)
        q = rounded(exact, most, LARGEST, INT).to(output.dtype.element_ty)
        tl.store(output + token * WIDTH + at, q, mask=at < WIDTH)
    else:
        tl.store(output + token * SIZE + at, normed, mask=inside)


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    slot_of,
    weight,
    queries,
    keys,
    values,
    key_head,
    key_slot,
    value_head,
    value_slot,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token: its queries turned, its key turned and its value to their slot.

    What is stored becomes what the memory holds; numbers too large for 8 bits become their largest (satfinite).
    """
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + token)
    low = tl.arange(0, HALF_PADDED)
    half = low < HALF
    turn = token * 2 * HALF
    cos_a = tl.load(cos + turn + low, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + turn + HALF + low, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + turn + low, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + turn + HALF + low, mask=half, other=0.0).to(tl.float32)[None, :]
    row = qkv + token * (HEADS + 2 * GROUPS) * SIZE

    head = tl.arange(0, HEADS_PADDED)
    to = queries + token * HEADS * SIZE + head[:, None] * SIZE
    _turn_heads(
        *(row, weight, to, head, head < HEADS, cos_a, cos_b, sin_a, sin_b, eps),
        *(SIZE, HALF, REST, HALF_PADDED, REST_PADDED, NORMS, FINE),
    )
    group = tl.arange(0, GROUPS_PADDED)
    to = keys + group.to(tl.int64)[:, None] * key_head + slot * key_slot
    _turn_heads(
        *(row, weight, to, HEADS + group, group < GROUPS, cos_a, cos_b, sin_a, sin_b, eps),
        *(SIZE, HALF, REST, HALF_PADDED, REST_PADDED, NORMS, FINE),
    )
    at = tl.arange(0, SIZE_PADDED)
    inside = (group < GROUPS)[:, None] & (at < SIZE)[None, :]
    value = tl.load(row + (HEADS + GROUPS + group)[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
    to = values + group.to(tl.int64)[:, None] * value_head + slot * value_slot
    tl.store(to + at[None, :], value, mask=inside)


@triton.jit
def _turn_heads(
    row,
    weight,
    to,
    head,
    exists,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    eps,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    FINE: tl.constexpr,
):
    """Some heads of one token, each to its place; their last REST numbers are not turned."""
    low = tl.arange(0, HALF_PADDED)
    inside = exists[:, None] & (low < HALF)[None, :]
    place = head[:, None] * SIZE + low[None, :]
    a = tl.load(row + place, mask=inside, other=0.0)
    b = tl.load(row + place + HALF, mask=inside, other=0.0)
    high = 2 * HALF + tl.arange(0, REST_PADDED)
    inside_rest = exists[:, None] & (high < SIZE)[None, :]
    place_rest = head[:, None] * SIZE + high[None, :]
    if REST:
        rest = tl.load(row + place_rest, mask=inside_rest, other=0.0)
    if NORMS:
        exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
        total = tl.sum(exact_a * exact_a, axis=1) + tl.sum(exact_b * exact_b, axis=1)
        if REST:
            exact = rest.to(tl.float32)
            total += tl.sum(exact * exact, axis=1)
        scale = tl.rsqrt(total / SIZE + eps)[:, None]
        a = weighted(a, scale, tl.load(weight + place, mask=inside, other=0.0), FINE)
        b = weighted(b, scale, tl.load(weight + place + HALF, mask=inside, other=0.0), FINE)
        if REST:
            rest = weighted(rest, scale, tl.load(weight + place_rest, mask=inside_rest, other=0.0), FINE)
    new_a, new_b = _turned(a, b, cos_a, cos_b, sin_a, sin_b)
    tl.store(to + low[None, :], new_a, mask=inside)
    tl.store(to + HALF + low[None, :], new_b, mask=inside)
    if REST:
        tl.store(to + high[None, :], rest, mask=inside_rest)


@triton.jit
def _turned(a, b, cos_a, cos_b, sin_a, sin_b):
    """Halves a, b turned: a cos - b sin, b cos + a sin, each product rounded."""
    exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (exact_a * cos_a).to(a.dtype).to(tl.float32) - (exact_b * sin_a).to(a.dtype).to(tl.float32)
    new_b = (exact_b * cos_b).to(a.dtype).to(tl.float32) + (exact_a * sin_b).to(a.dtype).to(tl.float32)
    return new_a.to(a.dtype), new_b.to(a.dtype)


@triton.jit
def _gate_kernel(
    gate_up,
    output,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some of one token's gates."""
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0)
    tl.store(output + token * SIZE + at, gated(gate, up, GELU), mask=inside)


@triton.jit
def _embed_kernel(token_of, embedding, output, row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Some of one token's embedding. Torch's own gather of up to 16 rows goes through them one after the other."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(embedding + tl.load(token_of + token) * row + at, mask=at < SIZE, other=0.0)
    tl.store(output + token * SIZE + at, value, mask=at < SIZE)


@triton.jit
def _turns_kernel(position_of, frequency, cos, sin, scale, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Cosines and sines of one token's position, each half of a head the same."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF_PADDED)
    inside = at < HALF
    angle = tl.load(position_of + token).to(tl.float32) * tl.load(frequency + at, mask=inside, other=0.0)
    to = token * 2 * HALF + at
    cosine = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    sine = (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    tl.store(cos + to, cosine, mask=inside)
    tl.store(cos + to + HALF, cosine, mask=inside)
    tl.store(sin + to, sine, mask=inside)
    tl.store(sin + to + HALF, sine, mask=inside)


class TritonLlama(FusedLlama):
    """The fused pass by these kernels."""

    def forward(
        self,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int] = (),
        logits_out_MV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `FusedLlama.forward`."""
        x_ND, aux_NX, states = self._begin(ids_N, aux_layer_ids)
        turns = self._turns_of(x_ND, attention.metadata.position_N)
        if 0 < len(x_ND) <= self.few_rows:
            x_ND, more_ND = self._run_few(x_ND, turns, attention, kv, states)
        else:
            # Who wants logits behind all of its tokens decodes or verifies: prompts want those behind their last.
            x_ND, more_ND = self._run_blocks(x_ND, turns, attention, kv, states, decoding=keep_M is None)
        normed_ND = _add_norm(x_ND, more_ND, self.blocks[-1].mlp_output_norm if self.blocks else None, self.norm)
        if len(self.blocks) in states:
            states[len(self.blocks)].copy_(x_ND)
        if keep_M is not None:
            normed_ND = normed_ND.index_select(0, keep_M)
        return self._logits(normed_ND, logits_out_MV), aux_NX

    def _embed(self, ids_N: Tensor) -> Tensor:
        """Embeddings [N, D]."""
        embedding_VD = self.embedding_VD
        assert isinstance(embedding_VD, Tensor)
        size = embedding_VD.shape[1]
        x_ND = embedding_VD.new_empty(len(ids_N), size)
        block = min(1024, triton.next_power_of_2(size))
        if len(ids_N):
            _embed_kernel[(len(ids_N), triton.cdiv(size, block))](
                *(ids_N, embedding_VD, x_ND, embedding_VD.stride(0)), SIZE=size, BLOCK=block, num_warps=4
            )
        return x_ND

    def _turns_of(self, x_ND: Tensor, position_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines [N, R] of every rotation: in one launch where a module of its own would take ten."""
        turns = []
        for rotary in self.rotations:
            if isinstance(rotary, StaticRotary):
                half = len(rotary.frequency_F)
                cos_NR, sin_NR = x_ND.new_empty(2, len(x_ND), 2 * half)
                _turns_kernel[(len(x_ND),)](
                    *(position_N, rotary.frequency_F, cos_NR, sin_NR, rotary.scale),
                    HALF=half,
                    HALF_PADDED=triton.next_power_of_2(half),
                    num_warps=1,
                )
            else:
                cos_NR, sin_NR = (x_1NR[0].contiguous() for x_1NR in rotary(x_ND, position_ids=position_N[None]))
            turns.append((cos_NR, sin_NR))
        return turns

    def with_few_rows(self) -> Self | None:
        """The same with kernels of their own for passes of few tokens; None where a product is none of theirs."""
        products = [x for block in self.blocks for x in (block.qkv, block.output)]
        for block in self.blocks:
            products += [block.mlp.gate_up, block.mlp.down] if isinstance(block.mlp, GatedMlp) else []
        if all(isinstance(x, PhasedProduct) for x in products):
            return replace(self, head=FewRowsProduct(self.head))  # they have such kernels themselves
        if any(not isinstance(x, PlainProduct) or not x.weight_ED.is_contiguous() for x in products):
            return None
        few_rows = most_rows_of_all(x.weight_ED for x in products if isinstance(x, PlainProduct))
        return replace(self, few_rows=few_rows, head=FewRowsProduct(self.head))

    def _run_blocks(
        self,
        x_ND: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        attention: AttentionBackend,
        kv: KVLayers,
        states: Mapping[int, Tensor],
        *,
        decoding: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Take x through all blocks; what the last adds is not added yet."""
        tokens, sizes, slot_N = len(x_ND), self.sizes, attention.metadata.slot_mapping_N
        qkv_NE = x_ND.new_empty(tokens, (sizes.heads + 2 * sizes.key_heads) * sizes.head_dim)
        q_NHK = x_ND.new_empty(tokens, sizes.heads, sizes.head_dim)
        gate_up = x_ND.new_empty(tokens, 2 * sizes.intermediate)
        gated_NI = x_ND.new_empty(tokens, sizes.intermediate)
        more_ND: Tensor | None = None
        more_norm: FusedNorm | None = None
        for layer, block in enumerate(self.blocks):
            fed = x_ND, more_ND, more_norm, block.attention_norm
            if not (decoding and _norm_product(block.qkv, *fed, qkv_NE)):
                self._product(block.qkv, _add_norm(*fed), qkv_NE, decoding=decoding)
            if layer in states:
                states[layer].copy_(x_ND)
            keys_GCK, values_GCK = kv[layer]
            _rotate(qkv_NE, *turns[block.rotation], slot_N, block.qk_norm, q_NHK, keys_GCK, values_GCK)
            asked = block.scale, block.softcap, block.window, block.sink_logit_H
            mixed_NHK = attention.attend(q_NHK, keys_GCK, values_GCK, *asked)
            more_ND = self._product(block.output, mixed_NHK.reshape(tokens, -1), decoding=decoding)
            fed = x_ND, more_ND, block.attention_output_norm, block.mlp_norm
            mlp = block.mlp
            if isinstance(mlp, Experts):
                more_ND = self._mixture(mlp, _add_norm(*fed))
            else:
                more_ND = self._feed_forward(mlp, fed, gate_up, gated_NI, decoding=decoding)
            more_norm = block.mlp_output_norm
        return x_ND, more_ND

    def _feed_forward(
        self,
        mlp: GatedMlp,
        fed: tuple[Tensor, Tensor | None, FusedNorm | None, FusedNorm],
        gate_up: Tensor,
        gated_NI: Tensor,
        *,
        decoding: bool,
    ) -> Tensor:
        """What the gates add; both memories are written to."""
        if not (decoding and _norm_product(mlp.gate_up, *fed, gate_up)):
            normed_ND = _add_norm(*fed)
            if isinstance(mlp.gate_up, PhasedProduct):
                self._product(mlp.gate_up, normed_ND, gate_up, decoding=decoding)
            else:
                mlp.gate_up(normed_ND, gate_up)
        down = _w8a8(mlp.down) if decoding else None
        if down is not None:
            rows = gate_quantise(gate_up, mlp.activation, *rows_for(len(gate_up), down.weight_EK))
            return down.decode_rows(*rows)
        _gate(gate_up, mlp.activation, gated_NI)
        return self._product(mlp.down, gated_NI, decoding=decoding)

    def _mixture(self, experts: Experts, x_ND: Tensor) -> Tensor:
        assert isinstance(experts, PlainExperts | FourBitExperts)
        return mixture(experts, x_ND, self.routes(experts, x_ND))

    def routes(self, experts: Experts, x_ND: Tensor) -> Routes:
        """Which experts rows go to."""
        router = experts.router
        if not isinstance(router, Router):
            return router(x_ND)
        return route(self._product(PlainProduct(router.weight_ED.t(), router.bias_E), x_ND), router)

    def _product(
        self, product: Product, x_ND: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False
    ) -> Tensor:
        """As `Product`, by the kernel for few rows where that is the faster one, or by that for decoding."""
        if isinstance(product, PhasedProduct):
            return product.decode(x_ND, out_NE) if decoding else product(x_ND, out_NE)
        return FewRowsProduct(product)(x_ND, out_NE) if self.few_rows else product(x_ND, out_NE)

    def _run_few(
        self,
        x_ND: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        attention: AttentionBackend,
        kv: KVLayers,
        states: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """As `_run_blocks`, for a few tokens."""
        tokens, sizes, slot_N = len(x_ND), self.sizes, attention.metadata.slot_mapping_N
        q_NHK = x_ND.new_empty(tokens, sizes.heads, sizes.head_dim)
        spare_ND = torch.empty_like(x_ND)  # x + more goes to the one of two that x is not in

        def prepared(
            more_ND: Tensor | None, more_norm: FusedNorm | None, norm: FusedNorm, kept_ND: Tensor | None
        ) -> tuple[Tensor, Tensor | None, FusedNorm | None, Tensor | None]:
            """What a product reads and does to it first. What is normed before it is added is not for its kernel."""
            if more_norm is None and fuses_norm(*x_ND.shape):
                return x_ND, more_ND, norm, kept_ND
            normed_ND = _add_norm(x_ND, more_ND, more_norm, norm)
            if kept_ND is not None:
                kept_ND.copy_(x_ND)
            return normed_ND, None, None, None

        more_ND: Tensor | None = None
        more_norm: FusedNorm | None = None
        for layer, block in enumerate(self.blocks):
            read_ND, add_ND, norm, kept_ND = prepared(more_ND, more_norm, block.attention_norm, states.get(layer))
            qkv_NE = norm_linear(read_ND, add_ND, norm, *_plain(block.qkv), x_out_ND=spare_ND, kept_ND=kept_ND)
            if add_ND is not None:
                x_ND, spare_ND = spare_ND, x_ND
            keys_GCK, values_GCK = kv[layer]
            _rotate(qkv_NE, *turns[block.rotation], slot_N, block.qk_norm, q_NHK, keys_GCK, values_GCK)
            asked = block.scale, block.softcap, block.window, block.sink_logit_H
            mixed_NHK = attention.attend(q_NHK, keys_GCK, values_GCK, *asked)
            more_ND = few_linear(mixed_NHK.reshape(tokens, -1), *_plain(block.output))
            mlp, more_norm = block.mlp, block.attention_output_norm
            if isinstance(mlp, Experts):  # their router and they themselves read the same norm
                more_ND = self._mixture(mlp, _add_norm(x_ND, more_ND, more_norm, block.mlp_norm))
            else:
                read_ND, add_ND, norm, _ = prepared(more_ND, more_norm, block.mlp_norm, None)
                gates = _plain(mlp.gate_up)
                gated_NI = norm_gate_up(read_ND, add_ND, norm, *gates, mlp.activation, x_out_ND=spare_ND)
                if add_ND is not None:
                    x_ND, spare_ND = spare_ND, x_ND
                more_ND = few_linear(gated_NI, *_plain(mlp.down))
            more_norm = block.mlp_output_norm
        return x_ND, more_ND


@dataclass(frozen=True, eq=False)
class FewRowsProduct:
    """A product, by the kernel for few rows where it is of plain linears and that is the faster one."""

    product: Product

    def __call__(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        """As `Product`."""
        if not isinstance(self.product, PlainProduct):
            return self.product(x_ND, out_NE)
        weight_ED, bias_E = self.product.weight_ED, self.product.bias_E
        contiguous = all(x.is_contiguous() for x in (x_ND, weight_ED, out_NE) if x is not None)
        if not contiguous or not 0 < len(x_ND) <= most_rows(weight_ED):
            return self.product(x_ND, out_NE)
        return few_linear(x_ND, weight_ED, bias_E, out_NE=out_NE)


def _plain(product: Product) -> tuple[Tensor, Tensor | None]:
    """The weight [E, D] and bias [E] of a plain product."""
    assert isinstance(product, PlainProduct)
    return product.weight_ED, product.bias_E


def _add_norm(x_ND: Tensor, more_ND: Tensor | None, more_norm: FusedNorm | None, norm: FusedNorm) -> Tensor:
    """Add to x, in place, what may be normed first, and norm it."""
    output_ND = torch.empty_like(x_ND)
    _launch_add_norm(x_ND, more_ND, more_norm, norm, output_ND, None)
    return output_ND


def _launch_add_norm(
    x_ND: Tensor,
    more_ND: Tensor | None,
    more_norm: FusedNorm | None,
    norm: FusedNorm,
    output_NK: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Write the norm to `output_NK`: as it is, or where there are scales as rows in 8 bits."""
    assert more_norm is None or more_norm.weight.dtype == norm.weight.dtype
    tokens, size = x_ND.shape
    width = output_NK.shape[1]
    padded = triton.next_power_of_2(max(size, width))
    _add_norm_kernel[(tokens,)](
        *(x_ND, x_ND if more_ND is None else more_ND, (more_norm or norm).weight, norm.weight, output_NK),
        *(x_ND if scale_N is None else scale_N, (more_norm or norm).eps, norm.eps),
        SIZE=size,
        PADDED=padded,
        WIDTH=width,
        ADDS=more_ND is not None,
        NORMS_Y=more_norm is not None,
        FINE=norm.weight.dtype != x_ND.dtype,
        QUANTISES=scale_N is not None,
        **largest_of(output_NK.dtype),
        num_warps=4 if padded <= 2048 else 8,
        # Products of 8-bit rows have a program for each processor; others have more, which would lie unevenly.
        **dependent_launch(x_ND.device, early=scale_N is not None and tokens <= MOST_EARLY),
    )


def _norm_product(
    product: Product,
    x_ND: Tensor,
    more_ND: Tensor | None,
    more_norm: FusedNorm | None,
    norm: FusedNorm,
    out_NE: Tensor,
) -> bool:
    """Add, norm and multiply a decoding pass's rows by 8-bit weights, in two launches; False for other products."""
    linear = _w8a8(product)
    if linear is None:
        return False
    rows = rows_for(len(x_ND), linear.weight_EK)
    _launch_add_norm(x_ND, more_ND, more_norm, norm, *rows)
    linear.decode_rows(*rows, out_NE)
    return True


def _w8a8(product: Product) -> W8A8Linear | None:
    """The linear of a product that reads rows in 8 bits on a GPU."""
    linear = product.linear if isinstance(product, PhasedProduct) else None
    if not isinstance(linear, W8A8Linear) or not linear.rounds_rows or linear.weight_EK.device.type != "cuda":
        return None
    return linear


def _rotate(
    qkv_NE: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    slot_mapping_N: Tensor,
    norm: FusedNorm | None,
    q_NHK: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Turn queries to `q_NHK`, keys to their slots, both normed first if they are, and copy values there.

    There may be no queries, neither before the keys nor in `q_NHK`.
    """
    tokens, heads, size = q_NHK.shape
    groups, half = keys.shape[0], cos_NR.shape[1] // 2
    rest = size - 2 * half
    _rotate_kernel[(tokens,)](
        *(qkv_NE, cos_NR, sin_NR, slot_mapping_N, qkv_NE if norm is None else norm.weight, q_NHK, keys, values),
        *(*keys.stride()[:2], *values.stride()[:2], 0.0 if norm is None else norm.eps),
        HEADS=heads,
        GROUPS=groups,
        SIZE=size,
        HALF=half,
        REST=rest,
        HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(max(rest, 1)),
        SIZE_PADDED=triton.next_power_of_2(size),
        HEADS_PADDED=triton.next_power_of_2(max(heads, 1)),
        GROUPS_PADDED=triton.next_power_of_2(groups),
        NORMS=norm is not None,
        FINE=norm is not None and norm.weight.dtype != qkv_NE.dtype,
        num_warps=4,
        **dependent_launch(q_NHK.device, early=tokens <= 16),
    )


def _gate(gate_up: Tensor, activation: Activation, gated_NI: Tensor) -> None:
    """Let through what the gates open."""
    tokens, size = gated_NI.shape
    sizes = {"SIZE": size, "BLOCK": 1024, "GELU": activation is Activation.GELU_TANH}
    options = dependent_launch(gated_NI.device)
    _gate_kernel[(tokens, triton.cdiv(size, 1024))](gate_up, gated_NI, **sizes, num_warps=4, **options)
