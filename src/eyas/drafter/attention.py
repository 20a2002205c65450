"""Attention as an argument.

The drafter computes queries, keys and values and hands them to an `Attend`; who may see whom, where keys are
kept and which kernel runs is the caller's business. Training passes the training-time-test mask, the engine its
blocks, the doctor a recorder; this file holds the protocol and a dense reference.

Shapes: T queries, S keys, H query heads, G key heads, K size of queries and keys, V of values.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class Attend(Protocol):
    """Answers one layer's queries. Queries and keys are already rotated; scores are scaled by K ** -0.5."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [..., H, K] and the new slots' k [..., G, K] and v [..., G, V] to outputs [..., H, V]."""
        ...


@runtime_checkable
class ExpandsLatents(Protocol):
    """An `Attend` that wants every head's own keys and values where attention is latent (`LatentAttention`)."""

    expands_latents: bool
    """True; others do not have it, and are given the latent."""


KeysAndValues = tuple[Tensor, Tensor]


class DenseAttention:
    """Sees every earlier slot and, among the new ones, those up to itself. One sequence, nothing in place.

    `past` is what an earlier pass left in `present`. Since nothing is overwritten, several continuations can
    start from the same past: the branches of a tree are as simple as a chain.
    """

    def __init__(self, past: Sequence[KeysAndValues] = ()) -> None:
        self._past = past
        self.present: list[KeysAndValues] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally from the new slots [T, H, K] to past and new ones."""
        assert layer == len(self.present), "layers call in order, once each"
        if self._past:
            past_k, past_v = self._past[layer]
            k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
        self.present.append((k, v))
        return attend_densely(q, k, v, causal_mask(len(q), len(k), device=q.device))


def causal_mask(queries: int, keys: int, *, device: torch.device) -> Tensor:
    """Visibility [T, S] when the queries are the last of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend_densely(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, visible_TS: Tensor) -> Tensor:
    """Softmax attention written out, in float32 whatever the inputs are."""
    heads_per_key = q_THK.shape[-2] // k_SGK.shape[-2]
    k_SHK = k_SGK.float().repeat_interleave(heads_per_key, dim=-2)
    v_SHV = v_SGV.float().repeat_interleave(heads_per_key, dim=-2)
    scores_HTS = torch.einsum("thk,shk->hts", q_THK.float(), k_SHK) * q_THK.shape[-1] ** -0.5
    weights_HTS = scores_HTS.masked_fill(~visible_TS, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shv->thv", weights_HTS, v_SHV).to(q_THK.dtype)
