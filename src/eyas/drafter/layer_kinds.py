"""The kinds of layers that drafters are made of, as config.json names them: one table.

    llama      attention with a projection each of queries, keys and values
    qwen3      the same, and every head of queries and keys is normed before it is turned (`qk_norm`)

Everything else about a drafter is the same whatever its layers are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.drafter.config import DrafterConfig
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
    read: Callable[[Json], Json]
    """Values of a `DrafterConfig` from config.json."""
    write: Callable[[DrafterConfig], Json] = lambda config: {}
    """What config.json says of this kind only."""
    not_in: Mapping[str, str]
    """By format, why its servers cannot run it."""

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
}


def kind_of(config: DrafterConfig) -> LayerKind:
    """The kind of layers a drafter has."""
    return LAYER_KINDS["qwen3" if config.qk_norm else "llama"]


def kind_of_architecture(architectures: object) -> LayerKind | None:
    """The kind that config.json names, if it names one."""
    named = architectures if isinstance(architectures, list) else []
    return next((kind for kind in LAYER_KINDS.values() if any(a in kind.architectures for a in named)), None)


def kind_of_model_type(model_type: object) -> LayerKind | None:
    """The kind of a layer of this type."""
    return next((kind for kind in LAYER_KINDS.values() if model_type in kind.model_types), None)
