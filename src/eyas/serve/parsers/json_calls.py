"""Calls that are JSON objects with a name and arguments: what hermes, llama3_json and mistral have in common."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, MAX_NAME, Markers, ToolParser, openai_call_id, whole_characters
from eyas.serve.parsers.formats import DEFINITIONS, ToolCallFormat, calls_grammar, json_rule, parameters_of
from eyas.serve.protocol.completions import Tool

ARGUMENTS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]:,]')


class JsonCallFormat(ToolCallFormat):
    """Calls as JSON objects."""

    opening: ClassVar[str]
    """What begins calls; "{" if nothing but their brace does."""
    closing: ClassVar[str] = ""
    skipped: ClassVar[str] = BLANK
    """Characters between calls."""
    arguments: ClassVar[str] = "arguments"
    around_all: ClassVar[tuple[str, str]] = ("", "")
    around_each: ClassVar[tuple[str, str]] = ("", "")
    separator: ClassVar[str]

    def new_id(self) -> str:
        """An id for a call."""
        return openai_call_id()

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> "JsonCallParser":
        """See `ToolCallFormat`."""
        return JsonCallParser(
            opening=self.opening, closing=self.closing, skipped=self.skipped, max_calls=max_calls, new_id=self.new_id
        )

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`."""
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


class JsonCallParser(ToolParser):
    """Parses one answer."""

    def __init__(
        self, *, opening: str, closing: str, skipped: str, max_calls: int | None, new_id: Callable[[], str]
    ) -> None:
        self._bare = opening == "{"
        super().__init__(max_calls=max_calls, new_id=new_id)
        self.openings = () if self._bare else (opening,)
        self._opening, self._closing, self._skipped = opening, closing, skipped
        self._opening_markers = Markers(opening)
        self._object = _JsonObject()
        self._is_call = self._is_ignored = False
        self._block_is_empty = True
        """Whether nothing was read since the opening."""

    def _start(self) -> bool:
        if not self._bare:
            self._state = self._in_text
            return True
        # A call without a marker, only with its brace, must come first.
        before = self._at
        more = self._skip(BLANK)
        self._blanks += self._text[before : self._at]
        if more and self._text[self._at] == "{" and len(self._blanks) <= MAX_BLANKS:
            self._blanks, self._state = "", self._between_calls
        elif more or len(self._blanks) > MAX_BLANKS:
            self._state = self._pass_rest
        return more

    def _in_text(self) -> bool:
        if self._pass_text(self._opening_markers) is None:
            return False
        self._block_is_empty, self._state = True, self._between_calls
        return True

    def _between_calls(self) -> bool:
        if not self._skip(self._skipped):
            return False
        if self._text[self._at] == "{":
            self._object, self._is_call = _JsonObject(), False
            self._is_ignored = self._max_calls is not None and len(self.calls) >= self._max_calls
            self._state = self._in_object
            return True
        closed = self._next_is(self._closing) if self._closing else ""
        if closed is None:
            return False
        self._at += len(closed)
        if self._last and self._closing.startswith(self._text[self._at :]):
            self._at = len(self._text)  # the answer ended within its closing marker
        if self._block_is_empty and not closed:
            self._emit_text(self._opening_text)
        self._state = self._pass_rest if self._bare else self._in_text
        return True

    def _in_object(self) -> bool:
        parsed = self._object
        self._at = parsed.read(self._text, self._at)
        if parsed.name is not None and not self._is_ignored and (parsed.has_arguments or parsed.done):
            if not self._is_call:
                self._is_call = True
                self._start_call(parsed.name)
            self._add_arguments(parsed.take_arguments())
        if parsed.done:
            is_text = not self._is_call and not self._is_ignored
            if is_text:
                self._emit_text(self._opening_text + parsed.raw)
            self._block_is_empty = False
            self._state = self._between_calls
            if is_text:
                self._state = self._pass_rest if self._bare else self._in_text
        return parsed.done

    def _finish(self) -> None:
        if self._state == self._in_object and not self._is_call and not self._is_ignored:
            self._emit_text(self._opening_text + self._object.raw)
        super()._finish()

    @property
    def _opening_text(self) -> str:
        """The marker in front of an object that is no call."""
        return "" if self._bare or not self._block_is_empty else self._opening


class _JsonObject:
    """Reads a JSON object: the value of `name` and the text of the arguments. Other values are passed over."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.has_arguments = False
        """Whether arguments have begun."""
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = False
        self._key: str | None = None
        self._value: list[str] = []
        self._size, self._is_blank = 0, True
        """Characters of the value so far, and whether all are blanks."""
        self._escaped = False
        self._streamed = False
        """Whether the value is the arguments, written as an object."""
        self._ready: list[str] = []
        self._blanks = ""

    @property
    def raw(self) -> str:
        """All text of the object so far."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """New text of the arguments. Arguments written as a JSON string count only once complete."""
        if self.done and not self.has_arguments:
            self._ready, self.has_arguments = ["{}"], True
        taken, self._ready = "".join(self._ready), []
        return taken

    def read(self, text: str, at: int) -> int:
        """Read up to the end of the object; where that is."""
        start = at
        while at < len(text) and not self.done:
            at = self._read_string(text, at) if self._in_string else self._read_structure(text, at)
        self._raw.append(text[start:at])
        return at

    def _read_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._add(text[at])
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            self._add(text[at:])
            return len(text)
        self._add(text[at : found.end()])
        if found.group() == '"':
            self._in_string = False
        else:
            self._escaped = True
        return found.end()

    def _read_structure(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            self._add(text[at:])
            return len(text)
        self._add(text[at : found.start()])
        sign = found.group()
        if sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._depth += 1
            if self._depth == 1:
                return found.end()
            self._streamed = self._streamed or (
                sign == "{" and self._key in ARGUMENTS and not self.has_arguments and self._is_blank
            )
            self.has_arguments = self.has_arguments or self._streamed
        elif sign in "]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.done = True
                return found.end()
        elif self._depth == 1 and (sign == "," or self._key is None):
            if sign == ",":
                self._end_value()
            else:
                key = _json_or_none("".join(self._value))
                self._key, self._value, self._size, self._is_blank = key if isinstance(key, str) else "", [], 0, True
            return found.end()
        self._add(sign)
        return found.end()

    def _add(self, text: str) -> None:
        if self._streamed:
            text = self._blanks + text
            end = max(len(text.rstrip(BLANK)), len(text) - MAX_BLANKS)
            self._ready.append(text[:end])
            self._blanks = text[end:]
        elif self._key in ARGUMENTS or self._size <= 8 * MAX_NAME:  # no other value is of use, nor is a longer key
            self._value.append(text)
            self._size += len(text)
            self._is_blank = self._is_blank and not text.strip(BLANK)

    def _end_value(self) -> None:
        text = "".join(self._value).strip(BLANK)
        if self._streamed:
            self._streamed, self._blanks = False, ""
        elif self._key == "name" and isinstance(name := _json_or_none(text), str) and name:
            self.name = whole_characters(name)
        elif self._key in ARGUMENTS and not self.has_arguments:
            value = _json_or_none(text) if text.startswith('"') else None
            self._ready.append(whole_characters(value) if isinstance(value, str) else text)
            self.has_arguments = bool(self._ready[-1])
        self._key, self._value, self._size, self._is_blank = None, [], 0, True


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
