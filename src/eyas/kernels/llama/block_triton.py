# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The operations between the products and the attention of a decoder block on a GPU, one kernel each.

    add_norm          x += y, with a norm of y where a block has one; and the norm of x for the next product
    rotate            norms queries and keys where a block does; rotates queries in place of output and keys into the
                      KV cache, and copies values there
    gate              activation(gate) * up
    embed, cos_sin    embeddings, and cosines and sines of positions

Invariant, as in `block.py`: every number is rounded where transformers rounds it.

Shapes: N tokens of a pass, V vocabulary, D hidden size, I intermediate size, H query heads, G key heads, K head dim, R
rotary dim, F half of it, E outputs of a product.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from eyas.kernels.dependent_launch_triton import MOST_EARLY, begin_dependent, dependent_launch
from eyas.kernels.elementwise import Activation, FusedNorm
from eyas.kernels.elementwise_triton import gated, weighted
from eyas.kernels.linear.w8a8_triton import largest_of, rounded


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
    """One token: x += y, in place, and its norm, which may be rounded to 8 bits; zeros up to WIDTH."""
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
    """One token: rotate its queries, write its rotated key and its value to their slot.

    Stored numbers take the cache's dtype; those too large for 8 bits saturate.
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
    """Rotate some heads of one token; their last REST numbers are copied."""
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
    """Rotate halves a, b: a cos - b sin, b cos + a sin, each product rounded."""
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
    """Compute part of one token's gates."""
    begin_dependent(DEPENDENT, EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + at, mask=inside, other=0.0)
    tl.store(output + token * SIZE + at, gated(gate, up, GELU), mask=inside)


@triton.jit
def _embed_kernel(token_of, embedding, output, row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Part of one token's embedding. Torch's own gather of up to 16 rows is sequential."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(embedding + tl.load(token_of + token) * row + at, mask=at < SIZE, other=0.0)
    tl.store(output + token * SIZE + at, value, mask=at < SIZE)


@triton.jit
def _turns_kernel(position_of, frequency, cos, sin, scale, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Compute cosines and sines of one token's position, equal in both halves of a head."""
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


def embed(ids_N: Tensor, embedding_VD: Tensor) -> Tensor:
    """Embeddings [N, D]."""
    size = embedding_VD.shape[1]
    x_ND = embedding_VD.new_empty(len(ids_N), size)
    block = min(1024, triton.next_power_of_2(size))
    if len(ids_N):
        _embed_kernel[(len(ids_N), triton.cdiv(size, block))](
            *(ids_N, embedding_VD, x_ND, embedding_VD.stride(0)), SIZE=size, BLOCK=block, num_warps=4
        )
    return x_ND


def cos_sin(position_N: Tensor, frequency_F: Tensor, scale: float, like_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, R], scaled, in the dtype of another tensor."""
    half = len(frequency_F)
    cos_NR, sin_NR = like_ND.new_empty(2, len(like_ND), 2 * half)
    _turns_kernel[(len(like_ND),)](
        *(position_N, frequency_F, cos_NR, sin_NR, scale),
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        num_warps=1,
    )
    return cos_NR, sin_NR


def add_norm(x_ND: Tensor, more_ND: Tensor | None, more_norm: FusedNorm | None, norm: FusedNorm) -> Tensor:
    """Add `more` to x, in place, after its own norm if it has one, and norm x."""
    output_ND = torch.empty_like(x_ND)
    launch_add_norm(x_ND, more_ND, more_norm, norm, output_ND, None)
    return output_ND


def launch_add_norm(
    x_ND: Tensor,
    more_ND: Tensor | None,
    more_norm: FusedNorm | None,
    norm: FusedNorm,
    output_NK: Tensor,
    scale_N: Tensor | None,
) -> None:
    """Write the norm to `output_NK`: as it is, or as 8-bit rows if there are scales."""
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
        # 8-bit products run one program per multiprocessor; others have more, which early programs would distribute
        # unevenly.
        **dependent_launch(x_ND.device, early=scale_N is not None and tokens <= MOST_EARLY),
    )


def rotate(
    qkv_NE: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    slot_mapping_N: Tensor,
    norm: FusedNorm | None,
    q_NHK: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Rotate queries to `q_NHK` and keys to their slots, after their norms if there are any, and copy values there.

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


def gate(gate_up: Tensor, activation: Activation, gated_NI: Tensor) -> None:
    """activation(gate) * up."""
    tokens, size = gated_NI.shape
    sizes = {"SIZE": size, "BLOCK": 1024, "GELU": activation is Activation.GELU_TANH}
    options = dependent_launch(gated_NI.device)
    _gate_kernel[(tokens, triton.cdiv(size, 1024))](gate_up, gated_NI, **sizes, num_warps=4, **options)
