"""Tool calls found in an answer's text as it comes: what was said, which functions are called, with which arguments.

Dialects differ in how calls are set off from words (`tools.py`); within, a call is a JSON object with a name and
arguments. `CallReader` takes text piece by piece and gives what is certain. What turns out to be no call is given as
the words it was.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

BLANK = " \t\r\n"
NAME, ARGUMENTS = "name", ("arguments", "parameters")


@dataclass(kw_only=True)
class Call:
    """A function call, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass(kw_only=True)
class CallPiece:
    """What is new of a call: its beginning, more of its arguments, or both."""

    index: int
    begun: Call | None = None
    arguments: str = ""


@dataclass(kw_only=True)
class Delta:
    """What a piece of text came to."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


def long_id() -> str:
    """A call's name, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters or digits: templates of Mistral's models take no others."""
    return secrets.token_hex(5)[:9]


class CallReader:
    """Reads one answer."""

    def __init__(
        self,
        *,
        opening: str,
        closing: str = "",
        between: str = BLANK,
        most: int | None = None,
        new_id: Callable[[], str] = long_id,
    ) -> None:
        self.calls: list[Call] = []
        self.content = ""
        self._opening, self._closing, self._between, self._most, self._new_id = opening, closing, between, most, new_id
        self._text = ""
        """Not decided on yet."""
        self._among_calls = False
        self._object: _ObjectReader | None = None
        self._delta = Delta()

    def feed(self, text: str, *, last: bool = False) -> Delta:
        """Take more text, perhaps the last."""
        self._text += text
        self._delta = Delta()
        while self._go_on():
            pass
        if last:
            rest, self._text = self._text, ""
            if self._object is not None:
                rest = "" if self._object.call is not None or self._full else self._mark + self._object.raw
            elif self._among_calls and self._closing.startswith(rest.strip(self._between)):
                rest = ""
            self._say(rest if rest.strip() or not self.calls else "")
        self.content += self._delta.content
        return self._delta

    def _go_on(self) -> bool:
        """One step; False where more text is needed."""
        if self._object is not None:
            return self._in_object(self._object)
        return self._between_calls() if self._among_calls else self._in_words()

    def _in_words(self) -> bool:
        at, bare = self._text.find(self._opening), self._opening == "{"
        # Calls that are set off by nothing but the brace they begin with can only come first.
        first = not (self.content or self._delta.content) and self._text.lstrip().startswith("{")
        if at >= 0 and (first or not bare):
            self._say(self._text[:at].rstrip())
            self._text = self._text[at + (0 if bare else len(self._opening)) :]
            self._among_calls = True
            return True
        # What may be the beginning of the mark, or the blanks before it, is not said yet.
        held = max((n for n in range(1, len(self._opening)) if self._text.endswith(self._opening[:n])), default=0)
        sure = self._text[: len(self._text) - held].rstrip()
        self._say(sure)
        self._text = self._text[len(sure) :]
        return False

    def _between_calls(self) -> bool:
        self._text = self._text.lstrip(self._between)
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._object = _ObjectReader()
            return True
        if self._closing and self._closing.startswith(self._text[: len(self._closing)]):
            if len(self._text) < len(self._closing):
                return False
            self._text = self._text[len(self._closing) :]
        self._among_calls = False
        return True

    def _in_object(self, reader: "_ObjectReader") -> bool:
        if not self._text:
            return False
        taken = reader.feed(self._text)
        self._text = self._text[taken:]
        ignored = self._full and reader.call is None
        if reader.name is not None and not ignored and (reader.arguments or reader.done):
            self._tell(reader)
        if reader.done:
            self._object = None
            if reader.call is None and not ignored:  # an object, but no call
                self._say(self._mark + reader.raw)
                self._among_calls = False
        return reader.done

    def _tell(self, reader: "_ObjectReader") -> None:
        """Give what a call has come to."""
        assert reader.name is not None
        begun = None
        if reader.call is None:
            begun = reader.call = Call(id=self._new_id(), name=reader.name)
            self.calls.append(reader.call)
        call = reader.call
        arguments = reader.arguments or ("{}" if reader.done else "")
        piece = CallPiece(index=self.calls.index(call), begun=begun, arguments=arguments[len(call.arguments) :])
        call.arguments = arguments
        if piece.begun is not None or piece.arguments:
            self._delta.calls.append(piece)

    @property
    def _mark(self) -> str:
        """What stood before an object that is no call."""
        return "" if self._opening == "{" else self._opening

    @property
    def _full(self) -> bool:
        """Whether further calls are left out."""
        return self._most is not None and len(self.calls) >= self._most

    def _say(self, words: str) -> None:
        self._delta.content += words


class _ObjectReader:
    """A JSON object letter by letter: the string called name, and the raw text of arguments."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.call: Call | None = None
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value = ""
        self._arguments: str | None = None
        """Once they are complete."""

    @property
    def arguments(self) -> str:
        """Their text, as far as it has come; arguments written as a string only when it is complete."""
        if self._arguments is not None:
            return self._arguments
        value = self._value.lstrip(BLANK)
        return value.rstrip(BLANK) if self._key in ARGUMENTS and value.startswith("{") else ""

    def feed(self, text: str) -> int:
        """Take letters up to the end of the object; how many."""
        for count, letter in enumerate(text, 1):
            self.raw += letter
            self._take(letter)
            if self.done:
                return count
        return len(text)

    def _take(self, letter: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or letter != '"'
            self._escaped = letter == "\\" and not self._escaped
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif letter in "]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.done = True
                return
        elif letter == ":" and self._depth == 1 and self._key is None:
            self._key, self._value = str(_loaded(self._value)), ""
            return
        elif letter == "," and self._depth == 1:
            self._end_value()
            return
        self._value += letter

    def _end_value(self) -> None:
        value = _loaded(self._value)
        if self._key == NAME and isinstance(value, str) and value:
            self.name = value
        elif self._key in ARGUMENTS and self._arguments is None:
            self._arguments = value if isinstance(value, str) else self._value.strip(BLANK)
        self._key, self._value = None, ""


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
