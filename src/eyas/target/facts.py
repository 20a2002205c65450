"""Sizes of a target, read from its configuration; one tensor can be read too. This module imports no torch.

Planning, checking a drafter against its target and choosing auxiliary layers need no weights.
Invariant: the numbers describe the text model, also where the checkpoint holds a vision tower around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import UserError
from eyas.target.locate import explain_failures, locate, options_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

DEEPSEEK_V3_BY_OTHER_NAMES = ("kimi_k2",)
"""Values of `model_type` that transformers does not know and whose model is DeepSeek V3's."""
_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes of a target, as the drafter and the planner need them."""

    source: str
    """The name that the user gave: `smollm2`, a folder, a GGUF file or a hub id."""
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    """The longest supported context; None if the configuration does not say."""

    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """Three states from the start, the middle and the end: (2, L//2, L-3), as in EAGLE-3 and vLLM."""
        layers = self.num_hidden_layers
        low, middle, high = 2, layers // 2, layers - 3
        if not low < middle < high:
            raise UserError(
                f"target {self.source} has {layers} layers and the default auxiliary layer ids "
                f"({low}, {middle}, {high}) need at least 7; name three ascending ids between 0 and {layers}"
            )
        return low, middle, high


def read_config(source: str, place: str, hub: dict[str, Any]) -> PretrainedConfig:
    """Read the configuration of `source`, found at `place` (see `locate`, `options_of`)."""
    from transformers import AutoConfig, PretrainedConfig

    with explain_failures(source, place):
        raw, _ = PretrainedConfig.get_config_dict(place, **hub)
        if raw.get("model_type") in DEEPSEEK_V3_BY_OTHER_NAMES:
            from transformers import DeepseekV3Config

            return DeepseekV3Config.from_dict({**raw, "model_type": DeepseekV3Config.model_type})
        config: PretrainedConfig = AutoConfig.from_pretrained(place, **hub)
    return config


def read_facts(source: str, *, cache: Path | None = None, revision: str | None = None) -> TargetFacts:
    """Read the facts of `source`; the default target and GGUF files are converted to a folder first."""
    place = locate(source, cache=cache)
    return facts_of(read_config(source, place, options_of(source, place, revision)), source)


def facts_of(config: PretrainedConfig, source: str) -> TargetFacts:
    """Return the facts of the text model of a transformers configuration."""
    text = config.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
    missing = [name for name in sizes if not isinstance(getattr(text, name, None), int)]
    if missing or config.is_encoder_decoder:
        reason = f"its configuration has no {', '.join(missing)}" if missing else "it is an encoder-decoder model"
        raise UserError(
            f"{source} ({config.model_type}) is not a causal language model: {reason}; "
            "choose a decoder-only text model as the target"
        )
    return TargetFacts(
        source=source,
        model_type=text.model_type,
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
    )


def read_embedding(source: str, *, cache: Path | None = None) -> Tensor | None:
    """Return the input embeddings [V, D] without loading the target; None if they are not here or have another name."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(locate(source, cache=cache)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith(_EMBEDDING_NAMES) and "vision" not in name:
                        table: Tensor = stored.get_tensor(name)
                        return table
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read the target's {file} ({error}); fetch or export the target again") from error
    return None
