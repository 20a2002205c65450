"""A target's fused pass on a GPU.

A decoding step multiplies few tokens, and then every small operation takes as long as its launch. So everything between
two products is one kernel (`block_triton.py`).

For very few tokens, products of plain weights are kernels of their own with add, norm and gate fused
(`kernels/linear/few_rows_triton.py`). Experts have kernels of their own for any number of tokens (`experts_triton.py`).

Invariant, as in `block.py`: every number is rounded where transformers rounds it. A trial checks that before a model is
served (`trial.py`).

Shapes: N tokens of a pass, M requested logits, V vocabulary, D hidden size, I intermediate size, H query heads, G key
heads, K head dim, R rotary dim, E outputs of a product, X concatenated auxiliary states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.linear.few_rows_triton import (
    few_linear,
    fuses_norm,
    most_rows,
    most_rows_of_all,
    norm_gate_up,
    norm_linear,
)
from eyas.kernels.linear.w8a8_linear import W8A8Linear
from eyas.kernels.linear.w8a8_triton import gate_quantise, rows_for
from eyas.kernels.llama.block import (
    FusedLlama,
    GatedMlp,
    KVLayers,
    PlainProduct,
    Product,
    ServedProduct,
    StaticRotary,
    gpu_linear,
)
from eyas.kernels.llama.block_triton import add_norm, cos_sin, embed, gate, launch_add_norm, rotate
from eyas.kernels.llama.experts import Experts, PlainExperts, Router, Routes
from eyas.kernels.llama.experts_triton import mixture, route
from eyas.kernels.llama.mxfp4_experts import FourBitExperts


class TritonLlama(FusedLlama):
    """The fused pass by kernels in Triton."""

    def forward(
        self,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int] = (),
        logits_out_MV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        x_ND, aux_NX, states = self._begin(ids_N, aux_layer_ids)
        turns = self._turns_of(x_ND, attention.metadata.position_N)
        if 0 < len(x_ND) <= self.few_rows:
            x_ND, more_ND = self._run_few(x_ND, turns, attention, kv, states)
        else:
            # Logits after all tokens mean decoding or verification: prompts need those after their last token.
            x_ND, more_ND = self._run_blocks(x_ND, turns, attention, kv, states, decoding=keep_M is None)
        normed_ND = add_norm(x_ND, more_ND, self.blocks[-1].mlp_output_norm if self.blocks else None, self.norm)
        if len(self.blocks) in states:
            states[len(self.blocks)].copy_(x_ND)
        if keep_M is not None:
            normed_ND = normed_ND.index_select(0, keep_M)
        return self._logits(normed_ND, logits_out_MV), aux_NX

    def _embed(self, ids_N: Tensor) -> Tensor:
        assert isinstance(self.embedding_VD, Tensor)
        return embed(ids_N, self.embedding_VD)

    def _turns_of(self, x_ND: Tensor, position_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines [N, R] of every rotation: in one launch instead of the ten of a model's own module."""
        turns = []
        for rotary in self.rotations:
            if isinstance(rotary, StaticRotary):
                turns.append(cos_sin(position_N, rotary.frequency_F, rotary.scale, x_ND))
            else:
                cos_NR, sin_NR = (x_1NR[0].contiguous() for x_1NR in rotary(x_ND, position_ids=position_N[None]))
                turns.append((cos_NR, sin_NR))
        return turns

    def with_few_rows(self) -> Self | None:
        """A copy with kernels of their own for passes of few tokens; None if a product has none."""
        products = [x for block in self.blocks for x in (block.qkv, block.output)]
        for block in self.blocks:
            products += [block.mlp.gate_up, block.mlp.down] if isinstance(block.mlp, GatedMlp) else []
        if all(isinstance(x, ServedProduct) for x in products):
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
        """Run x through all blocks; the last block's output is not added yet."""
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
                self._product(block.qkv, add_norm(*fed), qkv_NE, decoding=decoding)
            if layer in states:
                states[layer].copy_(x_ND)
            keys_GCK, values_GCK = kv[layer]
            rotate(qkv_NE, *turns[block.rotation], slot_N, block.qk_norm, q_NHK, keys_GCK, values_GCK)
            asked = block.scale, block.softcap, block.window, block.sink_logit_H
            mixed_NHK = attention.attend(q_NHK, keys_GCK, values_GCK, *asked)
            more_ND = self._product(block.output, mixed_NHK.reshape(tokens, -1), decoding=decoding)
            fed = x_ND, more_ND, block.attention_output_norm, block.mlp_norm
            mlp = block.mlp
            if isinstance(mlp, Experts):
                more_ND = self._mixture(mlp, add_norm(*fed))
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
        """Compute the feed-forward output; both buffers are overwritten."""
        if not (decoding and _norm_product(mlp.gate_up, *fed, gate_up)):
            normed_ND = add_norm(*fed)
            if isinstance(mlp.gate_up, ServedProduct):
                self._product(mlp.gate_up, normed_ND, gate_up, decoding=decoding)
            else:
                mlp.gate_up(normed_ND, gate_up)
        down = _w8a8(mlp.down) if decoding else None
        if down is not None:
            rows = gate_quantise(gate_up, mlp.activation, *rows_for(len(gate_up), down.weight_EK))
            return down.decode_rows(*rows)
        gate(gate_up, mlp.activation, gated_NI)
        return self._product(mlp.down, gated_NI, decoding=decoding)

    def _mixture(self, experts: Experts, x_ND: Tensor) -> Tensor:
        assert isinstance(experts, PlainExperts | FourBitExperts)
        return mixture(experts, x_ND, self.routes(experts, x_ND))

    def routes(self, experts: Experts, x_ND: Tensor) -> Routes:
        router = experts.router
        if not isinstance(router, Router):
            return router(x_ND)
        return route(self._product(PlainProduct(router.weight_ED.t(), router.bias_E), x_ND), router)

    def _product(
        self, product: Product, x_ND: Tensor, out_NE: Tensor | None = None, *, decoding: bool = False
    ) -> Tensor:
        """Multiply by the kernel for few rows where that is faster, or by that for decoding."""
        if isinstance(product, ServedProduct):
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
        """`_run_blocks` for a few tokens."""
        tokens, sizes, slot_N = len(x_ND), self.sizes, attention.metadata.slot_mapping_N
        q_NHK = x_ND.new_empty(tokens, sizes.heads, sizes.head_dim)
        spare_ND = torch.empty_like(x_ND)  # x + more goes to whichever of the two x is not in

        def prepared(
            more_ND: Tensor | None, more_norm: FusedNorm | None, norm: FusedNorm, kept_ND: Tensor | None
        ) -> tuple[Tensor, Tensor | None, FusedNorm | None, Tensor | None]:
            """The input of a product and what its kernel does to it first. A norm before the addition takes a kernel of
            its own.
            """
            if more_norm is None and fuses_norm(*x_ND.shape):
                return x_ND, more_ND, norm, kept_ND
            normed_ND = add_norm(x_ND, more_ND, more_norm, norm)
            if kept_ND is not None:
                kept_ND.copy_(x_ND)
            return normed_ND, None, None, None

        more_ND: Tensor | None = None
        more_norm: FusedNorm | None = None
        for layer, block in enumerate(self.blocks):
            read_ND, add_ND, norm, kept_ND = prepared(more_ND, more_norm, block.attention_norm, states.get(layer))
            qkv_NE = norm_linear(read_ND, add_ND, norm, *plain_weights(block.qkv), x_out_ND=spare_ND, kept_ND=kept_ND)
            if add_ND is not None:
                x_ND, spare_ND = spare_ND, x_ND
            keys_GCK, values_GCK = kv[layer]
            rotate(qkv_NE, *turns[block.rotation], slot_N, block.qk_norm, q_NHK, keys_GCK, values_GCK)
            asked = block.scale, block.softcap, block.window, block.sink_logit_H
            mixed_NHK = attention.attend(q_NHK, keys_GCK, values_GCK, *asked)
            more_ND = few_linear(mixed_NHK.reshape(tokens, -1), *plain_weights(block.output))
            mlp, more_norm = block.mlp, block.attention_output_norm
            if isinstance(mlp, Experts):  # router and experts read the same norm
                more_ND = self._mixture(mlp, add_norm(x_ND, more_ND, more_norm, block.mlp_norm))
            else:
                read_ND, add_ND, norm, _ = prepared(more_ND, more_norm, block.mlp_norm, None)
                gates = plain_weights(mlp.gate_up)
                gated_NI = norm_gate_up(read_ND, add_ND, norm, *gates, mlp.activation, x_out_ND=spare_ND)
                if add_ND is not None:
                    x_ND, spare_ND = spare_ND, x_ND
                more_ND = few_linear(gated_NI, *plain_weights(mlp.down))
            more_norm = block.mlp_output_norm
        return x_ND, more_ND


@dataclass(frozen=True, eq=False)
class FewRowsProduct:
    """A product that uses the kernel for few rows if its weights are plain and that is faster."""

    product: Product

    def __call__(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        if not isinstance(self.product, PlainProduct):
            return self.product(x_ND, out_NE)
        weight_ED, bias_E = self.product.weight_ED, self.product.bias_E
        contiguous = all(x.is_contiguous() for x in (x_ND, weight_ED, out_NE) if x is not None)
        if not contiguous or not 0 < len(x_ND) <= most_rows(weight_ED):
            return self.product(x_ND, out_NE)
        return few_linear(x_ND, weight_ED, bias_E, out_NE=out_NE)


def plain_weights(product: Product) -> tuple[Tensor, Tensor | None]:
    """The weight [E, D] and bias [E] of a plain product."""
    assert isinstance(product, PlainProduct)
    return product.weight_ED, product.bias_E


def _norm_product(
    product: Product,
    x_ND: Tensor,
    more_ND: Tensor | None,
    more_norm: FusedNorm | None,
    norm: FusedNorm,
    out_NE: Tensor,
) -> bool:
    """Add, norm and multiply decoding rows by 8-bit weights in two launches; False for other products."""
    linear = _w8a8(product)
    if linear is None:
        return False
    rows = rows_for(len(x_ND), linear.weight_EK)
    launch_add_norm(x_ND, more_ND, more_norm, norm, *rows)
    linear.decode_rows(*rows, out_NE)
    return True


def _w8a8(product: Product) -> W8A8Linear | None:
    """The layer of a product that reads 8-bit rows on a GPU."""
    linear = gpu_linear(product)
    if not isinstance(linear, W8A8Linear) or not linear.rounds_rows or linear.weight_EK.device.type != "cuda":
        return None
    return linear
