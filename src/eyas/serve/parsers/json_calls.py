"""Tool calls as JSON objects with a name and arguments: Hermes and Qwen, Mistral, Llama 3."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.serve.parsers.base import (
    BLANK,
    MAX_BLANKS,
    MAX_NAME,
    AnswerParser,
    Markers,
    Steps,
    openai_call_id,
    whole_characters,
)
from eyas.serve.parsers.formats import DEFINITIONS, ToolCallFormat, calls_grammar, json_rule, parameters_of
from eyas.serve.protocol.completions import Tool

ARGUMENTS = ("arguments", "parameters")
_IN_STRING = Markers('"', "\\")
_STRUCTURE = Markers(*'"{}[]:,')


def mistral_call_id() -> str:
    """Nine letters or digits: Mistral's templates accept nothing else."""
    return secrets.token_hex(5)[:9]


@dataclass(kw_only=True)
class JsonCallFormat(ToolCallFormat):
    """Calls as JSON objects."""

    name: str
    template_markers: tuple[str, ...]
    markers: tuple[str, ...] = ()
    opening: str = "{"
    """The text that begins calls; "{" if nothing but their brace does."""
    closing: str = ""
    skipped: str = BLANK
    """Characters between calls."""
    arguments: str = "arguments"
    around_all: tuple[str, str] = ("", "")
    around_each: tuple[str, str] = ("", "")
    separator: str
    new_id: Callable[[], str] = openai_call_id

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> "JsonCallParser":
        return JsonCallParser(self, max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        return calls_grammar(
            [json_rule(self._schema(tool)) for tool in tools],
            parallel=parallel,
            special_tokens=special_tokens,
            around_all=self.around_all,
            around_each=self.around_each,
            separator=self.separator,
        )

    def _schema(self, tool: Tool) -> dict[str, Any]:
        given = parameters_of(tool)
        # $ref in a function's parameters starts at their root, which is this schema now.
        shared = {key: given.pop(key) for key in DEFINITIONS if key in given}
        return shared | {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, self.arguments: given},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


HERMES = JsonCallFormat(
    name="hermes",
    template_markers=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
    opening="<tool_call>",
    closing="</tool_call>",
    around_each=("<tool_call>\n", "\n</tool_call>"),
    separator="\n",
)
MISTRAL = JsonCallFormat(
    name="mistral",
    template_markers=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]",),
    opening="[TOOL_CALLS]",
    skipped=BLANK + "[],",
    around_all=("[TOOL_CALLS][", "]"),
    separator=", ",
    new_id=mistral_call_id,
)
LLAMA3_JSON = JsonCallFormat(
    name="llama3_json",
    template_markers=('"parameters"', "ipython"),
    skipped=BLANK + ";",
    arguments="parameters",
    separator="; ",
)


class JsonCallParser(AnswerParser):
    """Parses one answer. A call without an opening, only with its brace, must come first."""

    def __init__(self, format_: JsonCallFormat, *, max_calls: int | None) -> None:
        super().__init__(max_calls=max_calls, new_id=format_.new_id)
        self._format = format_
        self._opening = "" if format_.opening == "{" else format_.opening
        self.openings = (self._opening,) if self._opening else ()

    def _parse(self) -> Steps[None]:
        if not self._opening:
            if (yield from self._begins_with("{")):
                self._blanks = ""
                yield from self._read_calls()
            yield from self._pass_rest()
            return
        markers = Markers(self._opening)
        while (yield from self._pass_text(markers)):
            yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        """The calls behind an opening, up to the closing marker or to text."""
        closing, opening = self._format.closing, self._opening
        while (yield from self._skip(self._format.skipped)):
            if self._text[self._at] != "{":
                closed = (yield from self._take(closing)) if closing else ""
                if self._last and closing.startswith(self._text[self._at :]):
                    self._at = len(self._text)  # the answer ended within its closing marker
                if not closed:
                    self._emit_text(opening)
                return
            text = yield from self._read_object()
            if text:
                self._emit_text(opening + text)
            if text or text is None:
                return
            opening = ""  # calls were read since

    def _read_object(self) -> Steps[str | None]:
        """Emit an object as a call. Its text if it is no call; None if the answer ended within the call."""
        parsed, is_call, depth = _CallObject(), False, 0
        is_ignored = self._max_calls is not None and len(self.calls) >= self._max_calls

        def emit(text: str) -> None:
            nonlocal is_call
            parsed.add(text)
            if parsed.name is None or not parsed.has_arguments or is_ignored:
                return
            if not is_call:
                is_call = True
                self._start_call(parsed.name)
            self._add_arguments(parsed.take_arguments())

        while sign := (yield from self._until(_STRUCTURE, emit)):
            depth += {"{": 1, "[": 1, "]": -1, "}": -1}.get(sign, 0)
            if sign == '"':
                parsed.add(sign)
                yield from self._read_string(emit)
            elif depth == 0 or (depth == 1 and (sign in ",{[" or (sign == ":" and parsed.key is None))):
                parsed.end_part(sign, last=depth == 0)
                if depth == 0:
                    emit("")
                    break
            else:
                parsed.add(sign)
        if not is_call and not is_ignored:
            return "".join(parsed.raw)
        return "" if sign else None

    def _read_string(self, emit: Callable[[str], None]) -> Steps[None]:
        while sign := (yield from self._until(_IN_STRING, emit)):
            emit(sign)
            if sign == '"':
                return
            if (yield from self._more()):  # an escaped character
                emit(self._text[self._at])
                self._at += 1


class _CallObject:
    """The name and the arguments of a JSON object that is read in pieces."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.raw: list[str] = []
        """All text of the object so far."""
        self.key: str | None = None
        self._part: list[str] = []
        """The key, name or arguments that are being read; the arguments only if they do not begin with a brace."""
        self._size, self._is_blank = 0, True
        """Characters of that part, and whether all are blanks."""
        self._streamed = False
        """Whether arguments that begin with a brace are being read."""
        self._ready: list[str] = []
        self._blanks = ""

    def take_arguments(self) -> str:
        """The new text of the arguments. Arguments written as a JSON string come only once they are complete."""
        taken, self._ready = "".join(self._ready), []
        return taken

    def add(self, text: str) -> None:
        """Add text of a key or a value, structure within values included."""
        self.raw.append(text)
        if text == "{" and self.key in ARGUMENTS and not self.has_arguments and self._is_blank:
            self._streamed = self.has_arguments = True
        if self._streamed:
            text = self._blanks + text
            end = max(len(text.rstrip(BLANK)), len(text) - MAX_BLANKS)
            self._ready.append(text[:end])
            self._blanks = text[end:]
        elif self.key in ARGUMENTS or self._size <= 8 * MAX_NAME:  # longer keys and other values are not needed
            self._part.append(text)
            self._size += len(text)
            self._is_blank = self._is_blank and not text.strip(BLANK)

    def end_part(self, sign: str, *, last: bool) -> None:
        """End a key or a value with this sign of the object's own; `last` if the object ends."""
        self.raw.append(sign)
        text, key = "".join(self._part).strip(BLANK), self.key
        self.key = None
        if sign == ":":
            name = _json_or_none(text)
            self.key = name if isinstance(name, str) else ""
        elif key == "name" and isinstance(name := _json_or_none(text), str) and name:
            self.name = whole_characters(name)
        elif key in ARGUMENTS and not self.has_arguments:
            value = _json_or_none(text) if text.startswith('"') else None
            self._ready.append(whole_characters(value) if isinstance(value, str) else text)
            self.has_arguments = bool(self._ready[-1])
        if last and not self.has_arguments:
            self._ready, self.has_arguments = ["{}"], True
        self._part, self._size, self._is_blank = [], 0, True
        self._streamed, self._blanks = False, ""


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
