"""Tool calls between special markers, with the arguments as plain JSON: DeepSeek and Kimi K2.

DeepSeek V3, R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
DeepSeek V3.1:   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
Kimi K2:         <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

All calls of an answer stand in a section with markers of its own.
"""

import re
from collections.abc import Mapping, Sequence

from eyas.serve.parsers.base import BLANK, AnswerParser, Markers, Steps, is_name
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar, json_rule, literal, parameters_of
from eyas.serve.protocol.completions import Tool

DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI_MARKERS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
FENCE = "```"
_KIMI_HEADER = re.compile(r"(?:functions\.)?(.+?):\d+", re.ASCII)
_DEEPSEEK_NAME_ENDS = Markers("{", *DEEPSEEK_MARKERS)


class DelimitedCallParser(AnswerParser):
    """Parses one answer. The header of a call, before the separator, is the function's name."""

    def __init__(self, markers: tuple[str, str, str, str, str], *, max_calls: int | None) -> None:
        section_begin, self._call_begin, self._separator, *_ = markers
        self.openings = (section_begin, self._call_begin)
        self._markers = Markers(*markers)
        super().__init__(max_calls=max_calls)

    def _parse(self) -> Steps[None]:
        # Markers out of place are dropped: they are no text of the model's.
        while marker := (yield from self._pass_text(self._markers)):
            while marker == self._call_begin:  # again, where the end of a call is missing
                marker = yield from self._one_call()

    def _one_call(self) -> Steps[str]:
        """Read a call up to the marker that ends it, which is returned; "" if this is text and no call."""
        header, marker = yield from self._header(self._markers)
        named = self._named(header) if marker else None
        if named is None:
            self._unread(header, marker)
            return ""
        self._start_call(*named)
        if marker == self._separator:
            return (yield from self._pass_arguments(self._markers))
        self._add_arguments("{}")
        return marker

    def _named(self, header: str) -> tuple[str, str | None] | None:
        """The function's name and the call's id, if the format has one; None if this is no header."""
        name = header.strip(BLANK)
        return (name, None) if is_name(name) else None


class KimiK2Parser(DelimitedCallParser):
    """Parses one answer. The id is kept: the template shows it to the model with the result."""

    def _named(self, header: str) -> tuple[str, str | None] | None:
        call_id = header.strip(BLANK)
        found = _KIMI_HEADER.fullmatch(call_id)
        return (found.group(1), call_id) if found is not None and is_name(found.group(1)) else None


class DeepSeekV3Parser(DelimitedCallParser):
    """Parses one answer of V3: the header is the kind of tool, the name is the line behind the separator."""

    def _one_call(self) -> Steps[str]:
        header, marker = yield from self._header(self._markers)
        if marker != self._separator:
            self._unread(header, marker)
            return ""
        # The line with the name, and the fence that opens the block, up to the brace of the arguments.
        header, marker = yield from self._header(_DEEPSEEK_NAME_ENDS)
        name, _, fence = header.strip(BLANK).partition("\n")
        name = name.rstrip(BLANK)
        if not marker or not is_name(name) or fence.strip(BLANK + "`") not in ("", "json"):
            self._unread(header, marker)
            return ""
        self._start_call(name)
        if marker != "{":
            self._add_arguments("{}")
            return marker
        self._unread(marker)
        return (yield from self._pass_arguments(self._markers, FENCE))


class DelimitedFormat(ToolCallFormat):
    """Tool calls between markers."""

    markers: tuple[str, str, str, str, str]
    """Begin of all calls, begin of a call, separator, end of a call, end of all calls."""

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> DelimitedCallParser:
        return DelimitedCallParser(self.markers, max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        section_begin, call_begin, _, call_end, section_end = self.markers
        return calls_grammar(
            [self._function_rule(tool, special_tokens) for tool in tools],
            parallel=parallel,
            special_tokens=special_tokens,
            around_all=(section_begin, section_end),
            around_each=(call_begin, call_end),
        )

    def _function_rule(self, tool: Tool, special_tokens: Mapping[str, int]) -> str:
        return f"{literal(tool.function.name + self.markers[2], special_tokens)} {json_rule(parameters_of(tool))}"


class DeepSeekV31Format(DelimitedFormat):
    """DeepSeek V3.1."""

    name = "deepseek_v31"
    template_markers = (DEEPSEEK_MARKERS[2],)
    markers = DEEPSEEK_MARKERS


class DeepSeekV3Format(DelimitedFormat):
    """DeepSeek V3 and R1."""

    name = "deepseek_v3"
    template_markers = (DEEPSEEK_MARKERS[2], f"{FENCE}json")
    markers = DEEPSEEK_MARKERS

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> DelimitedCallParser:
        return DeepSeekV3Parser(self.markers, max_calls=max_calls)

    def _function_rule(self, tool: Tool, special_tokens: Mapping[str, int]) -> str:
        begin = literal(f"function{self.markers[2]}{tool.function.name}\n{FENCE}json\n", special_tokens)
        end = literal(f"\n{FENCE}", special_tokens)
        return f"{begin} {json_rule(parameters_of(tool))} {end}"


class KimiK2Format(DelimitedFormat):
    """Kimi K2: each call has the id that the model gave it, which holds the function's name."""

    name = "kimi_k2"
    template_markers = (KIMI_MARKERS[2],)
    markers = KIMI_MARKERS

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> DelimitedCallParser:
        return KimiK2Parser(self.markers, max_calls=max_calls)

    def _function_rule(self, tool: Tool, special_tokens: Mapping[str, int]) -> str:
        begin = literal(f"functions.{tool.function.name}:", special_tokens)
        separator = literal(self.markers[2], special_tokens)
        return f"{begin} /[0-9]{{1,3}}/ {separator} {json_rule(parameters_of(tool))}"
