"""GLM 4.5 and later: the name, then keys and values in tags. Strings are bare text, other values JSON.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call>
"""

from collections.abc import Mapping, Sequence

from eyas.serve.parsers.base import BLANK, Markers, ToolParser, is_name
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar
from eyas.serve.parsers.parameter_grammar import parameter_rules
from eyas.serve.parsers.typed_arguments import ArgumentTypes, ArgumentWriter
from eyas.serve.protocol.completions import Tool

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_BEGINNINGS = Markers(CALL)
_KEYS = Markers(KEY, CALL_END)
_KEY_ENDS = Markers(KEY_END)
_VALUES = Markers(VALUE, KEY, CALL_END)
_VALUE_ENDS = Markers(VALUE_END)


class Glm45Parser(ToolParser):
    """Parses one answer."""

    openings = (CALL,)

    def __init__(self, types: ArgumentTypes, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self._types = types
        self._writer = ArgumentWriter("", types, newlines=False)
        self._key: list[str] = []

    def _start(self) -> bool:
        marker = self._pass_text(_BEGINNINGS)
        if marker is not None:
            self._state = self._in_name
        return marker is not None

    def _in_name(self) -> bool:
        before = self._at
        taken = self._take_header(_KEYS)
        if taken is None:
            return False
        name, marker = taken[0].strip(BLANK), taken[1]
        if marker and is_name(name):
            self._start_call(name)
            self._writer = ArgumentWriter(name, self._types, newlines=False)
            self._at -= len(marker)
            self._state = self._between_arguments
        else:
            self._emit_text(CALL, hold=True)
            self._at, self._state = before, self._start
        return True

    def _between_arguments(self) -> bool:
        _, marker = self._take_until(_KEYS)
        if marker is None:
            return False
        self._key = []
        self._state = self._in_key
        if marker == CALL_END:
            self._add_arguments(self._writer.end())
            self._state = self._start
        return True

    def _in_key(self) -> bool:
        before, marker = self._take_until(_KEY_ENDS)
        self._key.append(before)
        if marker is None:
            return False
        self._state = self._behind_key
        return True

    def _behind_key(self) -> bool:
        _, marker = self._take_until(_VALUES)
        if marker is None:
            return False
        if marker == VALUE:
            self._add_arguments(self._writer.open("".join(self._key).strip(BLANK)))
            self._state = self._in_value
        else:  # a key without a value is none
            self._at -= len(marker)
            self._state = self._between_arguments
        return True

    def _in_value(self) -> bool:
        before, marker = self._take_until(_VALUE_ENDS)
        self._add_arguments(self._writer.add(before))
        if marker is None:
            return False
        self._add_arguments(self._writer.close())
        self._state = self._between_arguments
        return True

    def _finish(self) -> None:
        if self._state == self._between_arguments:  # all values are whole, the end alone is missing
            self._add_arguments(self._writer.end())
        super()._finish()


class Glm45Format(ToolCallFormat):
    """See the module."""

    name = "glm45"
    aliases = ("glm47", "glm")
    template_markers = (CALL, KEY)
    markers = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> Glm45Parser:
        """See `ToolCallFormat`."""
        return Glm45Parser(ArgumentTypes(tools), max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`."""
        return calls_grammar(
            [
                parameter_rules(
                    tool,
                    number,
                    before_all=f"{tool.function.name}\n",
                    before=lambda key: f"{KEY}{key}{KEY_END}\n{VALUE}",
                    behind=f"{VALUE_END}\n",
                    behind_all="",
                    special_tokens=special_tokens,
                )
                for number, tool in enumerate(tools)
            ],
            parallel=parallel,
            special_tokens=special_tokens,
            around_each=(CALL, CALL_END),
            separator="\n",
        )
