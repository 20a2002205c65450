"""A target's decoder in numbers, read from config.json as it stands: weights, what a token reads, what it keeps.

Every weight is counted, so that bytes come out as loaded ones do; the tests hold the counts against transformers' own
models. An architecture that is not in the table is refused by name: a guess would look like an answer.

Invariant: the numbers describe the text model, also when the checkpoint holds a vision tower around it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import UserError

Json = Mapping[str, Any]


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
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """What sets one model_type of transformers apart from the plain Llama block."""

    norms: int = 2
    """Of a layer, as wide as the model."""
    qk_norms: bool = False
    qkv_bias: bool = False
    """Always; otherwise `attention_bias` says, and then o has one as well."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is looked at."""
    experts: str = ""
    """The key that says how many, where there are experts."""
    expert_size: str = "moe_intermediate_size"
    expert_bias: bool = False
    """Of the router, too."""
    sinks: bool = False
    """Whether every head has a score without a key."""
    windows: Callable[[Json, int], list[int | None]] = lambda config, layers: [None] * layers
    defaults: Mapping[str, Any] | None = None
    """What transformers takes for keys that config.json leaves out, where that is neither plain nor a refusal."""


def _by_type(config: Json, layers: int, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """`layer_types` where it is given, `slides` otherwise."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    return [window if slides(layer) else None for layer in range(layers)]


def _everywhere(config: Json, layers: int) -> list[int | None]:
    return _by_type(config, layers, config.get("sliding_window"), lambda layer: True)


def _qwen(config: Json, layers: int) -> list[int | None]:
    if not config.get("use_sliding_window", False):
        return [None] * layers
    first = config.get("max_window_layers", 28)
    return _by_type(config, layers, config.get("sliding_window"), lambda layer: layer >= first)


def _gemma2(config: Json, layers: int) -> list[int | None]:
    return _by_type(config, layers, config.get("sliding_window", 4096), lambda layer: layer % 2 == 0)


def _gemma3(config: Json, layers: int) -> list[int | None]:
    every = config.get("sliding_window_pattern", 6)
    return _by_type(config, layers, config.get("sliding_window", 4096), lambda layer: (layer + 1) % every != 0)


def _gpt_oss(config: Json, layers: int) -> list[int | None]:
    return _by_type(config, layers, config.get("sliding_window", 128), lambda layer: layer % 2 == 0)


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
FAMILIES: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily(mlp_bias=True),
    "smollm3": DecoderFamily(mlp_bias=True, defaults={"tie_word_embeddings": True}),
    "mistral": DecoderFamily(windows=_everywhere),
    "phi3": DecoderFamily(windows=_everywhere),
    "qwen2": DecoderFamily(qkv_bias=True, windows=_qwen),
    "qwen3": DecoderFamily(qk_norms=True, windows=_qwen, defaults={"head_dim": 128}),
    "gemma": DecoderFamily(defaults=_GEMMA),
    "gemma2": DecoderFamily(norms=4, windows=_gemma2, defaults=_GEMMA),
    "gemma3_text": DecoderFamily(
        norms=4,
        qk_norms=True,
        windows=_gemma3,
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "mixtral": DecoderFamily(experts="num_local_experts", expert_size="intermediate_size", windows=_everywhere),
    "qwen2_moe": DecoderFamily(qkv_bias=True, experts="num_experts", windows=_qwen),
    "qwen3_moe": DecoderFamily(qk_norms=True, experts="num_experts", windows=_qwen),
    "gpt_oss": DecoderFamily(
        experts="num_local_experts",
        expert_size="intermediate_size",
        expert_bias=True,
        sinks=True,
        windows=_gpt_oss,
        defaults={"attention_bias": True, "head_dim": 64},
    ),
}


def read_decoder(config: Json, source: str) -> Decoder:
    """Read config.json; what cannot be counted is refused."""
    text, note = _text_part(config, source)
    kind = str(text.get("model_type"))
    family = FAMILIES[kind]
    text = {**(family.defaults or {}), **text}
    hidden, heads = _whole(text, "hidden_size", source), _whole(text, "num_attention_heads", source)
    layers = _whole(text, "num_hidden_layers", source)
    kv_heads = heads if text.get("num_key_value_heads") is None else _whole(text, "num_key_value_heads", source)
    head_dim = hidden // heads if text.get("head_dim") is None else _whole(text, "head_dim", source)
    feed = [_feed_forward(family, text, layer, source) for layer in range(layers)]
    vectors = _vectors(family, text, hidden, heads * head_dim, kv_heads * head_dim, head_dim)
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
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(
            Layer(
                attention=2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim,
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
            f"{', '.join(FAMILIES)}: another one needs a row in the table of eyas/plan/decoder.py"
        )
    return text, f"only the text model of {config.get('model_type')} is counted" if isinstance(inner, dict) else ""


def _feed_forward(family: DecoderFamily, config: Json, layer: int, source: str) -> dict[str, int]:
    """Weights of the part behind the attention, and how wide it is for one token."""
    hidden = _whole(config, "hidden_size", source)
    experts = _whole(config, family.experts, source) if family.experts else 0
    sparse = experts > 0 and layer not in (config.get("mlp_only_layers") or ())
    sparse = sparse and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    if not sparse:
        width = _whole(config, "intermediate_size", source)
        return {"dense": 3 * hidden * width, "expert": 0, "experts": 0, "active": 0, "width": width}
    width, active = _whole(config, family.expert_size, source), _whole(config, "num_experts_per_tok", source)
    shared = config.get("shared_expert_intermediate_size") or 0
    dense = hidden * experts + 3 * hidden * shared + (hidden if shared else 0)
    every = active * width + shared
    return {"dense": dense, "expert": 3 * hidden * width, "experts": experts, "active": active, "width": every}


def _vectors(family: DecoderFamily, config: Json, hidden: int, q: int, kv: int, head_dim: int) -> int:
    count = family.norms * hidden + (2 * head_dim if family.qk_norms else 0)
    if family.sinks:
        count += q // head_dim
    if family.expert_bias:
        count += config[family.experts] * (1 + 2 * config[family.expert_size] + hidden)
    if family.qkv_bias:
        return count + q + 2 * kv
    return count + (q + 2 * kv + hidden if config.get("attention_bias") else 0)


def _whole(config: Json, key: str, source: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
        raise UserError(f"{key} in the config.json of {source} is {value!r}; a whole number from 1 is needed: mend it")
    return value
