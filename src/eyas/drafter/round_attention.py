"""Attention of drafting rounds side by side, with weights that can be watched.

A round that starts at slot s has read the target's true states up to s. Behind that it sees these slots, its own
earlier drafts and nobody else's. Weights are computed as such, so a watcher may be shown them; what is computed does
not depend on whether somebody watches.

Shapes: T slots that are verified, R rounds, Q queries, H query heads, G key heads, K head dim, J own slots of a round.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafter.attention import KeysAndValues, attend_densely, causal_mask


class Watcher(Protocol):
    """Is shown every query's weights; what it does with them changes nothing."""

    def __call__(self, depth: int, layer: int, weights_HRS: Tensor, own: int) -> None:
        """`weights_HRS` are over the T verified slots, then over `own` slots of the round itself."""
        ...


class RoundAttention:
    """An `Attend` for rounds side by side: verified slots up to each round's start, and the round's own.

    `past` is what earlier passes left of every layer, if depth 1 does not read from the beginning. With a `window` a
    query at position p sees positions above p - window only, and the first `sinks` slots.
    """

    def __init__(
        self,
        start_R: Tensor,
        watcher: Watcher | None = None,
        *,
        past: Sequence[KeysAndValues] = (),
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        self.start_R = start_R
        self._watcher = watcher
        self._past, self._window, self._sinks = past, window, sinks
        self._verified: dict[int, KeysAndValues] = {}
        self._own: dict[int, list[KeysAndValues]] = {}
        self.depth = 0
        """Which depth calls next; depth 1 reads the transcript."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Answer the queries of all new slots [Q, H, K] at depth 1, of all rounds [R, H, K] behind it."""
        if self.depth == 1:
            return self._read(layer, q, k, v)
        own = self._own[layer]
        own.append((k, v))
        keys, values = self._verified[layer]
        weights_HRS = self._weights(q, keys, [pair[0] for pair in own])
        if self._watcher is not None:
            self._watcher(self.depth, layer, weights_HRS, len(own))
        group = q.shape[1] // k.shape[1]
        slots = len(keys)
        output = torch.einsum("hrs,shk->rhk", weights_HRS[..., :slots], _spread(values, group))
        for place, (_, own_v) in enumerate(own):
            output = output + weights_HRS[..., slots + place].T[..., None] * _spread(own_v, group)
        return output.to(q.dtype)

    def keep(self, kept_R: Tensor) -> None:
        """Go on with these rounds only."""
        self.start_R = self.start_R[kept_R]
        self._own = {layer: [(k[kept_R], v[kept_R]) for k, v in own] for layer, own in self._own.items()}

    def _read(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = 0
        if self._past:
            past_k, past_v = self._past[layer]
            k, v, before = torch.cat([past_k, k]), torch.cat([past_v, v]), len(past_k)
        self._verified[layer], self._own[layer] = (k, v), []
        if self._watcher is not None:
            self._watcher(1, layer, self._weights(q[self.start_R - before], k, []), 0)
        if before or self._window is not None:
            visible_QT = causal_mask(len(q), len(k), device=q.device)
            slot_T = torch.arange(len(k), device=q.device)
            return attend_densely(q, k, v, visible_QT & ~self._far(slot_T, slot_T[before:, None]))
        shared = q.shape[1] != k.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return output[0].transpose(0, 1)

    def _weights(self, q_RHK: Tensor, keys_TGK: Tensor, own: Sequence[Tensor]) -> Tensor:
        """Softmax over verified and own slots [H, R, T + J], in float32."""
        shared, scale = q_RHK.shape[1] // keys_TGK.shape[1], q_RHK.shape[-1] ** -0.5
        q = q_RHK.float() * scale
        start_R1 = self.start_R[:, None]
        newest_R1 = start_R1 + len(own)
        slot_T = torch.arange(len(keys_TGK), device=q.device)
        hidden_RT = (slot_T > start_R1) | self._far(slot_T, newest_R1)
        scores = [torch.einsum("rhk,thk->hrt", q, _spread(keys_TGK, shared)).masked_fill(hidden_RT, float("-inf"))]
        for place, own_k in enumerate(own, start=1):
            score_HR1 = torch.einsum("rhk,rhk->hr", q, _spread(own_k, shared))[..., None]
            scores.append(score_HR1.masked_fill(self._far(start_R1 + place, newest_R1), float("-inf")))
        return torch.cat(scores, dim=-1).softmax(dim=-1)

    def _far(self, slot: Tensor, newest: Tensor) -> Tensor:
        """Whether slots lie outside the window of queries at these positions."""
        if self._window is None:
            return torch.zeros((), dtype=torch.bool, device=slot.device)
        return (slot <= newest - self._window) & (slot >= self._sinks)


def _spread(x: Tensor, shared: int) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x.float().repeat_interleave(shared, dim=-2)
