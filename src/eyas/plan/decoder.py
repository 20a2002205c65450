"""A target's decoder in numbers, read from config.json as it stands: weights, what a token reads, what it keeps.

Every weight is counted, so that bytes come out as loaded ones do; the tests hold the counts against transformers' own
models. An architecture that is not in the table is refused by name: a guess would look like an answer.

Invariant: the numbers describe the text model, also when the checkpoint holds a vision tower around it.
"""

from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError
from eyas.plan.families import FAMILIES, DecoderFamily, Json


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: how many weights of each sort, and how far it looks back."""

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
        """All that a quantisation makes smaller."""
        return self.attention + self.dense + self.experts * self.expert

    @property
    def used(self) -> int:
        """What one token is multiplied with."""
        return self.attention + self.dense + self.active * self.expert

    def read(self, tokens: int) -> float:
        """What a pass over so many tokens reads, when every token chooses its experts by chance."""
        return self.attention + self.dense + self.read_experts(tokens)

    def read_experts(self, tokens: int) -> float:
        """The part of it that is of experts."""
        if not self.experts:
            return 0
        missed = (1 - self.active / self.experts) ** tokens
        return self.expert * self.experts * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A target."""

    source: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    """Of what one token passes through: with experts, of those it uses together."""
    vocab_size: int
    tied: bool
    """Whether the head is the embedding."""
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    context: int | None
    """What it was made for, as far as it says."""
    latent: int = 0
    """Numbers that a token keeps in one layer where all heads share them (MLA); 0: keys and values by head."""
    rotated: int = 0
    """Those of them that carry the position."""
    note: str = ""
    """What is not counted."""

    @property
    def vocabulary(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def matrices(self) -> int:
        """Weights in the layers' matrices."""
        return sum(layer.matrices for layer in self.layers)

    @property
    def experts(self) -> int:
        """Those of them that are of experts."""
        return sum(layer.experts * layer.expert for layer in self.layers)

    @property
    def others(self) -> int:
        """Weights elsewhere: embedding, head, norms and biases; quantisations leave them as they are."""
        return self.vocabulary * (1 if self.tied else 2) + self.vectors

    @property
    def vectors(self) -> int:
        """Weights in norms and biases."""
        return self.hidden_size + sum(layer.vectors for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.matrices + self.others

    @property
    def active_parameters(self) -> int:
        """All but the experts that a token does not use."""
        return self.others + sum(layer.used for layer in self.layers)

    @property
    def kv_width(self) -> int:
        """Numbers that a token keeps in one layer."""
        return self.kv_width_on(1)

    def kv_width_on(self, cards: int) -> int:
        """The same on each of so many cards: heads are divided as far as there are any, a latent is on all of them."""
        return self.latent or 2 * -(-self.kv_heads // cards) * self.head_dim

    @property
    def score_width(self) -> int:
        """Multiplications of a token with one that it looks back to, in one layer: scores, and what they weigh.

        With a latent all heads look at all of it, and weigh all but the part that carries the position.
        """
        if self.latent:
            return self.heads * (2 * self.latent - self.rotated)
        return 2 * self.heads * self.head_dim


def read_decoder(config: Json, source: str) -> Decoder:
    """Read config.json; what cannot be counted is refused."""
    text, note = _text_part(config, source)
    kind = str(text.get("model_type"))
    family = FAMILIES[kind]
    text = {**(family.defaults or {}), **text}
    hidden, heads = _whole(text, "hidden_size", source), _whole(text, "num_attention_heads", source)
    layers = _whole(text, "num_hidden_layers", source)
    attention = _latent(text, source) if family.latent else _heads(family, text, source)
    feed = [_feed_forward(family, text, layer, source) for layer in range(layers)]
    vectors = family.norms * hidden + attention.vectors + _expert_biases(family, text, hidden)
    windows = family.windows(text, layers)
    widest = max(part["width"] for part in feed)
    mlp_bias = 2 * widest + hidden if family.mlp_bias and text.get("mlp_bias") else 0
    return Decoder(
        source=source,
        model_type=kind,
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
            Layer(
                attention=attention.matrices,
                dense=part["dense"],
                expert=part["expert"],
                experts=part["experts"],
                active=part["active"],
                vectors=vectors + mlp_bias,
                window=window,
            )
            for part, window in zip(feed, windows, strict=True)
        ),
        context=text.get("max_position_embeddings"),
        note=note,
    )


def _text_part(config: Json, source: str) -> tuple[dict[str, Any], str]:
    inner = config.get("text_config")
    text = {**inner} if isinstance(inner, dict) else {**config}
    kind = text.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"{source} has model_type {kind!r}, whose weights cannot be counted; known are "
            f"{', '.join(FAMILIES)}: another one needs a row in the table of eyas/plan/families.py"
        )
    return text, f"only the text model of {config.get('model_type')} is counted" if isinstance(inner, dict) else ""


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Of one layer: weights, and what a token keeps."""

    matrices: int
    vectors: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    rotated: int = 0


def _heads(family: DecoderFamily, config: Json, source: str) -> _Attention:
    """Keys and values by head."""
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
    """Queries through a narrow place, keys and values from one latent that all heads share."""
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


def _feed_forward(family: DecoderFamily, config: Json, layer: int, source: str) -> dict[str, int]:
    """Weights of the part behind the attention, and how wide it is for one token."""
    hidden = _whole(config, "hidden_size", source)
    experts = _whole(config, family.experts, source) if family.experts else 0
    if not experts or not family.sparse(config, layer):
        width = _whole(config, family.dense_size, source)
        return {"dense": 3 * hidden * width, "expert": 0, "experts": 0, "active": 0, "width": width}
    width, active = _whole(config, family.expert_size, source), _whole(config, "num_experts_per_tok", source)
    shared = family.shared(config)
    dense = hidden * experts + 3 * hidden * shared + (hidden if shared and family.shared_gate else 0)
    every = active * width + shared
    return {"dense": dense, "expert": 3 * hidden * width, "experts": experts, "active": active, "width": every}


def _expert_biases(family: DecoderFamily, config: Json, hidden: int) -> int:
    if not family.expert_bias:
        return 0
    return int(config[family.experts] * (1 + 2 * config[family.expert_size] + hidden))


def _whole(config: Json, key: str, source: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
        raise UserError(f"{key} in the config.json of {source} is {value!r}; a whole number from 1 is needed: mend it")
    return value
