"""Attention of the training-time test: the earlier tokens of the document, and the slot's own drafts.

A query at depth k sees the depth-0 keys of its document up to its own slot and, of each later depth, the key of its own
slot only, since in decoding those are the drafts of this round. Slots that teach ask at every depth. The others leave
their depth-0 keys and values as context (batch.py), or ask at depth 0 if upper layers read their output.

There are two implementations: one written out, for CPUs and as the reference, and one on flash attention. Flash
attention covers the depth-0 keys. The few keys in the slot itself are merged with it by their log-sum-exp, and the
backward pass of flash attention is given the merged output and normaliser, from which it computes its own share of the
gradient. It takes the queries of a document to be its last slots. So where a document has something between two
answers, queries of zeros fill the gap; their outputs are not used and get no gradient.

Shapes: N queries (M slots that teach, or all R that are read), R keys of depth 0, P of them from the context, Q query
positions, H heads, G key heads, K head dim, J later depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafter.attention import KeysAndValues
from eyas.errors import UserError
from eyas.train.batch import TrainingBatch

Merge = Callable[..., tuple[Tensor, Tensor]]
Split = Callable[..., tuple[Tensor, list[Tensor], list[Tensor]]]
LONGEST_DENSE = 16384
"""Maximum tokens of a pack whose scores, one for every pair, are written out."""


class UnrollAttention:
    """An `Attend` that keeps keys and values of every depth, by layer."""

    expands_latents = True
    """Latents are wider than flash attention takes."""

    def __init__(self, batch: TrainingBatch) -> None:
        self._slots = batch.slots
        self._kept: dict[int, list[KeysAndValues]] = {}
        self._depth = 0
        self._context: KeysAndValues | None = None

    def at(self, depth: int, context: KeysAndValues | None = None) -> Self:
        """Set the depth of the next calls and, for depth 0, the keys and values of slots that do not ask [P, G, K]."""
        self._depth, self._context = depth, context
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the slots that teach or, at depth 0 without a context, from all that are read [N, H, K]."""
        raise NotImplementedError

    def _seen(self, layer: int, k: Tensor, v: Tensor) -> tuple[KeysAndValues, list[KeysAndValues]]:
        """Keep k and v; return those of depth 0, and those of the own slot at every depth from 1 to this one."""
        if self._context is not None:
            k, v = self._in_order(k, self._context[0]), self._in_order(v, self._context[1])
        kept = self._kept.setdefault(layer, [])
        if len(kept) == self._depth:  # activation checkpointing runs a depth again
            kept.append((k, v))
        seen = [*kept[: self._depth], (k, v)]
        return seen[0], seen[1:]

    def _in_order(self, own_MGK: Tensor, context_PGK: Tensor) -> Tensor:
        both_RGK = torch.cat([own_MGK, context_PGK])
        return torch.empty_like(both_RGK).index_copy(0, self._slots.order_R, both_RGK)


class DenseUnrollAttention(UnrollAttention):
    """Attention with the mask written out: every score is computed."""

    def __init__(self, batch: TrainingBatch) -> None:
        super().__init__(batch)
        slots = batch.slots
        reads = len(slots.read_R)
        causal_RR = torch.ones(reads, reads, dtype=torch.bool, device=slots.read_R.device).tril()
        document_R = torch.searchsorted(batch.starts[1:].long(), slots.read_R, right=True)
        self._visible_RR = causal_RR & (document_R[:, None] == document_R[None, :])
        self._visible_MR = self._visible_RR[slots.order_R[: len(slots.taught_M)]]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[-2] // k.shape[-2]
        (first_k, first_v), later = self._seen(layer, k, v)
        keys, scale = len(first_k), q.shape[-1] ** -0.5
        visible_NR = self._visible_RR if len(q) == keys else self._visible_MR
        first = torch.einsum("nhk,rhk->hnr", q, first_k.repeat_interleave(group, dim=-2)) * scale
        scores = [first.masked_fill(~visible_NR, float("-inf"))]
        scores += [torch.einsum("nhk,nhk->hn", q, _spread(later_k, q))[..., None] * scale for later_k, _ in later]
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(v.dtype)
        out = torch.einsum("hnr,rhk->nhk", weights[..., :keys], first_v.repeat_interleave(group, dim=-2))
        for i, (_, later_v) in enumerate(later):
            out = out + weights[..., keys + i].T[..., None] * _spread(later_v, q)
        return out


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Positions of documents and queries for flash attention."""

    documents: tuple[Tensor, Tensor, int, int]
    """Borders of the documents' queries and keys, and the longest of each."""
    places: int
    place_N: Tensor | None = None

    def spread(self, x: Tensor, dim: int = 0) -> Tensor:
        """Put the queries into all positions, with zeros elsewhere."""
        if self.place_N is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.places
        return x.new_zeros(shape).index_copy_(dim, self.place_N, x)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Take the queries from all positions."""
        return x if self.place_N is None else x.index_select(dim, self.place_N)


class FlashUnrollAttention(UnrollAttention):
    """Flash attention in half precision on a GPU, at any length. Values are padded to the width of keys."""

    def __init__(self, batch: TrainingBatch, *, compiled: bool = False) -> None:
        super().__init__(batch)
        slots = batch.slots
        self._kernels: tuple[Merge, Split] = _compiled() if compiled else (merge_own_slot, split_gradient)
        # A single query takes another kernel, with other shapes.
        longest_queries, longest_keys = max(2, slots.longest_queries), max(2, slots.longest_keys)
        self._taught = _Layout(
            documents=(slots.query_starts, slots.key_starts, longest_queries, slots.longest_keys),
            places=slots.queries,
            place_N=slots.query_place_M,
        )
        self._read = _Layout(
            documents=(slots.key_starts, slots.key_starts, longest_keys, slots.longest_keys), places=len(slots.read_R)
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (first_k, first_v), later = self._seen(layer, k, v)
        layout = self._read if len(q) == len(first_k) else self._taught
        first_v = _widened(first_v, q)
        own = [tensor for own_k, own_v in later for tensor in (own_k, _widened(own_v, q))]
        out: Tensor = _MergedFlash.apply(  # type: ignore[no-untyped-call]
            q, first_k, first_v, layout, *self._kernels, *own
        )
        return out[..., : v.shape[-1]]


def _widened(v: Tensor, q: Tensor) -> Tensor:
    missing = q.shape[-1] - v.shape[-1]
    return functional.pad(v, (0, missing)) if missing else v


def merge_own_slot(
    out_THK: Tensor, lse_TH: Tensor, q_THK: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the keys of the slot itself into attention over others: the merged output and its log-sum-exp."""
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
    """Gradients through the slot's own keys: by q, and by each key and value [T, G, K]."""
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
    """Compiled kernels, made once for all batches."""
    return _for_any_number(merge_own_slot), _for_any_number(split_gradient)


def _for_any_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any number of slots and fixed other sizes."""
    compiled = torch.compile(function)

    def call(*arguments: Tensor | Sequence[Tensor]) -> Any:
        for argument in arguments:
            for tensor in (argument,) if isinstance(argument, Tensor) else argument:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*arguments)

    return call


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: _Layout, merge: Merge, split: Split, *own: Tensor
    ) -> Tensor:
        out, lse_HQ, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            layout.spread(q), k, v, *layout.documents, 0.0, True, False
        )
        out, lse_HN = layout.gather(out), layout.gather(lse_HQ, dim=1)
        if own:
            out, lse_NH = merge(out, lse_HN.T, q, own[0::2], own[1::2])
            lse_HN = lse_NH.T.contiguous()
        ctx.save_for_backward(q, k, v, out, lse_HN, rng, unused, *own)
        ctx.layout, ctx.split = layout, split
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_HN, rng, unused, *own = ctx.saved_tensors
        layout = ctx.layout
        d_out = d_out.contiguous()
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            layout.spread(d_out),
            layout.spread(q),
            k,
            v,
            layout.spread(out),
            layout.spread(lse_HN, dim=1),
            *layout.documents,
            0.0,
            True,
            rng,
            unused,
        )
        d_q = layout.gather(d_q)
        d_own: list[Tensor] = []
        if own:
            d_q_own, d_keys, d_values = ctx.split(d_out, out, lse_HN.T, q, own[0::2], own[1::2])
            d_q = (d_q.float() + d_q_own).to(q.dtype)
            d_own = [d for pair in zip(d_keys, d_values, strict=True) for d in pair]
        return d_q, d_k, d_v, None, None, None, *d_own


def require_attention(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse packs that are too long for the attention on this device."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return
    if tokens > LONGEST_DENSE:
        raise UserError(
            f"a pack of {tokens} tokens in {str(dtype).removeprefix('torch.')} on {device.type} needs a score for "
            f"every pair of tokens; use bfloat16 on a GPU, or data.pack_length = {LONGEST_DENSE} or less"
        )


def attention_for(batch: TrainingBatch, dtype: torch.dtype, *, compiled: bool = False) -> UnrollAttention:
    """Fastest attention for this device and type."""
    if batch.ids_T.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return FlashUnrollAttention(batch, compiled=compiled)
    require_attention(len(batch.ids_T), dtype, batch.ids_T.device)
    return DenseUnrollAttention(batch)
