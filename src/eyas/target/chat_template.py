"""How a conversation is rendered: by which template, with which variables, and where the rendered text ends."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.errors import UserError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What a template raises over a conversation or over variables that it cannot use."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What a whole run decides about the rendering of conversations; by default all of it is the target's."""

    template: str | None = None
    """Another template than the target's own, as text."""
    raw: bool = False
    """Plain text in, continuation out: the built-in template for targets that have none (`raw_template`)."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` of the run; those of a request or a record go over them."""

    def __post_init__(self) -> None:
        if self.raw and self.template is not None:
            raise UserError("--raw and --chat-template are two ways to write a conversation; give one of them")


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


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under all the names that templates know it by."""
    rendered = dict(message)
    text = next((rendered[name] for name in REASONING_NAMES if isinstance(rendered.get(name), str)), None)
    if text is None:
        return rendered
    rendered |= dict.fromkeys(REASONING_NAMES, text)
    if rendered.get("content") and rendered.get("tool_calls"):
        del rendered["thinking"]  # gpt-oss refuses it beside both
    return rendered


def reserved_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that are no variables of a caller: they decide how the template is called, or are special tokens."""
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(own) | {"messages"} | frozenset(tokenizer.special_tokens_map)


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], where: str) -> None:
    """Refuse variables that are not the template's to choose, as the server refuses them."""
    for name in sorted(reserved_variables(tokenizer).intersection(variables)):
        raise UserError(f"{where}: chat_template_kwargs has {name!r}, which is not the template's to choose; remove it")


def require_template(tokenizer: PreTrainedTokenizerBase, source: str, *, tools: bool = False) -> None:
    """Refuse a target that does not say how conversations are written, before anything is asked of it."""
    named: Any = tokenizer.chat_template
    if isinstance(named, Mapping) and named and "default" not in named and not (tools and "tool_use" in named):
        raise UserError(
            f"{source} has chat templates named {', '.join(sorted(named))} and none of them is the default; pass the "
            "one to use as --chat-template FILE ([target] chat_template in a recipe)"
        )
    if not tokenizer.chat_template:
        raise UserError(
            f"{source} has no chat template, like most base models; pass --raw for plain text in and its continuation "
            "out, or --chat-template FILE to say how conversations are written ([target] raw or chat_template in a "
            "recipe)"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: ChatTemplateOptions,
) -> str:
    """The text of a conversation, which servers and training read alike; raises `TEMPLATE_ERRORS`.

    Arguments of calls are objects; templates that put them into their text as they are get them as JSON.
    """
    try:
        return _rendered(tokenizer, messages, tools, options)
    except TypeError:
        as_text = [_arguments_as_text(message) for message in messages]
        if as_text == list(messages):
            raise
    return _rendered(tokenizer, as_text, tools, options)


def _arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON."""
    rendered = dict(message)
    if isinstance(calls := rendered.get("tool_calls"), list | tuple):
        rendered["tool_calls"] = [_call_as_text(call) for call in calls]
    return rendered


def _call_as_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: ChatTemplateOptions,
) -> str:
    def rendered(tools: list[Any] | None) -> str:
        return str(
            tokenizer.apply_chat_template(
                [template_message(message) for message in messages],
                tools=tools,
                chat_template=options.template,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tokenize=False,
                **options.variables,
            )
        )

    if tools is not None:
        return rendered([dict(tool) for tool in tools])
    try:
        return rendered(None)
    except TypeError:  # templates that were made for tools walk through them without asking whether there are any
        return rendered([])
