"""Drafting rounds in parallel, with attention weights that can be watched: for the doctor and the drift probe.

A round that starts at slot s sees the verified slots up to s and its own earlier drafts, and nothing of other rounds.
Serving drafts the same tokens in `engine/runner/`, which keeps no attention weights; tests compare both.

Shapes: N slots that depth 1 reads, T verified slots, R rounds, Q queries, H query heads, G key heads, K head dim, J own
slots of a round, D drafter hidden, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from eyas.drafter.attention import KeysAndValues, attend_densely, causal_mask
from eyas.drafter.model import Drafter


class Watcher(Protocol):
    """Receives the attention weights of every query."""

    def __call__(self, depth: int, layer: int, weights_HRS: Tensor, own: int) -> None:
        """Take weights [H, R, S] over the T verified slots and then the `own` slots of the round."""
        ...


class RoundAttention:
    """An `Attend` for rounds in parallel: each sees verified slots up to its start, and its own drafts.

    `past` has keys and values of earlier passes by layer, if depth 1 does not read from the beginning. With a `window`,
    a query at position p sees positions above p - window only, and the first `sinks` slots.
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
        """The depth of the next call; depth 1 reads the verified slots."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from all new slots [Q, H, K] at depth 1, and from all rounds [R, H, K] at later depths."""
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
        """Drop all other rounds."""
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
        """Whether slots are outside the window of queries at positions `newest`."""
        if self._window is None:
            return torch.zeros((), dtype=torch.bool, device=slot.device)
        return (slot <= newest - self._window) & (slot >= self._sinks)


def _spread(x: Tensor, shared: int) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x.float().repeat_interleave(shared, dim=-2)


Choose = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Maps a depth, its logits [R, W] and its feedback states [R, D] to draft tokens [R] as target ids, and the rounds that
continue (None: all)."""


def draft_rounds(
    drafter: Drafter,
    hidden_ND: Tensor,
    token_N: Tensor,
    position_N: Tensor,
    attention: RoundAttention,
    *,
    depth: int,
    choose: Choose,
    disturb: Callable[[Tensor], Tensor] = lambda hidden: hidden,
) -> None:
    """Draft every round of `attention` up to `depth`, after depth 1 has read N slots with the target's fused states.

    `disturb` is applied to every state that the drafter receives.
    """
    hidden, token, position = disturb(hidden_ND), token_N, position_N
    for level in range(1, depth + 1):
        attention.depth = level
        output = drafter.step(hidden, token, position, attention)
        normed, feedback = output.normed, output.feedback
        if level == 1:
            place_R = attention.start_R - position_N[0]
            normed, feedback, position = normed[place_R], feedback[place_R], attention.start_R
        token, kept_R = choose(level, drafter.logits(normed), feedback)
        position, hidden = position + 1, disturb(feedback)
        if kept_R is not None:
            if not kept_R.any():
                return
            token, position, hidden = token[kept_R], position[kept_R], hidden[kept_R]
            attention.keep(kept_R)
