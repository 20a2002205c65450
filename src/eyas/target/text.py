"""How a target reads and writes: its tokenizer, chat template and stop tokens. Its weights may lie elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from eyas.errors import UserError
from eyas.target.chat_template import TEMPLATE_ERRORS, ChatFormat, ChatTemplateOptions, render_chat, require_template
from eyas.target.config import read_config
from eyas.target.facts import TargetFacts, facts_of
from eyas.target.locate import explain_failures, locate, options_of
from eyas.target.template_override import apply_format
from eyas.target.tokenizer import read_generation_config, stop_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetText(ABC):
    """A target between text and token ids."""

    facts: TargetFacts
    tokenizer: PreTrainedTokenizerBase
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for every conversation; a caller's own go over them."""

    @property
    @abstractmethod
    def generation_config(self) -> GenerationConfig | None:
        """What its makers recommend; None if they say nothing."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatTemplateOptions | None = None,
        *,
        check_text: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation in the target's own format, up to where the assistant answers.

        `tools` are told to a template that knows of them; the others leave them out. `options` may end it
        elsewhere.
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
        """Return the text of new tokens, without special ones unless they are asked for."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def decoder(self) -> Callable[[Sequence[int], bool], str]:
        """`decode` for very many short calls: the tokenizer's own code alone, where all around it changes nothing."""
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
        """Return the ids that end an answer: the generation config's and the tokenizer's end of text."""
        return stop_ids(self.tokenizer, self.generation_config)


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedTarget(TargetText):
    """A target whose weights a server holds."""

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
        """Read what `source` (see `locate`) says of itself beside its weights."""
        chat_format = chat_format or ChatFormat()
        place = locate(source, cache=cache)
        hub = options_of(source, place, revision)
        facts = facts_of(read_config(source, place, hub), source)
        with explain_failures(source, place):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **hub)
            apply_format(tokenizer, chat_format)
        return cls(
            facts=facts,
            tokenizer=tokenizer,
            template_variables=dict(chat_format.variables),
            generation=read_generation_config(place, hub),
        )
