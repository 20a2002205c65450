"""DeepSeek: a section of calls. V3 and R1 write the arguments as a block of Markdown, V3.1 as they are.

<｜tool▁calls▁begin｜>  calls  <｜tool▁calls▁end｜>
V3:   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from eyas.serve.parsers.base import BLANK, Markers, is_name
from eyas.serve.parsers.delimited import CallMarkers, DelimitedCallParser
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar, json_rule, literal, parameters_of
from eyas.serve.protocol.completions import Tool

MARKERS = CallMarkers(
    section_begin="<｜tool▁calls▁begin｜>",
    call_begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
)
FENCE = "```"


class DeepSeekV3Parser(DelimitedCallParser):
    """Parses one answer of V3: the header is the kind of tool, the name is the line behind the separator."""

    held = BLANK + "`"
    _name_ends = Markers("{", *MARKERS.all)

    def trimmed(self, end: str) -> str:
        """Without the closing fence."""
        return end.rstrip(BLANK).removesuffix(FENCE).rstrip(BLANK)

    def _in_header(self) -> bool:
        before = self._at
        taken = self._take_header(self._markers)
        if taken is None:
            return False
        self._state = self._in_name
        if taken[1] != self._marks.separator:
            self._at, self._state = before, self._start
        return True

    def _in_name(self) -> bool:
        """The line with the name, and the fence that opens the block, up to the brace of the arguments."""
        before = self._at
        taken = self._take_header(self._name_ends)
        if taken is None:
            return False
        header, marker = taken
        name, _, fence = header.strip(BLANK).partition("\n")
        name = name.rstrip(BLANK)
        if not marker or not is_name(name) or fence.strip(BLANK + "`") not in ("", "json"):
            self._at, self._state = before, self._start
            return True
        self._start_call(name)
        self._begin_arguments()
        if marker == "{":
            self._at -= 1
        else:
            self._end_call(marker)
        return True


class DeepSeekV3Format(ToolCallFormat):
    """V3 and R1."""

    name = "deepseek_v3"
    template_markers: ClassVar[tuple[str, ...]] = (MARKERS.separator, f"{FENCE}json")
    markers = MARKERS.all
    _around_arguments: ClassVar[tuple[str, str, str]] = (
        f"function{MARKERS.separator}",
        f"\n{FENCE}json\n",
        f"\n{FENCE}",
    )
    """In front of the name, in front of the arguments, and behind them."""

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> DelimitedCallParser:
        """See `ToolCallFormat`."""
        return DeepSeekV3Parser(MARKERS, max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`."""
        before, between, behind = self._around_arguments
        functions = [
            f"{literal(before + tool.function.name + between, special_tokens)} {json_rule(parameters_of(tool))} "
            f"{literal(behind, special_tokens)}"
            for tool in tools
        ]
        return calls_grammar(
            functions,
            parallel=parallel,
            special_tokens=special_tokens,
            around_all=(MARKERS.section_begin, MARKERS.section_end),
            around_each=(MARKERS.call_begin, MARKERS.call_end),
        )


class DeepSeekV31Format(DeepSeekV3Format):
    """V3.1."""

    name = "deepseek_v31"
    template_markers = (MARKERS.separator,)
    _around_arguments = ("", MARKERS.separator, "")

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> DelimitedCallParser:
        """See `ToolCallFormat`."""
        return DelimitedCallParser(MARKERS, max_calls=max_calls)
