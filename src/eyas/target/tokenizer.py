"""The target's tokenizer without its weights, and the ids that end an answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from eyas.target.chat_template import ChatFormat
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.template_override import apply_format


def load_tokenizer(
    source: str, *, cache: Path | None = None, chat_format: ChatFormat | None = None
) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Return the tokenizer of `source` (see `locate`) and its stop ids; `chat_format` replaces its chat template."""
    place = locate(source, cache=cache)
    hub = options_of(source, place)
    with explain_failures(source, place):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **hub)
    apply_format(tokenizer, chat_format or ChatFormat())
    return tokenizer, stop_ids(tokenizer, read_generation_config(place, hub))


def read_generation_config(place: str, hub: Mapping[str, Any]) -> GenerationConfig | None:
    """Return the generation config of a located target; many ship none."""
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(place, **hub)
    except OSError:
        return None
    return config


def local_source(source: str, *, cache: Path | None = None) -> str:
    """A folder that gives the same tokenizer as `source`, once that was loaded: other processes need no network."""
    from huggingface_hub import try_to_load_from_cache

    place = locate(source, cache=cache)
    if Path(place).is_dir():
        return place
    known = try_to_load_from_cache(place, "config.json")
    return str(Path(known).parent) if isinstance(known, str) else source


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Return the ids that end an answer: the generation config's and the tokenizer's end of text."""
    configured = generation.eos_token_id if generation else None
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(k for k in (*several, tokenizer.eos_token_id) if k is not None)
