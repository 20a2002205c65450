"""Weights, experts and windows of architectures: one row for each model_type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """Differences of a model_type of transformers from the plain Llama block."""

    norms: int = 2
    """Norms of a layer that are as wide as the model."""
    qk_norms: bool = False
    qkv_bias: bool = False
    """Whether q, k and v always have biases; else `attention_bias` decides, and then o may have one as well."""
    o_bias: bool = True
    """Whether `attention_bias` gives o a bias too."""
    mlp_bias: bool = False
    """Whether `mlp_bias` in config.json counts."""
    experts: str = ""
    """Key of the number of experts, where there are any."""
    expert_size: str = "moe_intermediate_size"
    expert_bias: bool = False
    """Whether experts and router have biases."""
    sinks: bool = False
    """Whether every head has a score without a key."""
    dense_size: str = "intermediate_size"
    """Key of the width of layers without experts."""
    sparse: Callable[[Json, int], bool] = lambda config, layer: True
    """Whether a layer has experts, where the model has any."""
    shared: Callable[[Json], int] = lambda config: config.get("shared_expert_intermediate_size") or 0
    """Width of the experts that every token uses."""
    shared_gate: bool = False
    """Whether a vector gates the shared experts."""
    latent: bool = False
    """Whether keys and values are kept as one latent (MLA)."""
    windows: Callable[[Json, int], list[int | None]] = lambda config, layers: [None] * layers
    """Window of each layer."""
    defaults: Mapping[str, Any] | None = None
    """Values of transformers for keys that config.json may leave out, where the plain ones would be wrong."""


def _windows(default: int | None, slides: Callable[[Json, int], bool]) -> Callable[[Json, int], list[int | None]]:
    """Windows by `layer_types` where config.json has them, by `slides` otherwise."""

    def windows(config: Json, layers: int) -> list[int | None]:
        window, kinds = config.get("sliding_window", default), config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == layers:
            return [window if kind == "sliding_attention" else None for kind in kinds]
        return [window if slides(config, layer) else None for layer in range(layers)]

    return windows


_everywhere = _windows(None, lambda config, layer: True)
_alternating = _windows(4096, lambda config, layer: layer % 2 == 0)
_gpt_oss = _windows(128, lambda config, layer: layer % 2 == 0)
_gemma3 = _windows(4096, lambda config, layer: (layer + 1) % config.get("sliding_window_pattern", 6) != 0)
_qwen_layers = _windows(None, lambda config, layer: layer >= config.get("max_window_layers", 28))


def _qwen(config: Json, layers: int) -> list[int | None]:
    return _qwen_layers(config, layers) if config.get("use_sliding_window", False) else [None] * layers


def _llama4(config: Json, layers: int) -> list[int | None]:
    """Chunks in layers whose positions are rotated: on average a token sees half of one."""
    rotated = config.get("no_rope_layers") or [
        int((layer + 1) % (config.get("no_rope_layer_interval") or 4) != 0) for layer in range(layers)
    ]
    chunk = config.get("attention_chunk_size", 8192)
    return [chunk if rotates else None for rotates in rotated]


def _by_step(config: Json, layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _behind_first(config: Json, layer: int) -> bool:
    return layer >= (config.get("first_k_dense_replace") or 0)


def _llama4_sparse(config: Json, layer: int) -> bool:
    step = config.get("interleave_moe_layer_step") or 1
    named = config.get("moe_layers")
    return layer in named if isinstance(named, list) else (layer + 1) % step == 0


def _shared_experts(config: Json) -> int:
    return int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"])


_DEEPSEEK = DecoderFamily(
    experts="n_routed_experts",
    sparse=_behind_first,
    shared=_shared_experts,
    latent=True,
    defaults={"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    | {"v_head_dim": 128},
)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
FAMILIES: Mapping[str, DecoderFamily] = {
    "llama": DecoderFamily(mlp_bias=True),
    "smollm3": DecoderFamily(mlp_bias=True, defaults={"tie_word_embeddings": True}),
    "mistral": DecoderFamily(windows=_everywhere),
    "phi3": DecoderFamily(windows=_everywhere),
    "qwen2": DecoderFamily(qkv_bias=True, windows=_qwen),
    "qwen3": DecoderFamily(qk_norms=True, windows=_qwen, defaults={"head_dim": 128}),
    "gemma": DecoderFamily(defaults=_GEMMA),
    "gemma2": DecoderFamily(norms=4, windows=_alternating, defaults=_GEMMA),
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
    "qwen2_moe": DecoderFamily(qkv_bias=True, experts="num_experts", sparse=_by_step, shared_gate=True, windows=_qwen),
    "qwen3_moe": DecoderFamily(qk_norms=True, experts="num_experts", sparse=_by_step, windows=_qwen),
    "gpt_oss": DecoderFamily(
        experts="num_local_experts",
        expert_size="intermediate_size",
        expert_bias=True,
        sinks=True,
        windows=_gpt_oss,
        defaults={"attention_bias": True, "head_dim": 64},
    ),
    "glm4_moe": DecoderFamily(
        qk_norms=True,
        experts="n_routed_experts",
        sparse=_behind_first,
        shared=_shared_experts,
        o_bias=False,
        defaults={"use_qk_norm": False},
    ),
    "llama4_text": DecoderFamily(
        experts="num_local_experts",
        expert_size="intermediate_size",
        dense_size="intermediate_size_mlp",
        sparse=_llama4_sparse,
        shared=lambda config: int(config["intermediate_size"]),
        windows=_llama4,
        defaults={"num_experts_per_tok": 1},
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
