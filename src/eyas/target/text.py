"""Tokenizer, chat template, stop tokens and recommended sampling of a target, without its weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.errors import UserError
from eyas.sampling import Sampling
from eyas.target.chat_template import (
    TEMPLATE_ERRORS,
    ChatFormat,
    ChatTemplateOptions,
    apply_format,
    render_chat,
    require_template,
)
from eyas.target.facts import TargetFacts, facts_of, read_config
from eyas.target.locate import explain_failures, locate, options_of


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetText(ABC):
    """A target's tokenizer and chat template: text to token ids and back."""

    facts: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for every conversation; a request's own override them."""

    @property
    @abstractmethod
    def generation_config(self) -> GenerationConfig | None:
        """The recommended sampling; None if the model ships none."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatTemplateOptions | None = None,
        *,
        check_text: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation by the chat template, up to where the assistant answers by default.

        Templates that do not know `tools` leave them out. `check_text` may refuse the rendered text.
        """
        options = options or ChatTemplateOptions()
        if not options.template:
            require_template(self.tokenizer, self.facts.source, tools=bool(tools))
        options = replace(options, variables={**self.template_variables, **options.variables})
        try:
            text = render_chat(self.tokenizer, messages, tools, options)
        except TEMPLATE_ERRORS as error:
            raise UserError(
                f"the chat template of {self.facts.source} refuses this conversation ({str(error)[:200]}); change the "
                "messages or what the template is given"
            ) from error
        if check_text is not None:
            check_text(text)
        # The template has written the special tokens.
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, without special ones unless they are asked for."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self) -> Callable[[Sequence[int], bool], str]:
        """Return `decode`, or the tokenizer's Rust function where transformers adds nothing: faster for short calls."""
        tokenizer, base = self.tokenizer, PreTrainedTokenizerFast
        lean = (
            isinstance(tokenizer, base)
            and type(tokenizer).decode is base.decode
            and type(tokenizer)._decode is base._decode
            and not tokenizer.clean_up_tokenization_spaces
        )
        if not lean:
            return self.decode
        decode = tokenizer.backend_tokenizer.decode
        return lambda ids, skip_special_tokens: decode(ids, skip_special_tokens=skip_special_tokens)

    def stop_ids(self) -> frozenset[int]:
        return _stop_ids(self.tokenizer, self.generation_config)


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedTarget(TargetText):
    """A target whose weights are in another server."""

    generation: GenerationConfig | None

    @property
    def generation_config(self) -> GenerationConfig | None:
        return self.generation

    @classmethod
    def load(
        cls,
        source: str,
        *,
        cache: Path | None = None,
        revision: str | None = None,
        chat_format: ChatFormat | None = None,
    ) -> "ServedTarget":
        chat_format = chat_format or ChatFormat()
        place = locate(source, cache=cache)
        hub = options_of(source, place, revision)
        return cls(
            facts=facts_of(read_config(source, place, hub), source),
            tokenizer=read_tokenizer(source, place, hub, chat_format),
            template_variables=dict(chat_format.variables),
            generation=_read_generation_config(place, hub),
        )


def load_tokenizer(
    source: str, *, cache: Path | None = None, chat_format: ChatFormat | None = None
) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """Return the tokenizer of `source` (see `locate`), with the run's chat format, and the ids that end an answer."""
    place = locate(source, cache=cache)
    hub = options_of(source, place)
    tokenizer = read_tokenizer(source, place, hub, chat_format or ChatFormat())
    return tokenizer, _stop_ids(tokenizer, _read_generation_config(place, hub))


def read_tokenizer(source: str, place: str, hub: Mapping[str, Any], chat_format: ChatFormat) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a target found at `place`, and set the run's chat template."""
    with explain_failures(source, place):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **hub)
    apply_format(tokenizer, chat_format)
    return tokenizer


def local_source(source: str, *, cache: Path | None = None) -> str:
    """Return a folder with the tokenizer of `source`, which was loaded before: other processes need no network."""
    from huggingface_hub import try_to_load_from_cache

    place = locate(source, cache=cache)
    if Path(place).is_dir():
        return place
    known = try_to_load_from_cache(place, "config.json")
    return str(Path(known).parent) if isinstance(known, str) else source


def bad_word_tokens(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words that an answer must not contain, each at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not bare:
            raise UserError(f"bad_words has {word!r}, which is no word; drop it")
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Sampling values for requests that leave them out; None leaves them to the API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def read_defaults(choice: str, own: GenerationConfig | None) -> SamplingDefaults:
    """Return the defaults as vLLM's option chooses: auto is the model's `own`, vllm is none, else a folder's file."""
    if choice == "vllm":
        return SamplingDefaults()
    config = own
    if choice != "auto":
        if not (Path(choice) / "generation_config.json").is_file():
            raise UserError(
                f"--generation-config {choice} is neither auto, nor vllm, nor a folder with a generation_config.json"
            )
        try:
            config = GenerationConfig.from_pretrained(choice)
        except (OSError, ValueError) as error:
            raise UserError(f"{choice}/generation_config.json cannot be read ({error}); fix it") from error
    if config is None:
        return SamplingDefaults()
    said = config.to_diff_dict()  # values that differ from the defaults of transformers
    if said.get("do_sample") and said.get("temperature") is None:
        said["temperature"] = 1.0  # the default of transformers with do_sample
    defaults = SamplingDefaults(**{field.name: said.get(field.name) for field in fields(SamplingDefaults)})
    sampling = defaults.given
    limit = sampling.pop("max_new_tokens", 1)
    try:  # fail at the start and not at the first request
        Sampling(**sampling)
        if not isinstance(limit, int) or limit < 1:
            raise UserError(f"max_new_tokens is {limit}; it must be 1 or more")
    except (UserError, TypeError) as error:
        raise UserError(
            f"the generation config ({choice}) holds a value that cannot be used: {error}; serve with "
            "--generation-config vllm to do without it"
        ) from error
    return defaults


def _read_generation_config(place: str, hub: Mapping[str, Any]) -> GenerationConfig | None:
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(place, **hub)
    except OSError:  # many targets ship none
        return None
    return config


def _stop_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Stop ids of the generation config, and the tokenizer's end of text."""
    configured = generation.eos_token_id if generation else None
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(k for k in (*several, tokenizer.eos_token_id) if k is not None)
