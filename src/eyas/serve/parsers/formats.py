"""How a model writes tool calls: what a format must offer, and pieces of the grammars that enforce calls."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from eyas.grammar.compile import ON_ONE_LINE
from eyas.serve.parsers.base import ToolParser
from eyas.serve.protocol.completions import Tool

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""
DEFINITIONS = ("$defs", "definitions")


class ToolCallFormat(ABC):
    """One way to write tool calls. Names are vLLM's parsers."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    template_markers: ClassVar[tuple[str, ...]] = ()
    """A chat template that contains all of them uses this format; without any it is used only if named."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that may be special tokens, which an answer's text leaves out and a parser must see."""

    @abstractmethod
    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> ToolParser:
        """A parser of one answer that keeps at most `max_calls` calls of these functions."""

    @abstractmethod
    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """A Lark grammar of one call, or with `parallel` one or more calls, of these functions."""


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments."""
    return dict(tool.function.parameters or NO_PARAMETERS)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON on one line that keeps to a schema, as part of a Lark rule."""
    return f"%json {json.dumps({'x-guidance': ON_ONE_LINE} | dict(schema))}"


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Text as Lark literals, with special tokens by id."""
    for mark, token in special_tokens.items():
        before, found, behind = text.partition(mark)
        if found:
            return f"{literal(before, special_tokens)} <[{token}]> {literal(behind, special_tokens)}"
    return json.dumps(text, ensure_ascii=False) if text else ""


def free_text(rule: str, end: str, special_tokens: Mapping[str, int]) -> list[str]:
    """The rules of any text and the first `end` behind it."""
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
    """The grammar of calls, with these texts around all of them and around each, and between two.

    `functions` are one rule's right side each, behind which further rules may follow.
    """
    begin, end = (literal(text, special_tokens) for text in around_all)
    before, after = (literal(text, special_tokens) for text in around_each)
    more = f"({literal(separator, special_tokens)} call)*" if parallel else ""
    rules = [f"start: {begin} call {more} {end}", f"call: {before} function {after}"]
    rules.append("function: " + " | ".join(f"f{number}" for number in range(len(functions))))
    return "\n".join([*rules, *(f"f{number}: {function}" for number, function in enumerate(functions))])
