"""A streaming parser of tool calls: text in, content and calls out.

Formats differ in how calls are marked (`tools.py`); each call is a JSON object with a name and arguments. The parser
emits only what is certain. Text that turns out to be no call is emitted as content.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

BLANK = " \t\r\n"
NAME, ARGUMENTS = "name", ("arguments", "parameters")


@dataclass(kw_only=True)
class ParsedToolCall:
    """A tool call, as far as it was parsed."""

    id: str
    name: str
    arguments: str = ""


@dataclass(kw_only=True)
class ToolCallDelta:
    """The new part of a call: its start, more arguments, or both."""

    index: int
    started: ParsedToolCall | None = None
    arguments: str = ""


@dataclass(kw_only=True)
class ParsedDelta:
    """What a piece of text added."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def openai_call_id() -> str:
    """A call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Nine letters or digits: Mistral's templates accept nothing else."""
    return secrets.token_hex(5)[:9]


class ToolCallParser:
    """Parses one answer."""

    def __init__(
        self,
        *,
        opening: str,
        closing: str,
        skipped: str,
        max_calls: int | None,
        new_id: Callable[[], str],
    ) -> None:
        self.calls: list[ParsedToolCall] = []
        self.content = ""
        self._opening, self._closing, self._skipped = opening, closing, skipped
        self._max_calls, self._new_id = max_calls, new_id
        self._text = ""
        """Received, but neither emitted nor dropped yet."""
        self._among_calls = False
        self._object_parser: _JsonObjectParser | None = None
        self._delta = ParsedDelta()

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse more text; `last` flushes what was held back."""
        self._text += text
        self._delta = ParsedDelta()
        while self._advance():
            pass
        if last:
            rest, self._text = self._text, ""
            if self._object_parser is not None:
                is_call = self._object_parser.call is not None or self._at_limit
                rest = "" if is_call else self._opening_text + self._object_parser.raw
            elif self._among_calls and self._closing.startswith(rest.strip(self._skipped)):
                rest = ""
            self._emit_text(rest if rest.strip() or not self.calls else "")
        self.content += self._delta.content
        return self._delta

    def _advance(self) -> bool:
        """One parsing step; False if more text is needed."""
        if self._object_parser is not None:
            return self._in_object(self._object_parser)
        return self._between_calls() if self._among_calls else self._in_text()

    def _in_text(self) -> bool:
        at, bare = self._text.find(self._opening), self._opening == "{"
        # A call without a marker, only with its brace, must come first.
        first = not (self.content or self._delta.content) and self._text.lstrip().startswith("{")
        if at >= 0 and (first or not bare):
            self._emit_text(self._text[:at].rstrip())
            self._text = self._text[at + (0 if bare else len(self._opening)) :]
            self._among_calls = True
            return True
        # Hold back a possible start of the marker and the blanks before it.
        held = max((n for n in range(1, len(self._opening)) if self._text.endswith(self._opening[:n])), default=0)
        sure = self._text[: len(self._text) - held].rstrip()
        self._emit_text(sure)
        self._text = self._text[len(sure) :]
        return False

    def _between_calls(self) -> bool:
        self._text = self._text.lstrip(self._skipped)
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._object_parser = _JsonObjectParser()
            return True
        if self._closing and self._closing.startswith(self._text[: len(self._closing)]):
            if len(self._text) < len(self._closing):
                return False
            self._text = self._text[len(self._closing) :]
        self._among_calls = False
        return True

    def _in_object(self, parser: "_JsonObjectParser") -> bool:
        if not self._text:
            return False
        taken = parser.feed(self._text)
        self._text = self._text[taken:]
        ignored = self._at_limit and parser.call is None
        if parser.name is not None and not ignored and (parser.arguments or parser.done):
            self._emit_call(parser)
        if parser.done:
            self._object_parser = None
            if parser.call is None and not ignored:  # an object, but no call
                self._emit_text(self._opening_text + parser.raw)
                self._among_calls = False
        return parser.done

    def _emit_call(self, parser: "_JsonObjectParser") -> None:
        """Emit the new part of a call."""
        assert parser.name is not None
        started = None
        if parser.call is None:
            started = parser.call = ParsedToolCall(id=self._new_id(), name=parser.name)
            self.calls.append(parser.call)
        call = parser.call
        arguments = parser.arguments or ("{}" if parser.done else "")
        delta = ToolCallDelta(index=self.calls.index(call), started=started, arguments=arguments[len(call.arguments) :])
        call.arguments = arguments
        if delta.started is not None or delta.arguments:
            self._delta.calls.append(delta)

    @property
    def _opening_text(self) -> str:
        """The marker in front of an object that is no call."""
        return "" if self._opening == "{" else self._opening

    @property
    def _at_limit(self) -> bool:
        """Whether further calls are dropped."""
        return self._max_calls is not None and len(self.calls) >= self._max_calls

    def _emit_text(self, text: str) -> None:
        self._delta.content += text


class _JsonObjectParser:
    """Parses a JSON object by character: the value of `name` and the raw text of the arguments."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.call: ParsedToolCall | None = None
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value = ""
        self._arguments: str | None = None
        """Set once they are complete."""

    @property
    def arguments(self) -> str:
        """Their text so far. Arguments written as a JSON string count only once complete."""
        if self._arguments is not None:
            return self._arguments
        value = self._value.lstrip(BLANK)
        return value.rstrip(BLANK) if self._key in ARGUMENTS and value.startswith("{") else ""

    def feed(self, text: str) -> int:
        """Consume characters up to the end of the object; returns how many."""
        for count, char in enumerate(text, 1):
            self.raw += char
            self._feed_char(char)
            if self.done:
                return count
        return len(text)

    def _feed_char(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif char in "]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.done = True
                return
        elif char == ":" and self._depth == 1 and self._key is None:
            self._key, self._value = str(_json_or_none(self._value)), ""
            return
        elif char == "," and self._depth == 1:
            self._end_value()
            return
        self._value += char

    def _end_value(self) -> None:
        value = _json_or_none(self._value)
        if self._key == NAME and isinstance(value, str) and value:
            self.name = value
        elif self._key in ARGUMENTS and self._arguments is None:
            self._arguments = value if isinstance(value, str) else self._value.strip(BLANK)
        self._key, self._value = None, ""


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
