"""What parsers of answers have in common: text in, as it comes; reasoning, content and tool calls out.

Invariants, for every parser and any text:
    however the text is cut into pieces, the deltas join to the same whole
    only what is certain is emitted; text that turns out to be no call is content
    work is linear in the text: what is read again is no longer than a header, what is held back is held in lists
    nothing raises
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

BLANK = " \t\r\n"
MAX_BLANKS = 256
"""Blanks in front of a marker are dropped, up to so many: they are held back until it is known what follows."""
MAX_NAME = 256
"""Characters of a function's name."""
MAX_HEADER = 2 * MAX_NAME
"""Characters of the text that a name stands in."""
_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME}}}")


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
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def openai_call_id() -> str:
    """A call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Nine letters or digits: Mistral's templates accept nothing else."""
    return secrets.token_hex(5)[:9]


def is_name(text: str) -> bool:
    """Whether this can be the name of a function."""
    return _NAME.fullmatch(text) is not None


def whole_characters(text: str) -> str:
    """Text whose surrogates are pairs: escapes can name halves of characters, which no response could hold."""
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
        """How long an end of the text is a beginning of one of the markers."""
        if self._beginning.search(text) is None:  # most tokens
            return 0
        for size in range(min(len(text), self.longest - 1), 0, -1):
            end = text[-size:]
            if any(marker.startswith(end) for marker in self.texts):
                return size
        return 0


class IncrementalParser(ABC):
    """Reads text in pieces. A state is a method that reads on and says whether it got further."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        """Text that was received, and where the unread part starts: between feeds it is no longer than a header."""
        self._last = False
        """Whether no more text comes."""
        self._state: Callable[[], bool] = self._start

    @abstractmethod
    def _start(self) -> bool:
        """The first state."""

    def _read(self, text: str, *, last: bool) -> None:
        """Go on with more text."""
        self._text, self._at, self._last = self._text[self._at :] + text, 0, last
        while self._state():
            pass

    def _take_until(self, markers: Markers) -> tuple[str, str | None]:
        """Text in front of the next marker, and the marker; None if there is only text that is no part of one."""
        found = markers.pattern.search(self._text, self._at)
        if found is not None:
            before, self._at = self._text[self._at : found.start()], found.end()
            return before, found.group()
        tail = self._text[max(self._at, len(self._text) - markers.longest) :]
        end = len(self._text) - (0 if self._last else markers.overlap(tail))
        before, self._at = self._text[self._at : end], end
        return before, None

    def _take_header(self, ends: Markers) -> tuple[str, str] | None:
        """Text up to a marker that must be near, and the marker. ("", "") if it is not; None if more text may tell."""
        found = ends.pattern.search(self._text, self._at, self._at + MAX_HEADER + ends.longest)
        if found is not None and found.start() <= self._at + MAX_HEADER:
            header, self._at = self._text[self._at : found.start()], found.end()
            return header, found.group()
        return ("", "") if self._last or len(self._text) - self._at >= MAX_HEADER + ends.longest else None

    def _next_is(self, *texts: str) -> str | None:
        """Which of the texts comes next: "" for none of them, None if that is not known yet."""
        for text in texts:
            if self._text.startswith(text, self._at):
                return text
        rest = self._text[self._at : self._at + max(map(len, texts))]
        if not self._last and any(text.startswith(rest) for text in texts):
            return None
        return ""


class AnswerParser(IncrementalParser):
    """Parses one answer."""

    in_reasoning = False
    """Whether what was read last is reasoning."""
    calls: list[ParsedToolCall]

    @abstractmethod
    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse more text; `last` flushes what was held back."""


class ToolParser(AnswerParser):
    """Parses an answer, or the part of it behind the reasoning: text and tool calls."""

    openings: tuple[str, ...] = ()
    """Markers that begin calls and nothing else."""

    def __init__(self, *, max_calls: int | None, new_id: Callable[[], str] = openai_call_id) -> None:
        super().__init__()
        self.calls = []
        self._max_calls, self._new_id = max_calls, new_id
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._call: ParsedToolCall | None = None
        """The call that arguments belong to; None if it is beyond the limit."""
        self._arguments: list[str] = []
        """New arguments of that call, not in a delta yet."""
        self._blanks = ""
        """Blanks at the end of the text so far, dropped if a marker follows."""
        self._behind_call = False
        """Whether the text follows a call, so that blanks at its start are dropped."""

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """Parse more text; `last` flushes what was held back."""
        self._content, self._deltas = [], []
        self._read(text, last=last)
        if last:
            self._finish()
        self._flush_arguments()
        return ParsedDelta(content="".join(self._content), calls=self._deltas)

    def _finish(self) -> None:
        """Emit what was held back, once all text was read."""
        self._emit_text("")

    def _pass_text(self, markers: Markers) -> str | None:
        """Emit text up to the next marker without the blanks before it. The marker; None if there is none yet."""
        before, marker = self._take_until(markers)
        self._emit_text(before, hold=True)
        if marker is not None:
            self._blanks = ""
        return marker

    def _pass_rest(self) -> bool:
        """The state of text in which no calls are looked for any more."""
        text, self._at = self._text[self._at :], len(self._text)
        self._emit_text(text)
        return False

    def _skip(self, characters: str) -> bool:
        """Skip these characters; False if that took all text."""
        while self._at < len(self._text) and self._text[self._at] in characters:
            self._at += 1
        return self._at < len(self._text)

    def _emit_text(self, text: str, *, hold: bool = False) -> None:
        """Emit text, all but the blanks at its end if they are to be held back."""
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
