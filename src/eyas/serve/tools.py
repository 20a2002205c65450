"""Tool calling in the target's own format: parse its calls and, where required, enforce them by a grammar.

    hermes       <tool_call> JSON </tool_call>, as Hermes and Qwen templates ask for
    llama3_json  JSON alone, calls set apart by semicolons, as Llama 3 templates ask for
    mistral      [TOOL_CALLS] and a list of JSON

Names are vLLM's parsers. The format is detected from the chat template, or set by the operator.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eyas.engine.grammar.llguidance import ON_ONE_LINE
from eyas.errors import UserError
from eyas.serve.api_error import ApiError
from eyas.serve.protocol import ChatCompletionRequest, Tool
from eyas.serve.structured_outputs import GrammarSpec
from eyas.serve.tool_parser import BLANK, ToolCallParser, mistral_call_id, openai_call_id
from eyas.target.model import Target

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """How a target writes tool calls."""

    name: str
    template_markers: tuple[str, ...]
    """A chat template that contains all of them uses this format."""
    opening: str
    closing: str = ""
    skipped: str = BLANK
    arguments: str = "arguments"
    around_all: tuple[str, str] = ("", "")
    """Text around all calls together."""
    around_each: tuple[str, str] = ("", "")
    """Text around each call."""
    separator: str
    """Text between two calls."""
    short_ids: bool = False

    def new_parser(self, *, max_calls: int | None) -> ToolCallParser:
        """A parser of one answer that keeps at most `max_calls` calls."""
        return ToolCallParser(
            opening=self.opening,
            closing=self.closing,
            skipped=self.skipped,
            max_calls=max_calls,
            new_id=mistral_call_id if self.short_ids else openai_call_id,
        )

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: dict[str, int]) -> str:
        """A Lark grammar of one call, or with `parallel` one or more calls, of these functions."""
        begin, end = (_literal(text, special_tokens) for text in self.around_all)
        before, after = (_literal(text, special_tokens) for text in self.around_each)
        more = f"({_literal(self.separator, special_tokens)} call)*" if parallel else ""
        rules = [f"start: {begin} call {more} {end}", f"call: {before} function {after}"]
        rules.append("function: " + " | ".join(f"f{number}" for number in range(len(tools))))
        rules += [f"f{number}: %json {json.dumps(self._schema(tool))}" for number, tool in enumerate(tools)]
        return "\n".join(rules)

    def _schema(self, tool: Tool) -> dict[str, Any]:
        given = dict(tool.function.parameters or NO_PARAMETERS)
        # $ref in a function's parameters starts at their root, which is this schema now.
        shared = {key: given.pop(key) for key in ("$defs", "definitions") if key in given}
        return shared | {
            "x-guidance": ON_ONE_LINE,
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, self.arguments: given},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


TOOL_CALL_FORMATS = (
    ToolCallFormat(
        name="hermes",
        template_markers=("<tool_call>",),
        opening="<tool_call>",
        closing="</tool_call>",
        around_each=("<tool_call>\n", "\n</tool_call>"),
        separator="\n",
    ),
    ToolCallFormat(
        name="mistral",
        template_markers=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS]",
        skipped=BLANK + "[],",
        around_all=("[TOOL_CALLS][", "]"),
        separator=", ",
        short_ids=True,
    ),
    ToolCallFormat(
        name="llama3_json",
        template_markers=('"parameters"', "ipython"),
        opening="{",
        skipped=BLANK + ";",
        arguments="parameters",
        separator="; ",
    ),
)
PARSERS = tuple(format_.name for format_ in TOOL_CALL_FORMATS)


class ToolSupport:
    """What one target supports of tool calling."""

    def __init__(self, target: Target, parser: str | None) -> None:
        self._name = target.facts.source
        template = _template(target)
        self._knows_tools = "tools" in template
        by_name = {format_.name: format_ for format_ in TOOL_CALL_FORMATS}
        if parser is not None and parser not in by_name:
            raise UserError(f"tool-call parser {parser!r} is unknown; use one of {', '.join(PARSERS)}")
        seen = (format_ for format_ in TOOL_CALL_FORMATS if all(sign in template for sign in format_.template_markers))
        self.format = by_name[parser] if parser is not None else next(seen, None)
        special_tokens = (self.format.opening, self.format.closing) if self.format is not None else ()
        added = getattr(target.tokenizer, "added_tokens_decoder", {})
        self.special_tokens = {
            token.content: id_ for id_, token in added.items() if token.special and token.content in special_tokens
        }
        """Markers that are special tokens, by their text."""

    def require(self, field: str, fix: str) -> ToolCallFormat:
        """The format, or an error for the field that needs one."""
        if not self._knows_tools:
            message = f"the chat template of {self._name} does not mention tools; {fix}"
            raise ApiError(400, f"{field}: {message}", field=field, code="unsupported_parameter")
        if self.format is None:
            message = f"how {self._name} writes calls is not known; serve it with --tool-call-parser, or {fix}"
            raise ApiError(400, f"{field}: {message}", field=field, code="unsupported_parameter")
        return self.format

    def offered(self, body: ChatCompletionRequest) -> list[Tool]:
        """The tools that go into the prompt: those that the model may call."""
        if not body.tools:
            if body.tool_choice not in (None, "none", "auto"):
                raise ApiError(
                    400, "tool_choice asks for a call and there are no tools; give some", field="tool_choice"
                )
            return []
        self.require("tools", "leave them out or serve another model")
        names = [tool.function.name for tool in body.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(400, f"tools has two functions called {twice!r}; rename one", field="tools")
        chosen = _chosen(body)
        if chosen is not None and chosen not in names:
            raise ApiError(
                400, f"tool_choice names {chosen!r}; there are {', '.join(names)}", field="tool_choice.function.name"
            )
        return [] if body.tool_choice == "none" else body.tools

    def grammar_spec(self, body: ChatCompletionRequest) -> GrammarSpec | None:
        """The grammar of the calls, if tool_choice requires one."""
        tools, chosen = self.offered(body), _chosen(body)
        if not tools or (chosen is None and body.tool_choice != "required"):
            return None
        called = [tool for tool in tools if chosen in (None, tool.function.name)]
        parallel = body.parallel_tool_calls and chosen is None
        text = self.require("tools", "").lark_grammar(called, parallel=parallel, special_tokens=self.special_tokens)
        return GrammarSpec(field="tools", kind="lark", text=text)

    def new_parser(self, body: ChatCompletionRequest) -> "partial[ToolCallParser] | None":
        """Creates parsers for the answers; None if there are no tools to call."""
        if not self.offered(body) or self.format is None:
            return None
        return partial(self.format.new_parser, max_calls=None if body.parallel_tool_calls else 1)


def _chosen(body: ChatCompletionRequest) -> str | None:
    """The function that tool_choice names, if any."""
    choice = body.tool_choice
    return None if choice is None or isinstance(choice, str) else choice.function.name


def _template(target: Target) -> str:
    """The chat template for conversations with tools."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return ""
    return str(tokenizer.get_chat_template(tools=[{}]))


def _literal(text: str, special_tokens: dict[str, int]) -> str:
    """Text as Lark literals, with special tokens by id."""
    for mark, token in special_tokens.items():
        before, found, behind = text.partition(mark)
        if found:
            return f"{_literal(before, special_tokens)} <[{token}]> {_literal(behind, special_tokens)}"
    return json.dumps(text) if text else ""
