"""The Llama decoder block in as few torch operations as possible, over the weights of a loaded model.

    x += norm(output(attention(rotate(norm(q), norm(k)), v)))      q, k, v of norm(x)
    x += norm(down(activation(gate) * up))                         gate, up of norm(x)

Llama, Mistral, Qwen, Phi-3 and Gemma are this block. They differ in which of the norms they have, in biases, in the
activation, and in window, rotation and scale of each layer's attention; see `DecoderLayer`. Some layers of some models
have experts instead of the second line's products (`experts.py`).

In a short pass a model's own Python code costs more than its matrix products. So linears that read the same input are
one product here, queries and keys are rotated together, and all layers write their results to the same memory, which
is cut into its parts once per pass.

Invariant: every number is rounded where transformers rounds it, up to the order of sums and, in float32, of factors.
`recognise.py` decides which models are this block, and `trial.py` proves it.

Shapes: N tokens of a pass, M requested logits, V vocabulary, D hidden size, I intermediate size, H query heads, G key
heads, B = H + G both, K head dim, R rotary dim, T rotations, E outputs of a product, X concatenated auxiliary states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.elementwise import Activation, FusedNorm, elementwise_for
from eyas.kernels.linear.embedding_table import EmbeddingTable, look_up
from eyas.kernels.linear.served_linear import CompiledLinear, GpuLinear, ServedLinear
from eyas.kernels.llama.cpu import Ends, Layers, LlamaSizes, PackedProducts, Parts, load_layers
from eyas.kernels.llama.experts import Experts, Routes
from eyas.kernels.llama.rotary_table import RotaryWindow

ALONE = 16
"""A request alone in a pass of up to this many tokens uses rotations computed ahead."""

KVLayers = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values [G, C, K] of every layer, to be read and written."""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""Multiplies rows; the result is written to the second argument, if it is given."""

Rotary = Callable[..., tuple[Tensor, Tensor]]
"""Cosines and sines [1, N, R] of `position_ids` [1, N], in a tensor's dtype: a model's own module."""


@dataclass(frozen=True, eq=False)
class StaticRotary:
    """A model's own rotary module, if its angles are position times frequency at every length."""

    module: Rotary
    frequency_F: Tensor
    """Radians per position: float32 [R / 2]."""
    scale: float
    """Cosines and sines are multiplied by it."""

    def __call__(self, like: Tensor, *, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(like, position_ids=position_ids)


def join(linears: Sequence[Any]) -> Product | None:
    """Join linears that read the same input into one product; their outputs are adjacent, in order.

    The joined weight replaces its parts, which become views of it: the modules keep working, and no memory is taken.
    None for linears of several or unknown kinds, or that differ otherwise.
    """
    kind = type(linears[0])
    if issubclass(kind, ServedLinear) and all(type(linear) is kind for linear in linears):
        joined = kind.join(linears)
        return None if joined is None else ServedProduct(joined)
    if any(type(linear) is not nn.Linear for linear in linears) or len({x.bias is None for x in linears}) > 1:
        return None
    bias_E = None if linears[0].bias is None else merge([linear.bias for linear in linears])
    return PlainProduct(merge([linear.weight for linear in linears]).t(), bias_E)


class NotLlamaError(Exception):
    """A model is not this block; the message says why."""


@dataclass(frozen=True, eq=False)
class PlainProduct:
    """The product of plain linears."""

    weight_DE: Tensor
    bias_E: Tensor | None

    def __call__(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        if self.bias_E is None:
            return torch.mm(x_ND, self.weight_DE, out=out_NE)
        return torch.addmm(self.bias_E, x_ND, self.weight_DE, out=out_NE)

    @property
    def weight_ED(self) -> Tensor:
        return self.weight_DE.t()


@dataclass(frozen=True, eq=False)
class ServedProduct:
    """The product of a linear layer with packed weights."""

    linear: ServedLinear

    def __call__(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        return self.linear.product(x_ND, out_NE)

    def decode(self, x_ND: Tensor, out_NE: Tensor | None = None) -> Tensor:
        """Multiply tokens that are decoded or verified: a row's result does not depend on the rows beside it."""
        return self.linear.product(x_ND, out_NE, decoding=True)


def compiled_linear(product: Product) -> CompiledLinear | None:
    """The layer of a product that compiled code runs on a CPU; None for other products."""
    linear = product.linear if isinstance(product, ServedProduct) else None
    return linear if isinstance(linear, CompiledLinear) else None


def gpu_linear(product: Product) -> GpuLinear | None:
    """The layer of a product that has a separate decoding kernel on a GPU; None for other products."""
    linear = product.linear if isinstance(product, ServedProduct) else None
    return linear if isinstance(linear, GpuLinear) else None


def merge(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts and make them views of the result; nothing moves if they are already adjacent."""
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
class GatedMlp:
    """The feed-forward of a dense layer."""

    gate_up: Product
    activation: Activation
    down: Product


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderLayer:
    """One decoder layer."""

    attention_norm: FusedNorm
    qkv: Product
    qk_norm: FusedNorm | None
    """Norms of query and key heads, with a weight per head."""
    rotation: int
    """The index of the layer's rotation in the model."""
    scale: float
    softcap: float | None
    window: int | None
    sink_logit_H: Tensor | None
    """Attention sink logits per head, float32."""
    output: Product
    attention_output_norm: FusedNorm | None
    """For the attention output, before it is added to the state."""
    mlp_norm: FusedNorm
    mlp: GatedMlp | Experts
    mlp_output_norm: FusedNorm | None
    """For the feed-forward output, before it is added to the state."""


def packed_products(qkv: Product, output: Product, gate_up: Product, down: Product) -> PackedProducts | None:
    """The products of a layer for compiled code; None if one is not a compiled linear."""
    linears = [compiled_linear(product) for product in (qkv, output, gate_up, down)]
    packed = [linear for linear in linears if linear is not None]
    return PackedProducts(*packed) if len(packed) == len(linears) else None


def in_one_call(blocks: Sequence[DecoderLayer], sizes: LlamaSizes, ends: Ends | None = None) -> Layers | None:
    """The blocks as one call of compiled code, with embedding and head if given; None if a step is not compiled."""
    compiled = load_layers()
    parts = []
    for block in blocks:
        mlp = block.mlp
        if isinstance(mlp, Experts):
            return None
        products = packed_products(block.qkv, block.output, mlp.gate_up, mlp.down)
        if compiled is None or products is None:
            return None
        named = {part.name: getattr(block, part.name) for part in fields(block)}
        named = {name: named[name] for name in named if name not in {*PackedProducts._fields, "mlp"}}
        parts.append(Parts(products=products, activation=mlp.activation, **named))
    return None if compiled is None else Layers(parts, sizes, compiled, ends=ends)


def ends_in_one_call(embedding_VD: EmbeddingTable, norm: FusedNorm, head: Product) -> Ends | None:
    """Embedding, last norm and head for compiled code; None if one of them is not compiled."""
    plain, linear = [x for x in (norm.weight, embedding_VD) if isinstance(x, Tensor)], compiled_linear(head)
    if linear is None or any(elementwise_for(x) is None or not x.is_contiguous() for x in plain):
        return None
    return Ends(embedding_VD=embedding_VD, norm=norm, head=linear)


class Rotation:
    """Rotates halves a, b of the first R numbers of every query and key: a cos - b sin, b cos + a sin."""

    def __init__(self, qk_NBK: Tensor, turned_NBK: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> None:
        self._compiled, self._cos_NR, self._sin_NR = elementwise_for(qk_NBK), cos_NR, sin_NR
        self._qk_NBK, self._turned_NBK = qk_NBK, turned_NBK
        parts = [cos_NR.shape[1], qk_NBK.shape[2] - cos_NR.shape[1]]
        (self._x, self._rest), (self._turned, self._turned_rest) = (
            torch.split(x_NBK, parts, dim=-1) for x_NBK in (qk_NBK, turned_NBK)
        )
        self._cos, sin = cos_NR.unsqueeze(1), sin_NR.unsqueeze(1)
        (self._a, self._b), (sin_a, sin_b) = self._x.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        self._sin_a, self._sin_b = -sin_a, sin_b
        self._crossed = torch.empty_like(self._x)
        self._crossed_a, self._crossed_b = self._crossed.chunk(2, dim=-1)

    def __call__(self) -> None:
        """Rotate the current queries and keys."""
        if self._compiled is not None:
            self._compiled.rotate(self._qk_NBK, self._cos_NR, self._sin_NR, self._turned_NBK)
            return
        if self._rest.shape[-1]:
            self._turned_rest.copy_(self._rest)
        torch.mul(self._x, self._cos, out=self._turned)
        torch.mul(self._b, self._sin_a, out=self._crossed_a)
        torch.mul(self._a, self._sin_b, out=self._crossed_b)
        self._turned.add_(self._crossed)


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedLlama:
    """Runs a model with its KV cache."""

    embedding_VD: EmbeddingTable
    embedding_scale: Tensor | None
    """Embeddings are multiplied by it: a single number of their dtype."""
    rotations: Sequence[Rotary]
    blocks: Sequence[DecoderLayer]
    norm: FusedNorm
    head: Product
    logit_softcap: float | None
    """Logits become softcap * tanh(logit / softcap)."""
    sizes: LlamaSizes
    layers: Layers | None = None
    """All blocks in one call, if every step of theirs is compiled."""
    few_rows: int = 0
    """Passes of up to this many tokens have kernels of their own; the trial then tries every such length."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self.embedding_VD.dtype

    @property
    def quantised(self) -> bool:
        """Whether products on a CPU round their float32 inputs to 8 bits."""
        linear = compiled_linear(self.head)
        return linear is not None and linear.rounds_inputs

    @property
    def phased(self) -> bool:
        """Whether products have a separate kernel for decoding."""
        return any(gpu_linear(block.qkv) is not None for block in self.blocks)

    @property
    def rounds_rows(self) -> bool:
        """Whether products round their 16-bit inputs to 8 bits."""
        linears = [gpu_linear(block.qkv) for block in self.blocks]
        return any(linear.rounds_inputs for linear in linears if linear is not None)

    def _begin(self, ids_N: Tensor, aux_layer_ids: Sequence[int]) -> tuple[Tensor, Tensor | None, Mapping[int, Tensor]]:
        """Embed tokens; allocate memory for auxiliary states, and each layer's view of it."""
        x_ND = self._embed(ids_N)
        if self.embedding_scale is not None:
            x_ND *= self.embedding_scale
        return x_ND, *self._room(x_ND, aux_layer_ids)

    def _room(self, x_ND: Tensor, aux_layer_ids: Sequence[int]) -> tuple[Tensor | None, Mapping[int, Tensor]]:
        """Allocate memory for auxiliary states, and each layer's view of it."""
        if not aux_layer_ids:
            return None, {}
        tokens, width = x_ND.shape
        aux_NX = x_ND.new_empty(tokens, len(aux_layer_ids) * width)
        return aux_NX, dict(zip(aux_layer_ids, torch.split(aux_NX, width, dim=1), strict=True))

    def _embed(self, ids_N: Tensor) -> Tensor:
        return look_up(self.embedding_VD, ids_N)

    @cached_property
    def _next_turns(self) -> RotaryWindow | None:
        """Rotations computed some positions ahead; None if they may depend on more than the position."""
        if self.layers is None or not all(isinstance(rotary, StaticRotary) for rotary in self.rotations):
            return None
        like = torch.empty(0, dtype=torch.float32)
        return RotaryWindow(lambda position_N: self._turns(like, position_N))

    def _pass_turns(self, x_ND: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, N, R] of every rotation in a pass."""
        if len(metadata.rows) == 1 and self._next_turns is not None:
            (row,) = metadata.rows
            if row.ancestors is None and row.count <= ALONE:
                return self._next_turns.at(int(metadata.position_N[0]), row.count)
        return self._turns(x_ND, metadata.position_N)

    def _turns(self, x_ND: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, N, R] at positions."""
        turns = [rotary(x_ND, position_ids=position_N[None]) for rotary in self.rotations]
        cos_TNR, sin_TNR = (x[0] if len(turns) == 1 else torch.cat(x) for x in zip(*turns, strict=True))
        return cos_TNR.contiguous(), sin_TNR.contiguous()

    def routes(self, experts: Experts, x_ND: Tensor) -> Routes:
        return experts.router(x_ND)

    def _logits(self, normed_MD: Tensor, out_MV: Tensor | None) -> Tensor:
        """Logits [M, V], written to `out_MV` if it is given."""
        logits_MV = self.head(normed_MD, out_MV)
        if self.logit_softcap is not None:
            logits_MV.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits_MV

    def forward(
        self,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int] = (),
        logits_out_MV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits [M, V] after the tokens `keep_M`, or after all, and the auxiliary states [N, X] of all tokens.

        State k is the input of layer k; the one after the last layer is the input of the last norm. Logits are written
        to `logits_out_MV`, if it is given.
        """
        if self.layers is not None and self.layers.ends is not None:
            made = self._at_once(self.layers, ids_N, attention, kv, keep_M, aux_layer_ids, logits_out_MV)
            if made is not None:
                return made
        x_ND, aux_NX, states = self._begin(ids_N, aux_layer_ids)
        cos_TNR, sin_TNR = self._pass_turns(x_ND, attention.metadata)
        if self.layers is None or not self.layers.run(x_ND, cos_TNR, sin_TNR, attention, kv, states):
            self._run(x_ND, cos_TNR, sin_TNR, attention, kv, states)
        if keep_M is not None:
            x_ND = x_ND.index_select(0, keep_M)
        return self._logits(self.norm(x_ND), logits_out_MV), aux_NX

    def _at_once(
        self,
        layers: Layers,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int],
        logits_MV: Tensor | None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """`forward` as one call of compiled code; None, with nothing done, if the attention is not compiled."""
        x_ND = torch.empty(ids_N.shape[0], self.norm.weight.shape[0])
        aux_NX, states = self._room(x_ND, aux_layer_ids)
        if logits_MV is None:
            assert layers.ends is not None
            count = (ids_N if keep_M is None else keep_M).shape[0]
            logits_MV = torch.empty(count, layers.ends.head.out_features)
        turns = self._pass_turns(x_ND, attention.metadata)
        done = layers.run_target(ids_N, x_ND, *turns, attention, kv, states, keep_M, logits_MV)
        return (logits_MV, aux_NX) if done else None

    def _run(
        self,
        x_ND: Tensor,
        cos_TNR: Tensor,
        sin_TNR: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        states: Mapping[int, Tensor],
    ) -> None:
        """Run x_ND through all blocks, in place, step by step."""
        tokens, sizes, both = len(x_ND), self.sizes, self.sizes.heads + self.sizes.key_heads
        qkv_NE = x_ND.new_empty(tokens, (both + sizes.key_heads) * sizes.head_dim)
        qk, v = torch.split(qkv_NE.view(tokens, -1, sizes.head_dim), [both, sizes.key_heads], dim=1)
        turned = torch.empty_like(qk, memory_format=torch.contiguous_format)
        rotations = [Rotation(qk, turned, cos_NR, sin_NR) for cos_NR, sin_NR in zip(cos_TNR, sin_TNR, strict=True)]
        q, k = torch.split(turned, [sizes.heads, sizes.key_heads], dim=1)
        gate_up = x_ND.new_empty(tokens, 2 * sizes.intermediate)
        gate, up = gate_up.chunk(2, dim=1)
        compiled = elementwise_for(x_ND)

        for layer, block in enumerate(self.blocks):
            if layer in states:
                states[layer].copy_(x_ND)
            block.qkv(block.attention_norm(x_ND), qkv_NE)
            if block.qk_norm is not None and compiled is not None:
                compiled.norm_heads(qk, block.qk_norm.weight, block.qk_norm.eps)
            elif block.qk_norm is not None:
                qk.copy_(block.qk_norm(qk))
            rotations[block.rotation]()
            asked = block.scale, block.softcap, block.window, block.sink_logit_H
            keys_GCK, values_GCK = kv[layer]
            attended = attention.write_and_attend(q, k, v, keys_GCK, values_GCK, *asked)
            more_ND = block.output(attended.reshape(tokens, -1), None)
            x_ND += more_ND if block.attention_output_norm is None else block.attention_output_norm(more_ND)
            normed_ND, mlp = block.mlp_norm(x_ND), block.mlp
            if isinstance(mlp, Experts):
                more_ND = mlp(normed_ND)
            else:
                mlp.gate_up(normed_ND, gate_up)
                gated = mlp.activation(gate).mul_(up) if compiled is None else compiled.gate(gate_up, mlp.activation)
                more_ND = mlp.down(gated, None)
            x_ND += more_ND if block.mlp_output_norm is None else block.mlp_output_norm(more_ND)
        if len(self.blocks) in states:
            states[len(self.blocks)].copy_(x_ND)
