"""The kinds of layers that drafters are made of, as config.json names them: one table.

    llama         attention with a projection each of queries, keys and values
    qwen3         the same, and every head of queries and keys is normed before it is turned (`qk_norm`)
    deepseek_v2   multi-head latent attention (`mla`); the rest is Llama's, whatever is said of experts

Everything else about a drafter is the same whatever its layers are.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eyas.drafter.config import DrafterConfig, LatentSizes
from eyas.errors import UserError

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One kind: what it is called, and what config.json says of it beside what it says of all."""

    name: str
    architectures: tuple[str, ...]
    """Of a whole drafter; the first is written."""
    model_types: tuple[str, ...]
    """Of a layer; the first is written."""
    transformers_config: str
    """The class whose keys stand in config.json."""
    keys: frozenset[str] = frozenset()
    """Keys of config.json that are read for this kind only."""
    ignored: frozenset[str] = frozenset()
    """Keys that mean nothing for a drafter, and that the class does not have."""
    read: Callable[[Json], Json]
    """Values of a `DrafterConfig` from config.json."""
    write: Callable[[DrafterConfig], Json] = lambda config: {}
    """What config.json says of this kind only."""
    not_in: Mapping[str, str]
    """By format, why its servers cannot run it."""
    require_sglang: Callable[[DrafterConfig], None] = lambda config: None
    """Refuses drafters of this kind that SGLang cannot run."""

    def require_layout(self, layout: str) -> None:
        """Refuse a format whose servers cannot run this kind."""
        if layout in self.not_in:
            raise UserError(
                f"the drafter has {self.name} layers, and {self.not_in[layout]}; use --to vllm, or serve it with eyas"
            )


def _read_llama(raw: Json) -> Json:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    if raw.get("head_dim") is not None:
        return {}
    # Where heads or width are no sizes at all, DrafterConfig names them before it comes to this one.
    whole = type(heads) is int and type(hidden) is int and heads > 0
    return {"head_dim": hidden // heads if whole else 0}


def _read_qwen3(raw: Json) -> Json:
    # What an absent head_dim means is said by transformers' Qwen3Config, from which vLLM has it.
    return {"qk_norm": True, "head_dim": 128 if raw.get("head_dim") is None else raw["head_dim"]}


_LATENT = tuple(item.name for item in fields(LatentSizes))
# What published configs say of experts beside what transformers knows; a drafter has none.
_EXPERTS = frozenset({"aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux", "topk_method"})


def _read_deepseek(raw: Json) -> Json:
    missing = [key for key in _LATENT if key not in raw or (raw[key] is None and key != "q_lora_rank")]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}; add what the drafter was trained with")
    if raw.get("index_topk") is not None:
        raise UserError(
            f"index_topk is {raw['index_topk']!r}: this drafter attends to chosen tokens only, as DeepSeek V3.2 does; "
            "eyas runs drafters that attend to all: use such a one"
        )
    if raw.get("rope_interleave", True) is not True:
        raise UserError(
            f"rope_interleave is {raw['rope_interleave']!r}; vLLM and SGLang turn neighbours as a pair whatever it "
            "says: permute the rows of the turned parts and set it to true"
        )
    mla = LatentSizes(**{key: raw[key] for key in _LATENT})
    said = raw.get("head_dim")
    if said is not None and said not in (mla.qk_rope_head_dim, mla.qk_head_dim):
        raise UserError(
            f"head_dim is {said!r} beside qk_nope_head_dim {mla.qk_nope_head_dim} and qk_rope_head_dim "
            f"{mla.qk_rope_head_dim}, which say what a head is; leave it out"
        )
    return {"mla": mla, "head_dim": mla.qk_head_dim}


def _write_deepseek(config: DrafterConfig) -> Json:
    assert config.mla is not None
    # transformers calls the turned part of a head head_dim, and so do the files that it writes.
    return {**asdict(config.mla), "head_dim": config.mla.qk_rope_head_dim, "rope_interleave": True}


def _refuse_for_sglang(config: DrafterConfig) -> None:
    if config.num_hidden_layers > 1:
        raise UserError(
            f"the drafter has {config.num_hidden_layers} layers, and SGLang's latent-attention drafters have one; "
            "use --to vllm"
        )
    if config.mla is not None and config.mla.q_lora_rank is None:
        raise UserError("q_lora_rank is null, and SGLang's latent-attention drafters need one; use --to vllm")


LAYER_KINDS: Mapping[str, LayerKind] = {
    "llama": LayerKind(
        name="llama",
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        model_types=("llama",),
        transformers_config="LlamaConfig",
        read=_read_llama,
        not_in={},
    ),
    "qwen3": LayerKind(
        name="qwen3",
        architectures=("Eagle3Qwen3ForCausalLM",),
        model_types=("qwen3",),
        transformers_config="Qwen3Config",
        read=_read_qwen3,
        not_in={"sglang": "SGLang's EAGLE-3 drafters have none with norms of queries and keys"},
    ),
    "deepseek_v2": LayerKind(
        name="deepseek_v2",
        architectures=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        # vLLM 0.32 takes every drafter of type deepseek_v3 for a layer of multi-token prediction, and refuses it.
        model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
        transformers_config="DeepseekV3Config",
        keys=frozenset({*_LATENT, "qk_head_dim", "rope_interleave", "index_topk"}),
        ignored=_EXPERTS,
        read=_read_deepseek,
        write=_write_deepseek,
        require_sglang=_refuse_for_sglang,
        not_in={"speculators": "speculators' EAGLE-3 drafters have none with latent attention (MLA)"},
    ),
}


def kind_of(config: DrafterConfig) -> LayerKind:
    """The kind of layers a drafter has."""
    if config.mla is not None:
        return LAYER_KINDS["deepseek_v2"]
    return LAYER_KINDS["qwen3" if config.qk_norm else "llama"]


def kind_of_architecture(architectures: object) -> LayerKind | None:
    """The kind that config.json names, if it names one."""
    named = architectures if isinstance(architectures, list) else []
    return next((kind for kind in LAYER_KINDS.values() if any(a in kind.architectures for a in named)), None)


def kind_of_model_type(model_type: object) -> LayerKind | None:
    """The kind of a layer of this type."""
    return next((kind for kind in LAYER_KINDS.values() if model_type in kind.model_types), None)
