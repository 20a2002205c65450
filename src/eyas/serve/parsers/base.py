"""The base of all answer parsers: streamed text in; reasoning, content and tool calls out.

Invariants, for every parser and any text:
    however the text is cut into pieces, the deltas join to the same whole
    text is emitted once its kind is certain; text that turns out to be no call is content
    work is linear in the text: text that is read again is no longer than a header, held-back text is kept in lists
    no exception is raised
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

BLANK = " \t\r\n"
MAX_BLANKS = 256
"""Blanks before a marker are dropped, up to this many: they are held back until it is known what follows."""
MAX_NAME = 256
"""Characters of a function's name."""
MAX_HEADER = 2 * MAX_NAME
"""Characters of the text that contains a name."""
_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME}}}")
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A part of a parser. It yields where it needs more text, and returns what it found."""


@dataclass(kw_only=True)
class ParsedToolCall:
    """A tool call, as far as it was parsed."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The text of the arguments so far: JSON, if the model wrote JSON."""
        return "".join(self.parts)

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(kw_only=True)
class ToolCallDelta:
    """The new part of a call: its start, more arguments, or both."""

    index: int
    started: ParsedToolCall | None = None
    arguments: str = ""


@dataclass(kw_only=True)
class ParsedDelta:
    """The content, reasoning and calls in a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def openai_call_id() -> str:
    """A call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def is_name(text: str) -> bool:
    """Whether this can be the name of a function."""
    return _NAME.fullmatch(text) is not None


def whole_characters(text: str) -> str:
    """Text without lone surrogates: JSON escapes can name half a character, which no response could hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Markers:
    """Texts to look for. None of them is part of another."""

    def __init__(self, *texts: str) -> None:
        assert not any(one is not other and one in other for one in texts for other in texts), texts
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)))
        self.longest = max(map(len, texts))
        self._beginning = re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]")

    def overlap(self, text: str) -> int:
        """The length of the longest end of the text with which a marker begins."""
        if self._beginning.search(text) is None:  # most tokens
            return 0
        for size in range(min(len(text), self.longest - 1), 0, -1):
            end = text[-size:]
            if any(marker.startswith(end) for marker in self.texts):
                return size
        return 0


class AnswerParser(ABC):
    """Parses one answer: text and tool calls, in some formats reasoning too.

    A subclass reads the answer in `_parse`, a generator that yields where it needs more text.
    """

    openings: tuple[str, ...] = ()
    """Markers that begin tool calls and nothing else."""
    in_reasoning = False
    """Whether the newest text is reasoning."""

    def __init__(self, *, max_calls: int | None = None, new_id: Callable[[], str] = openai_call_id) -> None:
        self.calls: list[ParsedToolCall] = []
        self._max_calls, self._new_id = max_calls, new_id
        self._text, self._at = "", 0
        """Text that was received, and where the unread part starts: between feeds it is no longer than a header."""
        self._last = False
        """Whether no more text comes."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._call: ParsedToolCall | None = None
        """The call that arguments belong to; None if it is beyond the limit."""
        self._arguments: list[str] = []
        """New arguments of that call, not in a delta yet."""
        self._blanks = ""
        """Blanks at the end of the text so far, dropped if a marker follows."""
        self._behind_call = False
        """Whether a call came last, so that blanks at the start of the text are dropped."""
        self._steps = self._parse()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the whole answer."""

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse more text; `last` flushes what was held back."""
        self._content, self._reasoning, self._deltas = [], [], []
        self._text, self._at, self._last = self._text[self._at :] + text, 0, last
        next(self._steps, None)
        if last:
            self._emit_text("")
        self._flush_arguments()
        return ParsedDelta(content="".join(self._content), reasoning="".join(self._reasoning), calls=self._deltas)

    # Reading. A position does not survive a yield, since what was read is dropped: go back by `_unread`.

    def _until(self, markers: Markers, emit: Callable[[str], None]) -> Steps[str]:
        """Emit the text before the next marker as it arrives. Return the marker, or "" at the end of the answer."""
        while True:
            if (found := markers.pattern.search(self._text, self._at)) is not None:
                before, self._at = self._text[self._at : found.start()], found.end()
                emit(before)
                return found.group()
            tail = self._text[max(self._at, len(self._text) - markers.longest) :]
            end = len(self._text) - (0 if self._last else markers.overlap(tail))
            before, self._at = self._text[self._at : end], end
            emit(before)
            if self._last:
                return ""
            yield

    def _collect(self, markers: Markers) -> Steps[str | None]:
        """The text up to a marker, or None if the answer ends first."""
        parts: list[str] = []
        return "".join(parts) if (yield from self._until(markers, parts.append)) else None

    def _header(self, ends: Markers) -> Steps[tuple[str, str]]:
        """The text up to a marker that must be near, and the marker; ("", "") if it is not near."""
        limit = MAX_HEADER + ends.longest
        while True:
            found = ends.pattern.search(self._text, self._at, self._at + limit)
            if found is not None and found.start() <= self._at + MAX_HEADER:
                header, self._at = self._text[self._at : found.start()], found.end()
                return header, found.group()
            if self._last or len(self._text) - self._at >= limit:
                return "", ""
            yield

    def _unread(self, *texts: str) -> None:
        """Go back before texts that were just read."""
        self._at -= sum(map(len, texts))

    def _take(self, *texts: str) -> Steps[str]:
        """Read the one of these texts that comes next; "" if it is none of them."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    self._at += len(text)
                    return text
            rest = self._text[self._at : self._at + max(map(len, texts))]
            if self._last or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def _skip(self, characters: str, emit: Callable[[str], None] = lambda _: None) -> Steps[bool]:
        """Read past these characters. False if the answer ends there."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in characters:
                self._at += 1
            emit(self._text[start : self._at])
            if self._at < len(self._text) or self._last:
                return self._at < len(self._text)
            yield

    def _more(self) -> Steps[bool]:
        """Wait for another character. False if the answer ends here."""
        return (yield from self._skip(""))

    def _begins_with(self, sign: str) -> Steps[bool]:
        """Whether the answer begins with a sign, after a few blanks at most. They are read, the sign is not."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in BLANK:
                self._at += 1
            self._blanks += self._text[start : self._at]
            if len(self._blanks) > MAX_BLANKS:
                return False
            if self._at < len(self._text) or self._last:
                return self._text.startswith(sign, self._at)
            yield

    # Emitting.

    def _add_content(self, text: str) -> None:
        self._content.append(text)

    def _add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def _pass_text(self, markers: Markers) -> Steps[str]:
        """Emit text up to the next marker, without the blanks before it. The marker; "" at the end of the answer."""
        marker = yield from self._until(markers, lambda text: self._emit_text(text, hold=True))
        if marker:
            self._blanks = ""
        return marker

    def _pass_rest(self) -> Steps[None]:
        """Emit all that is left as text."""
        while True:
            text, self._at = self._text[self._at :], len(self._text)
            self._emit_text(text)
            if self._last:
                return
            yield

    def _pass_arguments(self, ends: Markers, fence: str = "") -> Steps[str]:
        """Emit arguments up to a marker, without the blanks around them and a Markdown fence at their end."""
        held, tail, begun = BLANK + fence[:1], "", False

        def emit(text: str) -> None:
            nonlocal tail, begun
            text = tail + (text if begun else text.lstrip(BLANK))
            end = max(len(text.rstrip(held)), len(text) - MAX_BLANKS)
            tail, begun = text[end:], begun or bool(text)
            self._add_arguments(text[:end])

        marker = yield from self._until(ends, emit)
        if marker:
            self._add_arguments(tail.rstrip(BLANK).removesuffix(fence).rstrip(BLANK) if begun else "{}")
        return marker

    def _emit_text(self, text: str, *, hold: bool = False) -> None:
        """Emit text; with `hold`, all but the blanks at its end."""
        text, self._blanks = self._blanks + text, ""
        if self._behind_call:
            text = text.lstrip(BLANK)
            self._behind_call = not text
        if hold:
            end = max(len(text.rstrip(BLANK)), len(text) - MAX_BLANKS)
            text, self._blanks = text[:end], text[end:]
        if text:
            self._content.append(text)

    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._flush_arguments()
        self._behind_call, self._call = True, None
        if self._max_calls is not None and len(self.calls) >= self._max_calls:
            return
        self._call = ParsedToolCall(id=call_id or self._new_id(), name=name)
        self.calls.append(self._call)
        self._deltas.append(ToolCallDelta(index=len(self.calls) - 1, started=self._call))

    def _add_arguments(self, text: str) -> None:
        if self._call is not None and text:
            self._arguments.append(text)

    def _flush_arguments(self) -> None:
        if self._call is None or not self._arguments:
            return
        text, index = "".join(self._arguments), len(self.calls) - 1
        self._arguments = []
        self._call.parts.append(text)
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1].arguments = text
        else:
            self._deltas.append(ToolCallDelta(index=index, arguments=text))


class OutputParser:
    """Feeds a parser the tokens of one answer, keeps what it found, and counts reasoning tokens."""

    def __init__(self, parser: AnswerParser, *, markers: Iterable[str]) -> None:
        self._parser = parser
        self.markers = frozenset(markers)
        """Special tokens that the parser must see. All others stay hidden."""
        self.calls = parser.calls
        self.reasoning_tokens = 0
        """Tokens of the reasoning, without its markers."""
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        """All content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    def feed(self, texts: Iterable[str], *, last: bool = False) -> ParsedDelta:
        """Parse the texts of more tokens, one each; `last` flushes what was held back."""
        deltas = []
        for text in texts:
            before = self._parser.in_reasoning
            deltas.append(self._parser.feed(text))
            self.reasoning_tokens += before and self._parser.in_reasoning
        if last:
            deltas.append(self._parser.feed("", last=True))
        joined = ParsedDelta(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
        )
        for call in (call for delta in deltas for call in delta.calls):
            if joined.calls and joined.calls[-1].index == call.index:
                joined.calls[-1].arguments += call.arguments
            else:
                joined.calls.append(call)
        self._content.append(joined.content)
        self._reasoning.append(joined.reasoning)
        return joined
