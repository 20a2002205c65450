"""How a conversation is rendered: the template's own variables, and where the rendered text ends."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What a template raises over a conversation or over variables that it cannot use."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """What a caller may decide about the rendering of a conversation."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template sees beside the messages and tools, such as enable_thinking."""
    template: str | None = None
    """Another template than the target's own."""
    add_generation_prompt: bool = True
    """End where the assistant answers."""
    continue_final_message: bool = False
    """End inside the last message, so that the answer continues it."""


def reserved_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that are no variables of a caller: they decide how the template is called, or are special tokens."""
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(own) | {"messages"} | frozenset(tokenizer.special_tokens_map)
