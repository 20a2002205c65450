"""Qwen3-Coder: calls as tags, parameters as bare text on lines of their own.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from collections.abc import Mapping, Sequence

from eyas.serve.parsers.base import BLANK, Markers, ToolParser, is_name
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar
from eyas.serve.parsers.parameter_grammar import parameter_rules
from eyas.serve.parsers.typed_arguments import ArgumentTypes, ArgumentWriter
from eyas.serve.protocol.completions import Tool

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_BEGINNINGS = Markers(CALL, FUNCTION)
_FUNCTIONS = Markers(FUNCTION)
_NAME_ENDS = Markers(">")
_PARAMETERS = Markers(PARAMETER, FUNCTION_END, CALL_END)
_VALUE_ENDS = Markers(PARAMETER_END, PARAMETER, FUNCTION_END)


class Qwen3CoderParser(ToolParser):
    """Parses one answer. `<tool_call>` around a function may be missing, as may the end of a parameter."""

    openings = (CALL,)

    def __init__(self, types: ArgumentTypes, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self._types = types
        self._writer = ArgumentWriter("", types, newlines=True)
        self._raw = ""
        """What was read of a call without its name, to be shown if it is none."""
        self._name: list[str] = []

    def _start(self) -> bool:
        marker = self._pass_text(_BEGINNINGS)
        if marker is None:
            return False
        self._raw, self._state = marker, self._in_name if marker == FUNCTION else self._behind_opening
        return True

    def _behind_opening(self) -> bool:
        """`<tool_call>` was read: a function must follow."""
        before = self._at
        taken = self._take_header(_FUNCTIONS)
        if taken is None:
            return False
        blanks, marker = taken
        if not marker or blanks.strip(BLANK):
            self._no_call(before)
        else:
            self._raw, self._state = self._raw + blanks + marker, self._in_name
        return True

    def _in_name(self) -> bool:
        before = self._at
        taken = self._take_header(_NAME_ENDS)
        if taken is None:
            return False
        name, marker = taken[0].strip(BLANK), taken[1]
        if not marker or not is_name(name):
            self._no_call(before)
            return True
        self._start_call(name)
        self._writer = ArgumentWriter(name, self._types, newlines=True)
        self._state = self._between_parameters
        return True

    def _no_call(self, behind: int) -> None:
        """What was read is text, and what follows it is to be read as such."""
        self._emit_text(self._raw, hold=True)
        self._at, self._state = behind, self._start

    def _between_parameters(self) -> bool:
        _, marker = self._take_until(_PARAMETERS)
        if marker is None:
            return False
        if marker == PARAMETER:
            self._name = []
            self._state = self._in_parameter_name
            return True
        self._add_arguments(self._writer.end())
        self._at -= len(marker) if marker == CALL_END else 0
        self._state = self._behind_function
        return True

    def _in_parameter_name(self) -> bool:
        before, marker = self._take_until(_NAME_ENDS)
        self._name.append(before)
        if marker is None:
            return False
        self._add_arguments(self._writer.open("".join(self._name).strip(BLANK)))
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        before, marker = self._take_until(_VALUE_ENDS)
        self._add_arguments(self._writer.add(before))
        if marker is None:
            return False
        self._add_arguments(self._writer.close())
        self._at -= len(marker) if marker != PARAMETER_END else 0
        self._state = self._between_parameters
        return True

    def _behind_function(self) -> bool:
        """`</function>` was read: the end of the call or another function follows, else text."""
        if not self._skip(BLANK):
            return False
        found = self._next_is(CALL_END, FUNCTION)
        if found is None:
            return False
        self._at += len(found)
        self._raw, self._state = found, self._in_name if found == FUNCTION else self._start
        if not found and self._last and CALL_END.startswith(self._text[self._at :]):
            self._at = len(self._text)  # the answer ended within its closing marker
        return True

    def _finish(self) -> None:
        if self._state == self._between_parameters:  # all values are whole, the end alone is missing
            self._add_arguments(self._writer.end())
        super()._finish()


class Qwen3CoderFormat(ToolCallFormat):
    """See the module."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    template_markers = (CALL, FUNCTION)
    markers = (CALL, CALL_END)

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> Qwen3CoderParser:
        """See `ToolCallFormat`."""
        return Qwen3CoderParser(ArgumentTypes(tools), max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`."""
        return calls_grammar(
            [
                parameter_rules(
                    tool,
                    number,
                    before_all=f"{FUNCTION}{tool.function.name}>\n",
                    before=lambda key: f"{PARAMETER}{key}>\n",
                    behind=f"\n{PARAMETER_END}\n",
                    behind_all=FUNCTION_END,
                )
                for number, tool in enumerate(tools)
            ],
            parallel=parallel,
            special_tokens=special_tokens,
            around_each=(f"{CALL}\n", f"\n{CALL_END}"),
            separator="\n",
        )
