"""What a target is, read from its configuration alone.

Planning, checking a drafter against its target and choosing auxiliary layers need sizes, not weights, so
nothing of the weights is read here and torch is not imported by this module.
Invariant: the numbers describe the text model, also when the checkpoint holds a vision tower around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.errors import UserError
from eyas.target.config import read_config
from eyas.target.locate import locate, options_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes of a target, as the drafter and the planner need them."""

    source: str
    """What the user called the target: `smollm2`, a folder, a GGUF file or a hub id."""
    model_type: str
    """The architecture in transformers' words, for example `llama`."""
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    """The longest context the target was made for; None when its configuration does not say."""

    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """Three states from the start, the middle and the end: (2, L//2, L-3), as EAGLE-3 and vLLM choose."""
        layers = self.num_hidden_layers
        low, middle, high = 2, layers // 2, layers - 3
        if not low < middle < high:
            raise UserError(
                f"target {self.source} has {layers} layers and the default auxiliary layer ids "
                f"({low}, {middle}, {high}) need at least 7; name three ascending ids between 0 and {layers}"
            )
        return low, middle, high


def read_facts(source: str, *, cache: Path | None = None, revision: str | None = None) -> TargetFacts:
    """Read the facts of `source`; the default target and GGUF files are made into a folder first."""
    place = locate(source, cache=cache)
    return facts_of(read_config(source, place, options_of(source, place, revision)), source)


def facts_of(config: PretrainedConfig, source: str) -> TargetFacts:
    """Reduce a transformers configuration to the facts of its text model."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    missing = [name for name, value in sizes.items() if not isinstance(value, int)]
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
