"""The drafter's attention is an argument, `Attend`: this file has the protocol and a dense reference.

The caller decides which keys a query sees, where keys are kept and which kernel runs. Training passes the
training-time-test mask, the engine its block tables, the doctor a recorder.

Shapes: T queries, S keys, H query heads, G key heads, K size of queries and keys, V of values.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class Attend(Protocol):
    """Attention of one layer. Queries and keys are rotated already; scores are scaled by K ** -0.5."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [..., H, K] and the new slots' k [..., G, K] and v [..., G, V] to outputs [..., H, V]."""
        ...


@runtime_checkable
class ExpandsLatents(Protocol):
    """An `Attend` that takes keys and values of every head instead of the latent (see `LatentAttention`)."""

    expands_latents: bool


KeysAndValues = tuple[Tensor, Tensor]


def causal_mask(queries: int, keys: int, *, device: torch.device) -> Tensor:
    """Return visibility [T, S]; the queries are the last of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend_densely(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, visible_TS: Tensor) -> Tensor:
    """Softmax attention, computed in float32."""
    heads_per_key = q_THK.shape[-2] // k_SGK.shape[-2]
    k_SHK = k_SGK.float().repeat_interleave(heads_per_key, dim=-2)
    v_SHV = v_SGV.float().repeat_interleave(heads_per_key, dim=-2)
    scores_HTS = torch.einsum("thk,shk->hts", q_THK.float(), k_SHK) * q_THK.shape[-1] ** -0.5
    weights_HTS = scores_HTS.masked_fill(~visible_TS, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,shv->thv", weights_HTS, v_SHV).to(q_THK.dtype)
