"""Shape of a target's decoder, read from config.json: weights, weights read per token, size of the KV cache.

Every weight is counted, so that bytes match those of a loaded model; tests hold the counts against transformers' own
models. An architecture that is not in `FAMILIES` is refused by name, because a guess would look like an answer.

The numbers are those of the text model, also where the checkpoint has a vision tower.
"""

from dataclasses import dataclass, replace
from typing import Any

from eyas.errors import UserError
from eyas.plan.families import FAMILIES, DecoderFamily, Json


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of one layer, and its window."""

    attention: int
    """In the matrices of q, k, v and o."""
    dense: int
    """In matrices that every token uses: a plain feed-forward part, shared experts, the router."""
    expert: int = 0
    """In the matrices of one expert."""
    experts: int = 0
    active: int = 0
    """Experts that a token uses."""
    vectors: int = 0
    """In norms and biases."""
    window: int | None = None

    @property
    def matrices(self) -> int:
        """Weights that a quantisation makes smaller."""
        return self.attention + self.dense + self.experts * self.expert

    @property
    def used(self) -> int:
        """Weights that one token is multiplied with."""
        return self.attention + self.dense + self.active * self.expert

    def read(self, tokens: int) -> float:
        """Weights that a pass over this many tokens reads, if every token chooses its experts at random."""
        return self.attention + self.dense + self.read_experts(tokens)

    def read_experts(self, tokens: int) -> float:
        """Weights of experts among them."""
        if not self.experts:
            return 0
        missed = (1 - self.active / self.experts) ** tokens
        return self.expert * self.experts * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of a target."""

    source: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    """Width that one token passes through: with experts, of those that it uses together."""
    vocab_size: int
    tied: bool
    """Whether the head is the embedding."""
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    context: int | None
    """The longest context that it was made for, if config.json says."""
    latent: int = 0
    """Numbers that a token keeps in one layer where all heads share them (MLA); 0: keys and values by head."""
    rotated: int = 0
    """Numbers of the latent that carry the position."""
    note: str = ""
    """Parts of the checkpoint that are not counted."""

    @property
    def vocabulary(self) -> int:
        """Weights of the embedding; the head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def matrices(self) -> int:
        """Weights in the layers' matrices."""
        return sum(layer.matrices for layer in self.layers)

    @property
    def experts(self) -> int:
        """Weights of experts among them."""
        return sum(layer.experts * layer.expert for layer in self.layers)

    @property
    def others(self) -> int:
        """Weights of embedding, head, norms and biases, which quantisations leave as they are."""
        return self.vocabulary * (1 if self.tied else 2) + self.vectors

    @property
    def vectors(self) -> int:
        """Weights in norms and biases."""
        return self.hidden_size + sum(layer.vectors for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.matrices + self.others

    @property
    def active_parameters(self) -> int:
        """Weights without the experts that a token does not use."""
        return self.others + sum(layer.used for layer in self.layers)

    def kv_width_on(self, cards: int) -> int:
        """Numbers that a token keeps in one layer on each card: heads are divided down to one, a latent is whole."""
        return self.latent or 2 * -(-self.kv_heads // cards) * self.head_dim

    @property
    def score_width(self) -> int:
        """Multiplications of a token with one that it attends to, in one layer, for scores and weighted values.

        With a latent, all heads read the whole latent for scores and all but its rotated part for values.
        """
        if self.latent:
            return self.heads * (2 * self.latent - self.rotated)
        return 2 * self.heads * self.head_dim


def read_decoder(config: Json, source: str) -> Decoder:
    """Read config.json; architectures whose weights cannot be counted are refused."""
    inner = config.get("text_config")
    text = {**inner} if isinstance(inner, dict) else {**config}
    kind = text.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise UserError(
            f"{source} has model_type {kind!r}, whose weights cannot be counted; known are "
            f"{', '.join(FAMILIES)}: another one needs a row in the table of eyas/plan/families.py"
        )
    text = {**(family.defaults or {}), **text}
    hidden, heads = _whole(text, "hidden_size", source), _whole(text, "num_attention_heads", source)
    count = _whole(text, "num_hidden_layers", source)
    attention = _latent(text, source) if family.latent else _heads(family, text, source)
    feed_forwards = [_feed_forward(family, text, layer, source) for layer in range(count)]
    widest = max(width for _, width in feed_forwards)
    vectors = family.norms * hidden + attention.vectors
    if family.expert_bias:
        vectors += int(text[family.experts] * (1 + 2 * text[family.expert_size] + hidden))
    if family.mlp_bias and text.get("mlp_bias"):
        vectors += 2 * widest + hidden
    return Decoder(
        source=source,
        model_type=str(kind),
        hidden_size=hidden,
        intermediate_size=widest,
        vocab_size=_whole(text, "vocab_size", source),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        heads=heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        latent=attention.latent,
        rotated=attention.rotated,
        layers=tuple(
            replace(layer, attention=attention.matrices, vectors=vectors, window=window)
            for (layer, _), window in zip(feed_forwards, family.windows(text, count), strict=True)
        ),
        context=text.get("max_position_embeddings"),
        note=f"only the text model of {config.get('model_type')} is counted" if isinstance(inner, dict) else "",
    )


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Weights of one layer's attention, and the shape of its keys and values."""

    matrices: int
    vectors: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    rotated: int = 0


def _heads(family: DecoderFamily, config: Json, source: str) -> _Attention:
    """Attention with keys and values by head."""
    hidden, heads = _whole(config, "hidden_size", source), _whole(config, "num_attention_heads", source)
    kv_heads = heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads", source)
    head_dim = hidden // heads if config.get("head_dim") is None else _whole(config, "head_dim", source)
    q, kv = heads * head_dim, kv_heads * head_dim
    vectors = heads if family.sinks else 0
    vectors += 2 * head_dim if family.qk_norms and config.get("use_qk_norm", True) else 0
    if family.qkv_bias or config.get("attention_bias"):
        vectors += q + 2 * kv + (hidden if family.o_bias and not family.qkv_bias else 0)
    return _Attention(matrices=2 * hidden * (q + kv), vectors=vectors, kv_heads=kv_heads, head_dim=head_dim)


def _latent(config: Json, source: str) -> _Attention:
    """Multi-head latent attention (MLA)."""
    hidden, heads = _whole(config, "hidden_size", source), _whole(config, "num_attention_heads", source)
    kept, rotated, plain, value = (
        _whole(config, key, source) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    narrow, wide = config.get("q_lora_rank"), heads * (plain + rotated)
    queries = hidden * wide if narrow is None else narrow * (hidden + wide)
    keys = hidden * (kept + rotated) + kept * heads * (plain + value)
    biases = (narrow or 0) + kept + rotated + hidden if config.get("attention_bias") else 0
    return _Attention(
        matrices=queries + keys + heads * value * hidden,
        vectors=(narrow or 0) + kept + biases,
        kv_heads=heads,
        head_dim=plain + rotated,
        latent=kept + rotated,
        rotated=rotated,
    )


def _feed_forward(family: DecoderFamily, config: Json, layer: int, source: str) -> tuple[Layer, int]:
    """Count the feed-forward part of a layer, and the width that one token passes through."""
    hidden = _whole(config, "hidden_size", source)
    experts = _whole(config, family.experts, source) if family.experts else 0
    if not experts or not family.sparse(config, layer):
        width = _whole(config, family.dense_size, source)
        return Layer(attention=0, dense=3 * hidden * width), width
    width, active = _whole(config, family.expert_size, source), _whole(config, "num_experts_per_tok", source)
    shared = family.shared(config)
    dense = hidden * experts + 3 * hidden * shared + (hidden if shared and family.shared_gate else 0)
    sparse = Layer(attention=0, dense=dense, expert=3 * hidden * width, experts=experts, active=active)
    return sparse, active * width + shared


def _whole(config: Json, key: str, source: str) -> int:
    value: Any = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
        raise UserError(f"{key} in the config.json of {source} is {value!r}; a whole number from 1 is needed: mend it")
    return value
