"""Chat templates: how a conversation is rendered, and which template and variables a run uses.

`--chat-template` replaces the target's template and `--raw` uses `RAW_TEMPLATE` (plain text in, its continuation out).
Every template runs in transformers' sandbox.
"""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.errors import UserError

logger = logging.getLogger(__name__)

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions that a template raises for a conversation or variables that it cannot use."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

RAW_TEMPLATE = """
{%- macro text_of(message) -%}
{%- if message.tool_calls %}{{ raise_exception('plain text has no place for tool calls') }}{% endif -%}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part if part is string else part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- PREFIX -}}
{%- for message in messages -%}
{%- if not loop.first and message.role != 'assistant' %}{{ '\\n' }}{% endif -%}
{{- text_of(message) -}}
{%- if loop.last and message.role == 'assistant' and not add_generation_prompt %}{{ eos_token }}{% endif -%}
{%- endfor -%}"""
"""Contents joined as plain text. Messages that are not the assistant's begin a new line; the assistant's continue the
text, and end it if they are last. PREFIX is what this tokenizer puts before plain text."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a whole run renders conversations; by default as the target's tokenizer does."""

    template: str | None = None
    """Text of a template that replaces the target's own."""
    raw: bool = False
    """Use `RAW_TEMPLATE`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs` of the run; those of a request or a record override them."""

    def __post_init__(self) -> None:
        if self.raw and self.template is not None:
            raise UserError("--raw and --chat-template are two ways to write a conversation; give one of them")


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """How one conversation is rendered."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """Template variables beside messages and tools, such as enable_thinking."""
    template: str | None = None
    """A template that replaces the target's own."""
    add_generation_prompt: bool = True
    """End where the assistant answers."""
    continue_final_message: bool = False
    """End inside the last message, so that the answer continues it."""


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under every name that templates use for it."""
    rendered = dict(message)
    text = next((rendered[name] for name in REASONING_NAMES if isinstance(rendered.get(name), str)), None)
    if text is None:
        return rendered
    rendered |= dict.fromkeys(REASONING_NAMES, text)
    if rendered.get("content") and rendered.get("tool_calls"):
        del rendered["thinking"]  # gpt-oss refuses it beside both
    return rendered


def reserved_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that callers cannot set: arguments of `apply_chat_template`, and special tokens."""
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(own) | {"messages"} | frozenset(tokenizer.special_tokens_map)


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], where: str) -> None:
    """Refuse reserved variables."""
    for name in sorted(reserved_variables(tokenizer).intersection(variables)):
        raise UserError(f"{where}: chat_template_kwargs has {name!r}, which is not the template's to choose; remove it")


def require_template(tokenizer: PreTrainedTokenizerBase, source: str, *, tools: bool = False) -> None:
    """Refuse a target without a usable chat template."""
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
    """Render a conversation for serving or training; raises `TEMPLATE_ERRORS`.

    Arguments of tool calls are objects; a template that needs them as text gets them as JSON.
    """
    try:
        return _rendered(tokenizer, messages, tools, options)
    except TypeError:
        as_text = [_arguments_as_text(message) for message in messages]
        if as_text == list(messages):
            raise
    return _rendered(tokenizer, as_text, tools, options)


def _arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
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
    except TypeError:  # some templates iterate over tools without asking whether there are any
        return rendered([])


def read_template(argument: str, *, option: str = "--chat-template") -> str:
    """Return the text of a template: the content of a file, or the argument itself if it is Jinja."""
    path = Path(argument).expanduser()
    inline = any(sign in argument for sign in ("{{", "{%", "\n"))
    try:
        if not inline or path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not inline:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"{option} {argument} cannot be read: {reason}; give a file, or a template itself, which holds "
                "{{ or {%"
            ) from error
    return argument


def read_chat_format(
    chat_template: str | None, kwargs: str | None, *, raw: bool, option: str = "--chat-template-kwargs"
) -> ChatFormat:
    """Read a template and its variables, which `option` gave as JSON."""
    variables: Any = {}
    if kwargs is not None:
        try:
            variables = json.loads(kwargs)
        except ValueError as error:
            raise UserError(f"{option} {kwargs!r} is not JSON ({error}); mend it") from error
        if not isinstance(variables, dict):
            raise UserError(f'{option} {kwargs!r} is no object; write {{"enable_thinking": false}}, say')
    template = None if chat_template is None else read_template(chat_template)
    return ChatFormat(template=template, raw=raw, variables=variables)


def set_template(tokenizer: PreTrainedTokenizerBase, template: str, variables: Mapping[str, Any] | None = None) -> None:
    """Give a tokenizer this chat template; a template that cannot render a single user message is refused."""
    tokenizer.chat_template = template
    trial = [{"role": "user", "content": "Hello"}]
    try:
        text = tokenizer.apply_chat_template(trial, tokenize=False, add_generation_prompt=True, **(variables or {}))
    except Exception as error:  # Jinja's own, and whatever its expressions may raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"the chat template that was given cannot write a user's message ({reason}); mend it"
        ) from error
    if trial[0]["content"] not in str(text):
        raise UserError("the chat template that was given leaves out what the user says; mend it")


def apply_format(tokenizer: PreTrainedTokenizerBase, chat_format: ChatFormat) -> None:
    """Set the tokenizer's template to the run's; variables are checked here, and passed by callers."""
    check_variables(tokenizer, chat_format.variables, "the run")
    if chat_format.raw:
        tokenizer.chat_template = RAW_TEMPLATE.replace("PREFIX", ascii(_raw_prefix(tokenizer)))
    elif chat_format.template is not None:
        set_template(tokenizer, chat_format.template, chat_format.variables)


def _raw_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that gives a raw prompt the ids that the tokenizer gives to plain text: often a BOS, or nothing.

    After a BOS some tokenizers leave out the space that they put before the first word; then the space is added here.
    """
    probe = "Hello there"
    plain: list[int] = tokenizer.encode(probe, add_special_tokens=False)
    whole: list[int] = tokenizer.encode(probe)
    # A tokenizer may also append an end of text; a text that is to be continued must not end with it.
    lead = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    bos = str(tokenizer.decode(whole[:lead])) if lead else ""
    for prefix in (bos, bos + " "):
        if tokenizer.encode(prefix + probe, add_special_tokens=False) == whole[:lead] + plain:
            return prefix
    logger.warning(f"the tokenizer of {tokenizer.name_or_path} does not read back its own beginning of text {bos!r}")
    return bos
