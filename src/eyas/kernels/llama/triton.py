# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The plain Llama block on a GPU: what stands between its products and its attention, in three kernels.

A decoding step multiplies a few tokens, and then every small operation takes as long as its launch. So all that is done
to a number between two products is done in one kernel:

    add and norm       x += y; the norm of x, which the next product reads
    rotate and store   queries are turned, keys are turned into the cache, values are copied there
    gate               silu(gate) * up

Invariant, as in `block.py`: every number is rounded where transformers rounds it. Whether that holds is tried before
a model is served so (`trial.py`).

Shapes: N tokens of a pass, M logits asked for, V vocabulary, D hidden size, I intermediate size, H query heads, G key
heads, K head dim, E outputs of a product, X concatenated auxiliary states.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.attention.backend import AttentionBackend
from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.llama.block import FusedLlama, KVLayers


@triton.jit
def _add_norm_kernel(x, y, weight, output, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """One token: x += y, in place, and its norm."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    value = tl.load(x + token * SIZE + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(y + token * SIZE + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + token * SIZE + at, value, mask=inside)
    exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / SIZE + eps)
    normed = (exact * scale).to(value.dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + at, (normed * factor).to(value.dtype), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    slot_of,
    queries,
    keys,
    values,
    key_head,
    key_slot,
    value_head,
    value_slot,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
):
    """One token: its queries turned, its key turned and its value to their slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + token)
    low = tl.arange(0, HALF_PADDED)
    half = low < HALF
    cos_a = tl.load(cos + token * SIZE + low, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + token * SIZE + HALF + low, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + token * SIZE + low, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + token * SIZE + HALF + low, mask=half, other=0.0).to(tl.float32)[None, :]
    row = qkv + token * (HEADS + 2 * GROUPS) * SIZE

    head = tl.arange(0, HEADS_PADDED)
    inside = (head < HEADS)[:, None] & half[None, :]
    place = head[:, None] * SIZE + low[None, :]
    a = tl.load(row + place, mask=inside, other=0.0)
    b = tl.load(row + place + HALF, mask=inside, other=0.0)
    new_a, new_b = _turned(a, b, cos_a, cos_b, sin_a, sin_b)
    to = queries + token * HEADS * SIZE + place
    tl.store(to, new_a, mask=inside)
    tl.store(to + HALF, new_b, mask=inside)

    group = tl.arange(0, GROUPS_PADDED)
    inside = (group < GROUPS)[:, None] & half[None, :]
    place = (HEADS + group)[:, None] * SIZE + low[None, :]
    a = tl.load(row + place, mask=inside, other=0.0)
    b = tl.load(row + place + HALF, mask=inside, other=0.0)
    new_a, new_b = _turned(a, b, cos_a, cos_b, sin_a, sin_b)
    to = keys + group.to(tl.int64)[:, None] * key_head + slot * key_slot + low[None, :]
    tl.store(to, new_a, mask=inside)
    tl.store(to + HALF, new_b, mask=inside)

    place += GROUPS * SIZE
    to = values + group.to(tl.int64)[:, None] * value_head + slot * value_slot + low[None, :]
    tl.store(to, tl.load(row + place, mask=inside, other=0.0), mask=inside)
    tl.store(to + HALF, tl.load(row + place + HALF, mask=inside, other=0.0), mask=inside)


@triton.jit
def _turned(a, b, cos_a, cos_b, sin_a, sin_b):
    """Halves a, b turned: a cos - b sin, b cos + a sin, each product rounded."""
    exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
    new_a = (exact_a * cos_a).to(a.dtype).to(tl.float32) - (exact_b * sin_a).to(a.dtype).to(tl.float32)
    new_b = (exact_b * cos_b).to(a.dtype).to(tl.float32) + (exact_a * sin_b).to(a.dtype).to(tl.float32)
    return new_a.to(a.dtype), new_b.to(a.dtype)


@triton.jit
def _gate_kernel(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Some of one token's gates."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    opened = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(output + token * SIZE + at, (opened * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonLlama(FusedLlama):
    """The fused pass by these kernels."""

    def forward(
        self,
        ids_N: Tensor,
        attention: AttentionBackend,
        kv: KVLayers,
        keep_M: Tensor | None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `FusedLlama.forward`."""
        x_ND, aux_NX, states = self._begin(ids_N, aux_layer_ids)
        tokens = len(x_ND)

        sizes, both = self.sizes, self.sizes.heads + self.sizes.key_heads
        qkv_NE = x_ND.new_empty(tokens, (both + sizes.key_heads) * sizes.head_dim)
        qk_NBK = qkv_NE.view(tokens, -1, sizes.head_dim)[:, :both]
        q_NHK = x_ND.new_empty(tokens, sizes.heads, sizes.head_dim)
        gate_up = x_ND.new_empty(tokens, 2 * sizes.intermediate)
        gated_NI = x_ND.new_empty(tokens, sizes.intermediate)
        metadata = attention.metadata
        cos, sin = (t[0].contiguous() for t in self.rotary(x_ND, position_ids=metadata.position_N[None]))

        more_ND: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            normed_ND = _add_norm(x_ND, more_ND, block.attention_norm)
            if layer in states:
                states[layer].copy_(x_ND)
            block.qkv(normed_ND, qkv_NE)
            if block.qk_norm is not None:
                qk_NBK.copy_(block.qk_norm(qk_NBK))
            keys, values = kv[layer]
            _rotate(qkv_NE, cos, sin, metadata.slot_mapping_N, q_NHK, keys, values)
            mixed_NHK = attention.attend(q_NHK, keys, values, block.scale)
            normed_ND = _add_norm(x_ND, block.output(mixed_NHK.reshape(tokens, -1), None), block.mlp_norm)
            block.gate_up(normed_ND, gate_up)
            _gate(gate_up, gated_NI)
            more_ND = block.down(gated_NI, None)

        normed_ND = _add_norm(x_ND, more_ND, self.norm)
        if len(self.blocks) in states:
            states[len(self.blocks)].copy_(x_ND)
        if keep_M is not None:
            normed_ND = normed_ND.index_select(0, keep_M)
        return self.head(normed_ND, None), aux_NX


def _add_norm(x_ND: Tensor, more_ND: Tensor | None, norm: FusedNorm) -> Tensor:
    """Add to x, in place, and norm it."""
    tokens, size = x_ND.shape
    output_ND = torch.empty_like(x_ND)
    padded = triton.next_power_of_2(size)
    _add_norm_kernel[(tokens,)](
        *(x_ND, x_ND if more_ND is None else more_ND, norm.weight, output_ND, norm.eps),
        SIZE=size,
        PADDED=padded,
        ADDS=more_ND is not None,
        num_warps=4 if padded <= 2048 else 8,
    )
    return output_ND


def _rotate(
    qkv_NE: Tensor, cos_NK: Tensor, sin_NK: Tensor, slot_mapping_N: Tensor, q_NHK: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Turn queries to `q_NHK`, keys to their slots, and copy values there."""
    tokens, heads, size = q_NHK.shape
    groups, half = keys.shape[0], size // 2
    _rotate_kernel[(tokens,)](
        *(qkv_NE, cos_NK, sin_NK, slot_mapping_N, q_NHK, keys, values),
        *(*keys.stride()[:2], *values.stride()[:2]),
        HEADS=heads,
        GROUPS=groups,
        SIZE=size,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        HEADS_PADDED=triton.next_power_of_2(heads),
        GROUPS_PADDED=triton.next_power_of_2(groups),
        num_warps=4,
    )


def _gate(gate_up: Tensor, gated_NI: Tensor) -> None:
    """Let through what the gates open."""
    tokens, size = gated_NI.shape
    _gate_kernel[(tokens, triton.cdiv(size, 1024))](gate_up, gated_NI, SIZE=size, BLOCK=1024, num_warps=4)
