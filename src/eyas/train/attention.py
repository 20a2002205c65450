"""Attention of the training-time test: the earlier tokens of the document, and the slot's own drafts.

A query at depth k sees the depth-0 keys of its document up to its own slot and, of each later depth, the key of its own
slot only: in decoding those are the drafts of this round. Two implementations of the same thing: one written out, for
CPUs and as the reference, and one on flash attention. Flash attention covers the depth-0 keys; the handful of keys in
the slot itself are merged with it by their log-sum-exp, and the backward pass of flash attention is given the merged
output and normaliser, from which it finds its own share of the gradient.

Shapes: T slots, H heads, G key heads, R = H / G, K head dim.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.drafter.attention import KeysAndValues
from eyas.errors import UserError
from eyas.train.batch import TrainingBatch

Merge = Callable[..., tuple[Tensor, Tensor]]
Split = Callable[..., tuple[Tensor, list[Tensor], list[Tensor]]]


class UnrollAttention(Protocol):
    """An `Attend` that is told how deep the unroll is."""

    def at(self, depth: int) -> "UnrollAttention":
        """Say which depth calls next."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from all slots [T, H, K] of this depth."""
        ...


class _KeyValueHistory:
    """Keys and values of every depth, by layer. A depth that is run again (checkpointing) finds what it left."""

    def __init__(self) -> None:
        self._kept: dict[int, list[KeysAndValues]] = {}

    def append(self, depth: int, layer: int, k: Tensor, v: Tensor) -> tuple[KeysAndValues, list[KeysAndValues]]:
        """What this depth sees: depth 0, and its own slot of every depth from 1 to this one."""
        kept = self._kept.setdefault(layer, [])
        if len(kept) == depth:
            kept.append((k, v))
        seen = [*kept[:depth], (k, v)]
        return seen[0], seen[1:]


class DenseUnrollAttention:
    """The mask written out: every score is computed, none is clever."""

    def __init__(self, batch: TrainingBatch) -> None:
        document_T = batch.document_T
        slots = len(document_T)
        causal_TT = torch.ones(slots, slots, dtype=torch.bool, device=document_T.device).tril()
        self._visible_TT = causal_TT & (document_T[:, None] == document_T[None, :])
        self._history = _KeyValueHistory()
        self._depth = 0

    def at(self, depth: int) -> "DenseUnrollAttention":
        """Say which depth calls next."""
        self._depth = depth
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from all slots [T, H, K]."""
        group = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
        (first_k, first_v), later = self._history.append(self._depth, layer, k, v)
        scale, slots = q.shape[-1] ** -0.5, len(q)
        first = torch.einsum("thk,shk->hts", q, first_k) * scale
        scores = [first.masked_fill(~self._visible_TT, float("-inf"))]
        scores += [torch.einsum("thk,thk->ht", q, later_k)[..., None] * scale for later_k, _ in later]
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(v.dtype)
        out = torch.einsum("hts,shk->thk", weights[..., :slots], first_v)
        for i, (_, later_v) in enumerate(later):
            out = out + weights[..., slots + i].T[..., None] * later_v
        return out


class FlashUnrollAttention:
    """The same in half precision on a GPU, at any length."""

    def __init__(self, batch: TrainingBatch, *, compiled: bool = False) -> None:
        self._starts, self._longest = batch.starts, batch.longest
        self._kernels: tuple[Merge, Split] = _compiled() if compiled else (merge_own_slot, split_gradient)
        self._history = _KeyValueHistory()
        self._depth = 0

    def at(self, depth: int) -> "FlashUnrollAttention":
        """Say which depth calls next."""
        self._depth = depth
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from all slots [T, H, K]."""
        (first_k, first_v), later = self._history.append(self._depth, layer, k, v)
        own = [tensor for pair in later for tensor in pair]
        out: Tensor = _MergedFlash.apply(  # type: ignore[no-untyped-call]
            q, first_k, first_v, self._starts, self._longest, *self._kernels, *own
        )
        return out


def merge_own_slot(
    out_THK: Tensor, lse_TH: Tensor, q_THK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add the keys of the slot itself to attention that has seen others: the merged output and its log-sum-exp."""
    lse_1TH = lse_TH[None]
    scores_JTH = torch.stack([_own_scores(q_THK, k) for k in keys])
    merged_TH = torch.cat([lse_1TH, scores_JTH]).logsumexp(dim=0)
    merged_THK = out_THK.float() * (lse_TH - merged_TH).exp()[..., None]
    for score_TH, v in zip(scores_JTH, values, strict=True):
        merged_THK = merged_THK + (score_TH - merged_TH).exp()[..., None] * _spread(v, q_THK).float()
    return merged_THK.to(out_THK.dtype), merged_TH


def split_gradient(
    d_out_THK: Tensor, out_THK: Tensor, lse_TH: Tensor, q_THK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What the slot's own keys contribute to the gradient: by q, and by each key and value [T, G, K]."""
    scale = q_THK.shape[-1] ** -0.5
    d_out, q = d_out_THK.float(), q_THK.float()
    delta_TH = (d_out * out_THK.float()).sum(dim=-1)
    d_q = torch.zeros_like(q)
    d_keys: list[Tensor] = []
    d_values: list[Tensor] = []
    for k, v in zip(keys, values, strict=True):
        p_TH = (_own_scores(q_THK, k) - lse_TH).exp()
        d_p_TH = (d_out * _spread(v, q_THK).float()).sum(dim=-1)
        d_s_TH1 = (p_TH * (d_p_TH - delta_TH) * scale)[..., None]
        d_q = d_q + d_s_TH1 * _spread(k, q_THK).float()
        d_keys.append(_gather(d_s_TH1 * q, k))
        d_values.append(_gather(p_TH[..., None] * d_out, v))
    return d_q, d_keys, d_values


def _own_scores(q_THK: Tensor, k_TGK: Tensor) -> Tensor:
    scores_TH: Tensor = (q_THK.float() * _spread(k_TGK, q_THK).float()).sum(dim=-1)
    return scores_TH * float(q_THK.shape[-1] ** -0.5)


def _spread(x_TGK: Tensor, q_THK: Tensor) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x_TGK.repeat_interleave(q_THK.shape[-2] // x_TGK.shape[-2], dim=-2)


def _gather(x_THK: Tensor, like_TGK: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    slots, groups, size = like_TGK.shape
    return x_THK.view(slots, groups, -1, size).sum(dim=2).to(like_TGK.dtype)


@cache
def _compiled() -> tuple[Merge, Split]:
    """Compiled when a run asks for it, once for all batches."""
    return torch.compile(merge_own_slot, dynamic=False), torch.compile(split_gradient, dynamic=False)


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        longest: int,
        merge: Merge,
        split: Split,
        *own: Tensor,
    ) -> Tensor:
        out, lse_HT, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False
        )
        if own:
            out, lse_TH = merge(out, lse_HT.T, q, own[0::2], own[1::2])
            lse_HT = lse_TH.T.contiguous()
        ctx.save_for_backward(q, k, v, starts, out, lse_HT, rng, unused, *own)
        ctx.longest, ctx.split = longest, split
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, starts, out, lse_HT, rng, unused, *own = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, lse_HT, starts, starts, ctx.longest, ctx.longest, 0.0, True, rng, unused
        )
        d_own: list[Tensor] = []
        if own:
            d_q_own, d_keys, d_values = ctx.split(d_out, out, lse_HT.T, q, own[0::2], own[1::2])
            d_q = (d_q.float() + d_q_own).to(q.dtype)
            d_own = [d for pair in zip(d_keys, d_values, strict=True) for d in pair]
        return d_q, d_k, d_v, None, None, None, None, *d_own


def attention_for(batch: TrainingBatch, dtype: torch.dtype, *, compiled: bool = False) -> UnrollAttention:
    """The fastest that runs here."""
    if batch.ids_T.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return FlashUnrollAttention(batch, compiled=compiled)
    if len(batch.ids_T) > 16384:
        raise UserError(
            f"a pack of {len(batch.ids_T)} tokens in {str(dtype).removeprefix('torch.')} on {batch.ids_T.device.type} "
            "needs a score for every pair of tokens; use bfloat16 on a GPU, or data.pack_length = 16384 or less"
        )
    return DenseUnrollAttention(batch)
