"""The two seams for parsers, `ToolCallFormat` and `ReasoningFormat`, and pieces of grammars that enforce calls.

A new format is a module beside this one and a line in `registry.py`. Names are those of vLLM's parsers.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.grammar.compile import ON_ONE_LINE
from eyas.serve.parsers.base import AnswerParser
from eyas.serve.protocol.completions import Tool

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""
DEFINITIONS = ("$defs", "definitions")


class AnswerFormat(ABC):
    """A way to write tool calls or reasoning, and how it is found."""

    name: str
    aliases: tuple[str, ...] = ()
    template_markers: tuple[str, ...] = ()
    """A chat template that contains all of them uses this format; without any it is used only if named."""
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens: an answer's text leaves them out, and the parser must see them."""
    partner: str = ""
    """The name of the other format, if reasoning and tool calls can only be parsed together."""


class ToolCallFormat(AnswerFormat):
    """One way to write tool calls."""

    grammar_has_reasoning = False
    """Whether `lark_grammar` describes the whole answer, reasoning included."""

    @abstractmethod
    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> AnswerParser:
        """A parser of one answer that keeps at most `max_calls` calls of these functions."""

    @abstractmethod
    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """A Lark grammar of one call, or with `parallel` one or more calls, of these functions."""


@dataclass(frozen=True)
class ReasoningEnd:
    """Where the reasoning of an answer ends, so that a grammar applies from there on."""

    ends: tuple[str, ...]
    """Reasoning ends with any of these texts."""
    begin: str | None = None
    """The text that begins reasoning, if the answer may also come without any."""


class ReasoningFormat(AnswerFormat):
    """One way to write reasoning."""

    readable_as_content = True
    """Whether a template can take reasoning back as part of a message's text."""

    @abstractmethod
    def new_parser(self, prompt_end: str, tool_parser: AnswerParser | None) -> AnswerParser:
        """A parser of one answer to a prompt that ends like this; tool calls are parsed behind the reasoning."""

    @abstractmethod
    def reasoning_end(self, prompt_end: str) -> ReasoningEnd | None:
        """Where reasoning ends; None if the answer has none."""


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return dict(tool.function.parameters or NO_PARAMETERS)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON on one line that satisfies a schema, as part of a Lark rule."""
    return f"%json {json.dumps({'x-guidance': ON_ONE_LINE} | dict(schema))}"


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Text as Lark literals, with special tokens by id."""
    for mark, token in special_tokens.items():
        before, found, behind = text.partition(mark)
        if found:
            return f"{literal(before, special_tokens)} <[{token}]> {literal(behind, special_tokens)}"
    return json.dumps(text, ensure_ascii=False) if text else ""


def free_text(rule: str, end: str, special_tokens: Mapping[str, int]) -> list[str]:
    """The rules of any text up to and including the first `end`."""
    if any(end.startswith(mark) for mark in special_tokens):  # a special token is no text: nothing else ends it
        return [f"{rule}: {rule}_text {literal(end, special_tokens)}", f"{rule}_text: /(?s:.*)/"]
    return [f"{rule}[suffix={literal(end, {})}]: /(?s:.*)/"]


def calls_grammar(
    functions: Sequence[str],
    *,
    parallel: bool,
    special_tokens: Mapping[str, int],
    around_all: tuple[str, str] = ("", ""),
    around_each: tuple[str, str] = ("", ""),
    separator: str = "",
) -> str:
    """The grammar of calls, with texts around all of them, around each, and between two.

    `functions` are one rule's right side each, which further rules may follow.
    """
    begin, end = (literal(text, special_tokens) for text in around_all)
    before, after = (literal(text, special_tokens) for text in around_each)
    more = f"({literal(separator, special_tokens)} call)*" if parallel else ""
    rules = [f"start: {begin} call {more} {end}", f"call: {before} function {after}"]
    rules.append("function: " + " | ".join(f"f{number}" for number in range(len(functions))))
    return "\n".join([*rules, *(f"f{number}: {function}" for number, function in enumerate(functions))])
