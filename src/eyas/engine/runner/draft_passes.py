"""The drafter's operations in rounds: here by its own module, overridden by fused code in other files.

Shapes: N tokens, M of them, S rows of auxiliary states, X concatenated auxiliary states, D drafter hidden, R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.drafter.attention import Attend, KeysAndValues
from eyas.drafter.model import Attention, DepthOutput, Drafter, FirstLayer
from eyas.engine.kv_cache.cache import KVCache, PagedAttention
from eyas.kernels.attention.metadata import AttentionMetadata
from eyas.kernels.elementwise import FusedNorm
from eyas.kernels.llama.block import Product, join
from eyas.kernels.llama.cpu import LlamaSizes
from eyas.kernels.llama.eagle import ChainsOutput


class DraftPasses:
    """Runs a drafter by its own module. `fused_drafter.py` and `triton_drafter.py` override parts of it."""

    def __init__(self, model: Drafter) -> None:
        self.model = model

    def fuse(self, aux_NX: Tensor) -> Tensor:
        """Fuse the target's auxiliary states into depth-0 states."""
        return self.model.fuse(aux_NX)

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        return self.model.step(hidden, token_ids, positions, attend)

    def remember(self, hidden: Tensor, token_ids: Tensor, positions: Tensor) -> KeysAndValues:
        """Compute the keys and values that a depth leaves in the cache, for a drafter of one layer."""
        return self.model.remember(hidden, token_ids, positions)

    def logits(self, normed: Tensor) -> Tensor:
        return self.model.logits(normed)

    def fuse_rows(self, aux_SX: Tensor, row_N: Tensor) -> Tensor:
        """`fuse` of some rows of auxiliary states, which may have another dtype."""
        return self.fuse(aux_SX.index_select(0, row_N).to(self.model.fc.weight.dtype))

    def step_for(
        self, hidden_ND: Tensor, token_N: Tensor, position_N: Tensor, attend: PagedAttention, keep_M: Tensor
    ) -> DepthOutput:
        """Run one depth over all tokens and return the output of the tokens `keep_M` only."""
        output = self.step(hidden_ND, token_N, position_N, attend)
        normed_MD, feedback_MD = (x_ND.index_select(0, keep_M) for x_ND in (output.normed, output.feedback))
        return DepthOutput(normed=normed_MD, feedback=feedback_MD)

    def read(self, aux_NX: Tensor, token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> DepthOutput:
        return self.step(self.fuse(aux_NX), token_ids, positions, attend)

    def remember_in(self, cache: KVCache, layout: AttentionMetadata, hidden_ND: Tensor, token_N: Tensor) -> None:
        """Write the keys and values of `remember` to the cache."""
        cache.write(0, layout.slot_mapping_N, *self.remember(hidden_ND, token_N, layout.position_N))

    def chains(
        self, normed_RD: Tensor, feedback_RD: Tensor, attend: PagedAttention, depths: int
    ) -> ChainsOutput | None:
        """Greedily draft `depths` tokens per row in one call; None if this drafter must go depth by depth.

        `attend` covers the slots of the first depth; the blocks of all depths are allocated.
        """
        return None


class NotEagleError(Exception):
    """The drafter has no fused pass; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EagleParts:
    """Weights of a drafter with one plain layer; linears with the same input are joined."""

    layer: FirstLayer
    fc: Product
    qkv: Product
    kv: Product
    output: Product
    gate_up: Product
    down: Product
    qk_norm: FusedNorm | None
    """Weights [B, K] of the norms of all query heads, then of all key heads, if there are any."""
    sizes: LlamaSizes

    @classmethod
    def of(cls, drafter: Drafter) -> "EagleParts":
        """Collect the parts; `NotEagleError` for other kinds of drafters."""
        config, layer, qk_norm = drafter.config, drafter.layers[0], None
        if len(drafter.layers) > 1:
            raise NotEagleError(f"it has {len(drafter.layers)} layers")
        if not isinstance(layer, FirstLayer):
            raise NotEagleError("it is an EAGLE-1 drafter, for which there is no fused pass")
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(attention, Attention):
            raise NotEagleError("its attention is latent (MLA), for which there is no fused pass")
        heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = (attention.q_norm, heads), (attention.k_norm, keys)
            weight_BK = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in norms])
            qk_norm = FusedNorm(weight_BK, config.rms_norm_eps)
        return cls(
            layer=layer,
            fc=_product_of(drafter.fc),
            qkv=_product_of(attention.q_proj, attention.k_proj, attention.v_proj),
            kv=_product_of(attention.k_proj, attention.v_proj),
            output=_product_of(attention.o_proj),
            gate_up=_product_of(mlp.gate_proj, mlp.up_proj),
            down=_product_of(mlp.down_proj),
            qk_norm=qk_norm,
            sizes=LlamaSizes(
                heads=heads, key_heads=keys, head_dim=size, rotary_dim=size, intermediate=config.intermediate_size
            ),
        )


def _product_of(*linears: nn.Module) -> Product:
    """Join linears with the same input."""
    product = join(linears)
    if product is None:
        raise NotEagleError(f"its linears cannot be joined: {', '.join(sorted({type(x).__name__ for x in linears}))}")
    return product
