"""Kimi K2: a section of calls, each with the id that the model gave it, which holds the function's name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>
"""

import re
from collections.abc import Mapping, Sequence

from eyas.serve.parsers.base import BLANK, is_name
from eyas.serve.parsers.delimited import CallMarkers, DelimitedCallParser
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar, json_rule, literal, parameters_of
from eyas.serve.protocol.completions import Tool

MARKERS = CallMarkers(
    section_begin="<|tool_calls_section_begin|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
)
_HEADER = re.compile(r"(?:functions\.)?(.+?):\d+", re.ASCII)


class KimiK2Parser(DelimitedCallParser):
    """Parses one answer."""

    def named(self, header: str) -> tuple[str, str | None] | None:
        """Name and id. The id is kept: the template shows it to the model with the result."""
        call_id = header.strip(BLANK)
        found = _HEADER.fullmatch(call_id)
        return (found.group(1), call_id) if found is not None and is_name(found.group(1)) else None


class KimiK2Format(ToolCallFormat):
    """See the module."""

    name = "kimi_k2"
    template_markers = (MARKERS.separator,)
    markers = MARKERS.all

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> KimiK2Parser:
        """See `ToolCallFormat`."""
        return KimiK2Parser(MARKERS, max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`."""
        functions = []
        for tool in tools:
            begin = literal(f"functions.{tool.function.name}:", special_tokens)
            separator = literal(MARKERS.separator, special_tokens)
            functions.append(f"{begin} /[0-9]{{1,3}}/ {separator} {json_rule(parameters_of(tool))}")
        return calls_grammar(
            functions,
            parallel=parallel,
            special_tokens=special_tokens,
            around_all=(MARKERS.section_begin, MARKERS.section_end),
            around_each=(MARKERS.call_begin, MARKERS.call_end),
        )
