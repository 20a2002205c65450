"""Tool calls as tags, with one tag for each argument: Qwen3-Coder and GLM 4.5.

Qwen3-Coder, parameters as bare text on lines of their own:
    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
GLM 4.5 and later, strings as bare text and other values as JSON:
    <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
"""

from collections.abc import Mapping, Sequence

from eyas.serve.parsers.arguments import ArgumentTypes, ArgumentWriter, parameter_rules
from eyas.serve.parsers.base import BLANK, AnswerParser, Markers, Steps, is_name
from eyas.serve.parsers.formats import ToolCallFormat, calls_grammar
from eyas.serve.protocol.completions import Tool

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_QWEN_BEGINNINGS = Markers(CALL, FUNCTION)
_FUNCTIONS = Markers(FUNCTION)
_NAME_ENDS = Markers(">")
_PARAMETERS = Markers(PARAMETER, FUNCTION_END, CALL_END)
_PARAMETER_ENDS = Markers(PARAMETER_END, PARAMETER, FUNCTION_END)
_GLM_BEGINNINGS = Markers(CALL)
_KEYS = Markers(KEY, CALL_END)
_KEY_ENDS = Markers(KEY_END)
_VALUES = Markers(VALUE, KEY, CALL_END)
_VALUE_ENDS = Markers(VALUE_END)


class TagParser(AnswerParser):
    """Parses one answer; writes the arguments of a call as JSON."""

    openings = (CALL,)
    newlines: bool
    """Whether a value stands on lines of its own."""

    def __init__(self, tools: Sequence[Tool], *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls)
        self._types = ArgumentTypes(tools)
        self._writer = ArgumentWriter("", self._types, newlines=self.newlines)

    def _begin(self, name: str) -> None:
        self._start_call(name)
        self._writer = ArgumentWriter(name, self._types, newlines=self.newlines)

    def _argument(self, key: str, ends: Markers) -> Steps[str]:
        """Write a value up to the marker that ends it, which is returned; "" if the answer ends within the value."""
        self._add_arguments(self._writer.open(key.strip(BLANK)))
        marker = yield from self._until(ends, lambda text: self._add_arguments(self._writer.add(text)))
        if marker:
            self._add_arguments(self._writer.close())
        return marker

    def _drop_until(self, markers: Markers) -> Steps[str]:
        return (yield from self._until(markers, lambda _: None))


class Qwen3CoderParser(TagParser):
    """Parses one answer. `<tool_call>` around a function may be missing, as may the end of a parameter."""

    newlines = True

    def _parse(self) -> Steps[None]:
        while raw := (yield from self._pass_text(_QWEN_BEGINNINGS)):
            if raw == CALL:
                blanks, function = yield from self._header(_FUNCTIONS)
                if not function or blanks.strip(BLANK):
                    self._unread(blanks, function)
                    self._emit_text(raw, hold=True)
                    continue
                raw += blanks + function
            while raw:
                raw = yield from self._function(raw)

    def _function(self, raw: str) -> Steps[str]:
        """Read a function behind its opening, `raw`. Returns the opening of the next function, or ""."""
        name, marker = yield from self._header(_NAME_ENDS)
        if not marker or not is_name(name.strip(BLANK)):
            self._unread(name, marker)
            self._emit_text(raw, hold=True)
            return ""
        self._begin(name.strip(BLANK))
        marker = yield from self._drop_until(_PARAMETERS)
        while marker == PARAMETER:
            key = yield from self._collect(_NAME_ENDS)
            if key is None or not (marker := (yield from self._argument(key, _PARAMETER_ENDS))):
                return ""
            if marker == PARAMETER_END:
                marker = yield from self._drop_until(_PARAMETERS)
        self._add_arguments(self._writer.end())  # also where the answer ends between two parameters
        if marker == CALL_END:
            self._unread(marker)
        if not (yield from self._skip(BLANK)):
            return ""
        found = yield from self._take(CALL_END, FUNCTION)
        if not found and self._last and CALL_END.startswith(self._text[self._at :]):
            self._at = len(self._text)  # the answer ended within its closing marker
        return found if found == FUNCTION else ""


class Glm45Parser(TagParser):
    """Parses one answer."""

    newlines = False

    def _parse(self) -> Steps[None]:
        while (yield from self._pass_text(_GLM_BEGINNINGS)):
            name, marker = yield from self._header(_KEYS)
            if not marker or not is_name(name.strip(BLANK)):
                self._unread(name, marker)
                self._emit_text(CALL, hold=True)
                continue
            self._begin(name.strip(BLANK))
            while marker == KEY:
                key = yield from self._collect(_KEY_ENDS)
                if key is None or not (marker := (yield from self._drop_until(_VALUES))):
                    return
                if marker == VALUE:  # a key without a value is dropped
                    if not (yield from self._argument(key, _VALUE_ENDS)):
                        return
                    marker = yield from self._drop_until(_KEYS)
            self._add_arguments(self._writer.end())


class TagFormat(ToolCallFormat):
    """Tool calls as tags. In the texts around functions and values, {} stands for the name."""

    parser: type[TagParser]
    around_call: tuple[str, str]
    around_function: tuple[str, str]
    around_value: tuple[str, str]

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> TagParser:
        return self.parser(tools, max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        functions = [
            parameter_rules(tool, number, self.around_function, self.around_value, special_tokens)
            for number, tool in enumerate(tools)
        ]
        return calls_grammar(
            functions, parallel=parallel, special_tokens=special_tokens, around_each=self.around_call, separator="\n"
        )


class Qwen3CoderFormat(TagFormat):
    """Qwen3-Coder."""

    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    template_markers = (CALL, FUNCTION)
    markers = (CALL, CALL_END)
    parser = Qwen3CoderParser
    around_call = (f"{CALL}\n", f"\n{CALL_END}")
    around_function = (FUNCTION + "{}>\n", FUNCTION_END)
    around_value = (PARAMETER + "{}>\n", f"\n{PARAMETER_END}\n")


class Glm45Format(TagFormat):
    """GLM 4.5 and later."""

    name = "glm45"
    aliases = ("glm47", "glm")
    template_markers = (CALL, KEY)
    markers = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    parser = Glm45Parser
    around_call = (CALL, CALL_END)
    around_function = ("{}\n", "")
    around_value = (KEY + "{}" + f"{KEY_END}\n{VALUE}", f"{VALUE_END}\n")
