"""What drafting asks of a drafter, whoever computes it: its own module, or a fused pass over its weights.

Shapes: N tokens, M of them, S rows of auxiliary states, X concatenated auxiliary states, D drafter hidden, B query and
key heads, K head dim.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.config import DrafterConfig
from eyas.drafter.model import Attention, DepthOutput, Drafter, FirstLayer
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.runner.attention import PagedAttention
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.llama.block import Product, join
from eyas.kernels.llama.eagle import ChainsOutput, GoesOn


class Drafts(Protocol):
    """What drafting needs of a drafter: its model, or a fused pass over it."""

    def fuse(self, aux_X: Tensor) -> Tensor:
        """The target's auxiliary states as the depth-0 state."""

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        """One depth."""

    def remember(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> KeysAndValues:
        """What a depth leaves for later tokens to see, where there is one layer."""

    def logits(self, normed: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""


@runtime_checkable
class DraftsInPlace(Drafts, Protocol):
    """What reads states where the target left them, writes keys and values where they stay, and computes what is asked
    for."""

    def fuse_rows(self, aux_SX: Tensor, row_N: Tensor) -> Tensor:
        """The depth-0 states of some rows of auxiliary states, which may be of another type."""

    def step_for(
        self, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor, attend: PagedAttention, keep_M: Tensor
    ) -> DepthOutput:
        """One depth of all tokens, for the outcome of some."""

    def remember_in(self, cache: KVCache, layout: AttentionMetadata, hidden_ND: Tensor, token_N: Tensor) -> None:
        """Put keys and values in their slots."""


@runtime_checkable
class DraftsChains(Drafts, Protocol):
    """What reads states and drafts behind them without a look at what lies between."""

    def read(self, aux: Tensor, token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> DepthOutput:
        """`fuse` and `step` at once."""

    def chain(
        self, normed_D: Tensor, feedback_D: Tensor, attend: PagedAttention, depths: int, goes_on: GoesOn
    ) -> tuple[list[int], list[float]] | None:
        """Up to `depths` drafts, each the likeliest token, and how sure the drafter was of each.

        `attend` is of the slot in which the first of them is read; there are blocks for all. None: it cannot here.
        """

    def chains(
        self, normed_RD: Tensor, feedback_RD: Tensor, attend: PagedAttention, depths: int
    ) -> ChainsOutput | None:
        """`depths` drafts of several requests, each the likeliest token; as for `chain`."""


def fuse_rows(drafter: Drafts, aux_SX: Tensor, row_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The depth-0 states of some rows of auxiliary states, for a drafter of this type."""
    if isinstance(drafter, DraftsInPlace):
        return drafter.fuse_rows(aux_SX, row_N)
    return drafter.fuse(aux_SX.index_select(0, row_N).to(dtype))


def step_for(
    drafter: Drafts, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor, attend: PagedAttention, keep_M: Tensor
) -> DepthOutput:
    """One depth of all tokens, for the outcome of some: what nobody asks for need not be computed."""
    if isinstance(drafter, DraftsInPlace):
        return drafter.step_for(hidden_ND, token_N, position_N, attend, keep_M)
    output = drafter.step(hidden_ND, token_N, position_N, attend)
    normed_MD, feedback_MD = (x_ND.index_select(0, keep_M) for x_ND in (output.normed, output.feedback))
    return DepthOutput(normed=normed_MD, feedback=feedback_MD)


def remember_in(cache: KVCache, drafter: Drafts, layout: AttentionMetadata, hidden_ND: Tensor, token_N: Tensor) -> None:
    """Let later tokens see these, where there is one layer."""
    if isinstance(drafter, DraftsInPlace):
        drafter.remember_in(cache, layout, hidden_ND, token_N)
    else:
        cache.write(0, layout.slot_mapping_N, *drafter.remember(hidden_ND, token_N, layout.position_N))


class NotEagleError(Exception):
    """A drafter has no fused pass; says why."""


def first_layer(drafter: Drafter) -> FirstLayer:
    """The only layer of a drafter."""
    if len(drafter.layers) > 1:
        raise NotEagleError(f"it has {len(drafter.layers)} layers")
    layer = drafter.layers[0]
    if not isinstance(layer, FirstLayer):
        raise NotEagleError("it is an EAGLE-1 drafter, for which there is no fused pass")
    return layer


def plain_attention(layer: FirstLayer) -> Attention:
    """The attention of a layer whose heads have projections of their own."""
    if not isinstance(layer.self_attn, Attention):
        raise NotEagleError("its attention is latent (MLA), for which there is no fused pass")
    return layer.self_attn


def heads_norm(attention: Attention, config: DrafterConfig) -> FusedNorm | None:
    """The norms of all heads of queries, then of keys, if there are any: weights [B, K]."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return None
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    weight_BK = torch.cat([q_norm.weight.detach().expand(heads, -1), k_norm.weight.detach().expand(keys, -1)])
    return FusedNorm(weight_BK, config.rms_norm_eps)


def product_of(*linears: nn.Module) -> Product:
    """One product for linears that read the same."""
    product = join(linears)
    if product is None:
        raise NotEagleError(f"its linears cannot be joined: {', '.join(sorted({type(x).__name__ for x in linears}))}")
    return product
