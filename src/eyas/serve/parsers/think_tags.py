"""Reasoning between two tags: `<think>` and `</think>` for DeepSeek R1, Qwen3, GLM 4.5 and their relatives, others for
others.

Where an answer begins is told by its prompt. A template may open the reasoning itself, so that the answer has only its
end; or close it, which is how thinking is turned off: then all is content. If it does neither, the answer says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, AnswerParser, Markers, ParsedDelta, ToolParser

THINK, THINK_END = "<think>", "</think>"


class ReasoningStart(Enum):
    """How a prompt leaves the reasoning."""

    OPEN = "open"
    CLOSED = "closed"
    UNSAID = "unsaid"


@dataclass(frozen=True, kw_only=True)
class ThinkTagFormat:
    """One reasoning parser of this kind, by vLLM's name."""

    name: str
    aliases: tuple[str, ...] = ()
    template_markers: tuple[str, ...]
    """A chat template that contains all of them uses it."""
    always_thinks: bool = False
    """Whether an answer is reasoning until `</think>` comes even if nobody opened it."""
    calls_end_it: bool = False
    """Whether a tool call ends the reasoning too: these models leave out `</think>` at times."""
    begin: str = THINK
    end: str = THINK_END

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which an answer's text leaves out and a parser must see."""
        return (self.begin, self.end)

    def start_of(self, end_of_prompt: str) -> ReasoningStart:
        """How this prompt leaves the reasoning."""
        end = end_of_prompt.rstrip(BLANK)
        if end.endswith(self.end):
            return ReasoningStart.CLOSED
        return ReasoningStart.OPEN if end.endswith(self.begin) or self.always_thinks else ReasoningStart.UNSAID

    def new_parser(self, start: ReasoningStart, tool_parser: ToolParser | None) -> "ThinkTagParser":
        """A parser of one answer; tool calls are looked for behind the reasoning."""
        ends = tool_parser.openings if tool_parser is not None and self.calls_end_it else ()
        return ThinkTagParser(self, start, tool_parser, call_markers=ends)


class ThinkTagParser(AnswerParser):
    """Parses one answer."""

    def __init__(
        self,
        format_: ThinkTagFormat,
        start: ReasoningStart,
        tool_parser: ToolParser | None,
        *,
        call_markers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._format = format_
        self.calls = tool_parser.calls if tool_parser is not None else []
        self.in_reasoning = start is ReasoningStart.OPEN
        self._tool_parser = tool_parser
        self._ends = Markers(format_.end, *call_markers)
        self._expected = format_.end if start is ReasoningStart.CLOSED else format_.begin
        """A marker that is dropped if the text begins with it."""
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """See `AnswerParser`."""
        self._reasoning, self._content = [], []
        self._read(text, last=last)
        delta = ParsedDelta(content="".join(self._content))
        if self._tool_parser is not None and (last or delta.content):
            delta = self._tool_parser.feed(delta.content, last=last)
        delta.reasoning = "".join(self._reasoning)
        return delta

    def _start(self) -> bool:
        """The beginning of the answer, and of what follows the reasoning: a marker may come behind blanks."""
        at, end = self._at, min(len(self._text), self._at + MAX_BLANKS)
        while at < end and self._text[at] in BLANK:
            at += 1
        if at == len(self._text) and at < self._at + MAX_BLANKS and not self._last:
            return False
        begin, self._at = self._at, at
        found = self._next_is(self._expected)
        if found is None:
            self._at = begin
            return False
        if found == self._format.begin:
            self.in_reasoning = True
        self._at = at + len(found) if found else begin
        self._state = self._in_reasoning if self.in_reasoning else self._in_content
        return True

    def _in_reasoning(self) -> bool:
        before, marker = self._take_until(self._ends)
        self._reasoning.append(before)
        if marker is None:
            return False
        self.in_reasoning = False
        self._expected, self._state = self._format.end, self._start
        if marker != self._format.end:
            self._at -= len(marker)
            self._state = self._in_content
        return True

    def _in_content(self) -> bool:
        self._content.append(self._text[self._at :])
        self._at = len(self._text)
        return False
