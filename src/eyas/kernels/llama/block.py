"""The plain Llama block in as few torch operations as it takes, over the weights of a loaded model.

    x += output(attention(rotate(q, k), v))      q, k, v of norm(x)
    x += down(silu(gate) * up)                   gate, up of norm(x)

Where a pass is short, running a model's own code costs more than its matrix products. So linears that read the same
input are one product here, queries and keys are rotated together, and the memory that a layer's results go to is
the same for all layers and cut into its parts once per pass.

Invariant: every number is rounded where transformers rounds it, up to the order of sums and, in float32, of factors.
Which models are this block is for `recognise.py` to tell, and that they are for `trial.py`.

Shapes: N tokens of a pass, M logits asked for, V vocabulary, D hidden size, I intermediate size, H query heads, G key
heads, B = H + G both, K head dim, E outputs of a product, X concatenated auxiliary states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.elementwise import FusedNorm, elementwise_for
from eyas.kernels.linear.packed_linear import PackedLinear, joined
from eyas.kernels.llama.cpu import Layers, LlamaSizes, Norm, Parts, load_layers

KVLayers = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values [G, C, K] of every layer, to be read and written."""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""What a linear makes of rows; written to the second argument, if there is one."""


def join(linears: Sequence[Any]) -> Product | None:
    """One product for linears that read the same input; their outputs lie side by side, in their order.

    The joined weight takes the place of its parts, which become views of it: the modules go on working, and no
    memory is taken. None for linears that are neither plain nor packed, or not alike.
    """
    if all(type(linear) is PackedLinear for linear in linears):
        packed = joined(linears)
        return None if packed is None else PackedProduct(packed)
    if any(type(linear) is not nn.Linear for linear in linears) or len({x.bias is None for x in linears}) > 1:
        return None
    weight_DE = _merge([linear.weight for linear in linears]).t()
    if linears[0].bias is None:
        return partial(_product, weight_DE)
    return partial(_product_plus, _merge([linear.bias for linear in linears]), weight_DE)


def _product(weight_DE: Tensor, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
    return torch.mm(x_ND, weight_DE, out=out_NE)


def _product_plus(bias_E: Tensor, weight_DE: Tensor, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
    return torch.addmm(bias_E, x_ND, weight_DE, out=out_NE)


class NotLlamaError(Exception):
    """A model is not the plain block; says why."""


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """The product of packed linears."""

    packed: PackedLinear

    def __call__(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        """As `Product`."""
        return self.packed.kernel.linear(x_ND, self.packed, out_NE)


def _merge(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor whose views they are from now on; nothing is moved if they are already."""
    first, ends = parts[0], list(accumulate((len(part) for part in parts), initial=0))
    if len(parts) == 1:
        return first.detach()
    row, places = first[0].numel(), [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    if places == [(places[0][0], places[0][1] + begin * row) for begin in ends[:-1]]:
        return first.detach().as_strided((ends[-1], *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, (begin, end) in zip(parts, pairwise(ends), strict=True):
        part.data = whole[begin:end]
    return whole


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """One decoder layer."""

    attention_norm: FusedNorm
    qkv: Product
    qk_norm: FusedNorm | None
    """Of every query and key head, with a weight for each."""
    output: Product
    scale: float
    mlp_norm: FusedNorm
    gate_up: Product
    down: Product


def packed_parts(
    *,
    attention_norm: Norm | None,
    mlp_norm: Norm,
    scale: float,
    qkv: Product,
    output: Product,
    gate_up: Product,
    down: Product,
) -> Parts | None:
    """A layer's parts as compiled code runs them; None if a product is not packed."""
    products = {"qkv": qkv, "output": output, "gate_up": gate_up, "down": down}
    packed = {name: product.packed for name, product in products.items() if isinstance(product, PackedProduct)}
    if len(packed) < len(products):
        return None
    return Parts(attention_norm=attention_norm, mlp_norm=mlp_norm, scale=scale, **packed)


def in_one_call(blocks: Sequence[DecoderLayer], sizes: LlamaSizes) -> Layers | None:
    """The blocks as compiled code runs them; None where a step of theirs is not compiled."""
    compiled = load_layers()
    several = [
        None
        if block.qk_norm is not None
        else packed_parts(
            attention_norm=block.attention_norm,
            mlp_norm=block.mlp_norm,
            scale=block.scale,
            qkv=block.qkv,
            output=block.output,
            gate_up=block.gate_up,
            down=block.down,
        )
        for block in blocks
    ]
    parts = [part for part in several if part is not None]
    return None if compiled is None or len(parts) < len(blocks) else Layers(parts, sizes, compiled)


class Rotation:
    """Turns the halves a, b of every query and key, in memory [N, B, K]: a cos - b sin, b cos + a sin."""

    def __init__(self, qk_NBK: Tensor, cos_NK: Tensor, sin_NK: Tensor) -> None:
        self._compiled, self._cos_NK, self._sin_NK = elementwise_for(qk_NBK), cos_NK, sin_NK
        self._qk, self._cos = qk_NBK, cos_NK.unsqueeze(1)
        self.turned_NBK = torch.empty_like(qk_NBK, memory_format=torch.contiguous_format)
        (self._a, self._b), (sin_a, sin_b) = qk_NBK.chunk(2, dim=-1), sin_NK.unsqueeze(1).chunk(2, dim=-1)
        self._sin_a, self._sin_b = -sin_a, sin_b
        self._crossed = torch.empty_like(qk_NBK)
        self._crossed_a, self._crossed_b = self._crossed.chunk(2, dim=-1)

    def __call__(self) -> None:
        """Turn what was written to the queries and keys since."""
        if self._compiled is not None:
            self._compiled.rotate(self._qk, self._cos_NK, self._sin_NK, self.turned_NBK)
            return
        torch.mul(self._qk, self._cos, out=self.turned_NBK)
        torch.mul(self._b, self._sin_a, out=self._crossed_a)
        torch.mul(self._a, self._sin_b, out=self._crossed_b)
        self.turned_NBK.add_(self._crossed)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedLlama:
    """Runs a model over blocks of keys and values."""

    embedding_VD: Tensor
    rotary: nn.Module
    blocks: Sequence[DecoderLayer]
    norm: FusedNorm
    head: Product
    sizes: LlamaSizes
    layers: Layers | None = None
    """All blocks in one call, where every step of theirs is compiled."""

    def _begin(self, ids_N: Tensor, aux_layer_ids: Sequence[int]) -> tuple[Tensor, Tensor | None, Mapping[int, Tensor]]:
        """The embedded tokens, memory for auxiliary states, and each layer's part of it."""
        x_ND = functional.embedding(ids_N, self.embedding_VD)
        if not aux_layer_ids:
            return x_ND, None, {}
        tokens, width = x_ND.shape
        aux_NX = x_ND.new_empty(tokens, len(aux_layer_ids) * width)
        return x_ND, aux_NX, dict(zip(aux_layer_ids, torch.split(aux_NX, width, dim=1), strict=True))

    def forward(
        self,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [M, V] behind the tokens `keep_M`, or all, and the auxiliary states [N, X] of all.

        State k is what layer k reads, and behind the last layer what the norm reads.
        """
        x_ND, aux_NX, states = self._begin(ids_N, aux_layer_ids)
        cos_TNK, sin_TNK = self.rotary(x_ND, position_ids=attention.metadata.position_N[None])
        cos_NK, sin_NK = cos_TNK[0].contiguous(), sin_TNK[0].contiguous()
        if self.layers is None or not self.layers.run(x_ND, cos_NK, sin_NK, attention, kv, states):
            self._run(x_ND, cos_NK, sin_NK, attention, kv, states)
        if keep_M is not None:
            x_ND = x_ND.index_select(0, keep_M)
        return self.head(self.norm(x_ND), None), aux_NX

    def _run(
        self,
        x_ND: Tensor,
        cos_NK: Tensor,
        sin_NK: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        states: Mapping[int, Tensor],
    ) -> None:
        """Take x_ND through all blocks, in place, step by step."""
        tokens, sizes, both = len(x_ND), self.sizes, self.sizes.heads + self.sizes.key_heads
        qkv_NE = x_ND.new_empty(tokens, (both + sizes.key_heads) * sizes.head_dim)
        qk, v = torch.split(qkv_NE.view(tokens, -1, sizes.head_dim), [both, sizes.key_heads], dim=1)
        rotate = Rotation(qk, cos_NK, sin_NK)
        q, k = torch.split(rotate.turned_NBK, [sizes.heads, sizes.key_heads], dim=1)
        gate_up = x_ND.new_empty(tokens, 2 * sizes.intermediate)
        gate, up = gate_up.chunk(2, dim=1)
        compiled = elementwise_for(x_ND)

        for layer, block in enumerate(self.blocks):
            if layer in states:
                states[layer].copy_(x_ND)
            block.qkv(block.attention_norm(x_ND), qkv_NE)
            if block.qk_norm is not None:
                qk.copy_(block.qk_norm(qk))
            rotate()
            attended = attention.write_and_attend(q, k, v, *kv[layer], block.scale)
            x_ND += block.output(attended.reshape(tokens, -1), None)
            block.gate_up(block.mlp_norm(x_ND), gate_up)
            gated = functional.silu(gate).mul_(up) if compiled is None else compiled.gate(gate_up)
            x_ND += block.down(gated, None)
        if len(self.blocks) in states:
            states[len(self.blocks)].copy_(x_ND)
