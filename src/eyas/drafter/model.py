"""The drafter's forward pass, one depth per call: fuse -> layers -> norm -> head.

Training, decoding and diagnosis all call this definition, with their own `Attend`. Parameters are named as in the
checkpoint, so loading is a plain `load_state_dict`.

Shapes: D drafter hidden, X = A * target hidden (A auxiliary states concatenated), H query heads, G key heads, K head
dim, W draft vocabulary; with latent attention: R latent, N part of a head without rotation, P part with rotation, V
values of a head; any leading dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from eyas.drafter.attention import Attend, ExpandsLatents, KeysAndValues
from eyas.drafter.config import DrafterConfig, LatentSizes
from eyas.drafter.recorded_acceptance import RecordedAcceptance
from eyas.drafter.rope import Rope, rotate, rotate_pairs, yarn_scale
from eyas.drafter.vocab import DraftVocab
from eyas.errors import UserError
from eyas.kernels.elementwise import rms_norm
from eyas.kernels.linear.embedding_table import EmbeddingTable, QuantisedEmbedding
from eyas.kernels.linear.served_linear import ServedLinear


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in float32, one rounding before the weight, as in transformers and vLLM."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dim."""
        if x.is_cuda and not torch.is_grad_enabled():
            # One kernel with equal bits, in a tenth of the time for few tokens. Not with gradients, and not on a CPU,
            # where compiled code sums in another order.
            return rms_norm(x, self.weight, self.eps)
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Projections and rotation around `Attend`."""

    def __init__(self, config: DrafterConfig, *, input_size: int) -> None:
        super().__init__()
        heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, keys * size, bias=bias)
        self.v_proj = nn.Linear(input_size, keys * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self._head_dim = size

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attend from x at the positions of cos and sin."""
        q = self.q_proj(x).unflatten(-1, (-1, self._head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        k, v = self.keys_and_values(x, cos, sin)
        return self.o_proj(attend(layer, rotate(q, cos, sin), k, v).flatten(-2))  # type: ignore[no-any-return]

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeysAndValues:
        """Return the keys and values of x, as `forward` gives them to `attend`."""
        k, v = (proj(x).unflatten(-1, (-1, self._head_dim)) for proj in (self.k_proj, self.v_proj))
        if self.k_norm is not None:
            k = self.k_norm(k)
        return rotate(k, cos, sin), v


class LatentProjection(nn.Linear):
    """A linear that is never packed or quantised, because its weight is also read directly."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA, DeepSeek's) around `Attend`.

    All heads share one latent c [R] and one rotated key p [P] per token. Keys and values are linear in the latent:

        k_h = [U_h c; p]    v_h = V_h c               U and V are `kv_b_proj`
        q_h k_h = [U_h^T n_h; t_h] [c; p]             q_h = [n_h; t_h], of which t_h is rotated

    There are two equivalent ways to compute this. Absorbed, queries are multiplied by U^T: all heads share one key
    [c; p] and one value c, which is all that a cache keeps. Expanded, every head has its own keys and values, of sizes
    that flash attention takes; the `Attend` of training asks for it (`ExpandsLatents`).
    """

    def __init__(self, config: DrafterConfig, sizes: LatentSizes, *, input_size: int) -> None:
        super().__init__()
        heads, eps, rank = config.num_attention_heads, config.rms_norm_eps, sizes.kv_lora_rank
        queries = heads * sizes.qk_head_dim
        self.q_proj: nn.Linear | None = None
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(rank, eps)
        self.kv_b_proj = LatentProjection(rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, config.hidden_size, bias=False)
        self._sizes, self._scale = sizes, sizes.qk_head_dim**-0.5 * yarn_scale(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attend from x at the positions of cos and sin."""
        sizes, expanded = self._sizes, isinstance(attend, ExpandsLatents)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.q_proj is None else self.q_proj(x)
        plain, turned = q.unflatten(-1, (-1, sizes.qk_head_dim)).split(
            [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1
        )
        k, v = self.keys_and_values(x, cos, sin, expanded=expanded)
        up_HNR, out_HVR = self._latent_weights()
        if not expanded:
            plain = torch.einsum("...hn,hnr->...hr", plain, up_HNR)
        # `Attend` scales scores by the size of its keys; the queries compensate for that.
        q = torch.cat([plain, rotate_pairs(turned, cos, sin)], dim=-1) * (self._scale * k.shape[-1] ** 0.5)
        mixed = attend(layer, q, k, v)
        if not expanded:
            mixed = torch.einsum("...hr,hvr->...hv", mixed, out_HVR)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]

    def keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor, *, expanded: bool) -> KeysAndValues:
        """Return the keys and values of x, as `forward` gives them to `attend`."""
        sizes = self._sizes
        latent, key = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        latent, key = self.kv_a_layernorm(latent), rotate_pairs(key[..., None, :], cos, sin)
        if not expanded:
            latent = latent[..., None, :]
            return torch.cat([latent, key], dim=-1), latent
        plain, v = (
            self.kv_b_proj(latent)
            .unflatten(-1, (-1, sizes.qk_nope_head_dim + sizes.v_head_dim))
            .split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        )
        return torch.cat([plain, key.expand(*plain.shape[:-1], -1)], dim=-1), v

    def _latent_weights(self) -> tuple[Tensor, Tensor]:
        """Return U [H, N, R] and V [H, V, R]."""
        sizes = self._sizes
        both = self.kv_b_proj.weight.view(-1, sizes.qk_nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank)
        return both[:, : sizes.qk_nope_head_dim], both[:, sizes.qk_nope_head_dim :]


def _attention(config: DrafterConfig, *, input_size: int) -> Attention | LatentAttention:
    if config.mla is not None:
        return LatentAttention(config, config.mla, input_size=input_size)
    return Attention(config, input_size=input_size)


class MLP(nn.Module):
    """Gated feed-forward (SwiGLU)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class FirstLayer(nn.Module):
    """The first layer: its attention reads the token's embedding and the hidden state, in this order."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _attention(config, input_size=2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self._norm_before_residual = config.norm_before_residual

    def forward(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run the layer at one depth."""
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        residual = residual + self.self_attn(x, cos, sin, 0, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]

    def keys_and_values(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, *, expanded: bool
    ) -> KeysAndValues:
        """Return the layer's keys and values."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        if isinstance(self.self_attn, LatentAttention):
            return self.self_attn.keys_and_values(x, cos, sin, expanded=expanded)
        return self.self_attn.keys_and_values(x, cos, sin)


class LaterLayer(nn.Module):
    """An ordinary pre-norm layer without the embedding; the first layer of EAGLE-1 has no norm before attention."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if index else nn.Identity()
        self.self_attn = _attention(config, input_size=config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self._index = index

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run the layer at one depth."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, self._index, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def keys_and_values(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> KeysAndValues:
        """Return the layer's keys and values."""
        assert isinstance(self.self_attn, Attention)
        return self.self_attn.keys_and_values(self.input_layernorm(hidden), cos, sin)


@dataclass(frozen=True, kw_only=True)
class DepthOutput:
    """States after one depth."""

    normed: Tensor
    """Post-norm state [..., D], input of the head."""
    feedback: Tensor
    """Hidden state of the next depth [..., D]: the post-norm state with `norm_output`, else the pre-norm state."""


class Drafter(nn.Module):
    """An EAGLE-3 or EAGLE-3.1 drafter; `eagle1_model.py` has EAGLE-1.

    Embeddings and head may be the drafter's own or the target's tensors (`share_target`), which are not saved with it.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DrafterConfig, *, own_embedding: bool = False, own_head: bool = True) -> None:
        super().__init__()
        self.config = config
        self.recorded_acceptance: RecordedAcceptance | None = None
        """How often drafts of these weights were accepted, if its folder says so."""
        self.quantization = "none"
        """Format that its matrices are multiplied in, if not the dtype of its other weights."""
        fused, eps = config.num_aux_hidden_states * config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(fused, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_aux_hidden_states))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(self._fc_inputs(), config.hidden_size, bias=config.fc_bias)
        later = (LaterLayer(config, i) for i in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([self._first_layer(), *later])
        self.norm = RMSNorm(config.hidden_size, eps)
        self.embed_tokens: nn.Embedding | QuantisedEmbedding | None = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        self.lm_head: nn.Linear | ServedLinear | None = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if own_head else None
        )
        # Offsets and membership as on disk (see vocab.py); None if the vocabulary is not pruned.
        pruned = config.pruned
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if pruned else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if pruned else None)
        self.rope = Rope(config)
        self.shares_embedding = not own_embedding
        self.shares_head = not own_head

    def share_target(
        self,
        embedding_VD: EmbeddingTable,
        head_VD: Tensor | ServedLinear,
        last_norm: nn.Module | None = None,
    ) -> "Drafter":
        """Use the target's embeddings and head if the drafter has none."""
        config = self.config
        if self.embed_tokens is None:
            _require_shape("embed_tokens", tuple(embedding_VD.shape), (config.vocab_size, config.hidden_size))
            if isinstance(embedding_VD, nn.Module):
                self.embed_tokens = embedding_VD
            else:
                self.embed_tokens = nn.Embedding(0, 0, device="meta")
                self.embed_tokens.weight = nn.Parameter(embedding_VD.detach(), requires_grad=False)
        if self.lm_head is None:
            _require_shape("lm_head", tuple(head_VD.shape), (config.draft_vocab_size, config.hidden_size))
            if isinstance(head_VD, nn.Module):
                self.lm_head = head_VD
            else:
                self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False, device="meta")
                self.lm_head.weight = nn.Parameter(head_VD.detach(), requires_grad=False)
        return self

    @property
    def norm_weight(self) -> Tensor:
        """Weight of a norm that every drafter has: never quantised, in the dtype that the drafter computes in."""
        layer = self.layers[0]
        assert isinstance(layer, FirstLayer | LaterLayer)
        return layer.post_attention_layernorm.weight

    def vocab(self) -> DraftVocab:
        """The draft vocabulary."""
        if self.d2t is None:
            return DraftVocab.identity(self.config.vocab_size, self.fc.weight.device)
        return DraftVocab.from_offsets(self.d2t, self.config.vocab_size)

    def fuse(self, aux_X: Tensor) -> Tensor:
        """Map the target's auxiliary states [..., X], in ascending layer order, to the depth-0 state."""
        if self.input_norm is not None:
            aux_X = self.input_norm(aux_X)
        if self.fc_norm is not None:
            states = aux_X.chunk(len(self.fc_norm), dim=-1)
            aux_X = torch.cat([norm(x) for norm, x in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(aux_X)  # type: ignore[no-any-return]

    def step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> DepthOutput:
        """Run one depth: `hidden` [..., D] is `fuse`'s output at depth 0 and the last `feedback` after it."""
        embedded = self._embedded(token_ids)
        cos, sin = self.rope(positions, hidden.dtype)
        hidden = self._run_first(hidden, embedded, cos, sin, attend)
        for layer in self.layers[1:]:
            hidden = layer(hidden, cos, sin, attend)
        normed = self.norm(hidden)
        return DepthOutput(normed=normed, feedback=normed if self.config.norm_output else hidden)

    def remember(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, *, expanded: bool = False
    ) -> KeysAndValues:
        """Return the keys and values that `step` would compute, for a drafter of one layer.

        A prompt needs nothing else, except for its last token. `expanded` is for an `Attend` that `ExpandsLatents`.
        """
        (layer,) = self.layers
        cos, sin = self.rope(positions, hidden.dtype)
        assert isinstance(layer, FirstLayer)
        return layer.keys_and_values(hidden, self._embedded(token_ids), cos, sin, expanded=expanded)

    def logits(self, normed: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., W]."""
        if self.lm_head is None:
            raise UserError("the drafter has no lm_head of its own; load it together with its target")
        scale = self.config.logit_scale
        logits: Tensor = self.lm_head(normed)
        return logits if scale == 1.0 else logits * scale

    def _fc_inputs(self) -> int:
        return self.config.num_aux_hidden_states * self.config.target_hidden_size

    def _first_layer(self) -> nn.Module:
        return FirstLayer(self.config)

    def _run_first(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.layers[0](hidden, embedded, cos, sin, attend)  # type: ignore[no-any-return]

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self.embed_tokens is None:
            raise UserError("the drafter has no embed_tokens of its own; load it together with its target")
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded


def _require_shape(name: str, found: tuple[int, ...], shape: tuple[int, int]) -> None:
    if found != shape:
        raise UserError(
            f"the drafter ships no {name} and the target's is {list(found)}, but the drafter needs "
            f"{list(shape)}; ship {name}.weight in the checkpoint or use the target it was trained for"
        )
