"""Reasoning between two tags, such as `<think>` and `</think>` of DeepSeek R1, Qwen3 and GLM 4.5.

The end of the prompt says where an answer begins. A template may open the reasoning itself, so that the answer has only
its end; or close it, which is how thinking is turned off: then all is content. If it does neither, the answer says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, AnswerParser, Markers, ParsedDelta, Steps
from eyas.serve.parsers.formats import ReasoningEnd, ReasoningFormat

THINK, THINK_END = "<think>", "</think>"


class ReasoningStart(Enum):
    """How a prompt leaves the reasoning."""

    OPEN = "open"
    CLOSED = "closed"
    UNSAID = "unsaid"


@dataclass(kw_only=True)
class ThinkTagFormat(ReasoningFormat):
    """One reasoning parser of this kind."""

    name: str
    aliases: tuple[str, ...] = ()
    template_markers: tuple[str, ...]
    always_thinks: bool = False
    """Whether an answer is reasoning until `</think>` comes even if nobody opened it."""
    calls_end_it: bool = False
    """Whether a tool call ends the reasoning too: these models leave out `</think>` at times."""
    begin: str = THINK
    end: str = THINK_END

    def __post_init__(self) -> None:
        self.markers = (self.begin, self.end)

    def new_parser(self, prompt_end: str, tool_parser: AnswerParser | None) -> "ThinkTagParser":
        openings = tool_parser.openings if tool_parser is not None and self.calls_end_it else ()
        return ThinkTagParser(self, self._start_of(prompt_end), tool_parser, openings)

    def reasoning_end(self, prompt_end: str) -> ReasoningEnd | None:
        start = self._start_of(prompt_end)
        if start is ReasoningStart.CLOSED:
            return None
        return ReasoningEnd((self.end,), begin=self.begin if start is ReasoningStart.UNSAID else None)

    def _start_of(self, prompt_end: str) -> ReasoningStart:
        end = prompt_end.rstrip(BLANK)
        if end.endswith(self.end):
            return ReasoningStart.CLOSED
        return ReasoningStart.OPEN if end.endswith(self.begin) or self.always_thinks else ReasoningStart.UNSAID


class ThinkTagParser(AnswerParser):
    """Parses one answer; content behind the reasoning goes through the parser of tool calls."""

    def __init__(
        self,
        format_: ThinkTagFormat,
        start: ReasoningStart,
        tool_parser: AnswerParser | None,
        call_openings: Sequence[str],
    ) -> None:
        super().__init__()
        self._format, self._reasoning_start, self._tool_parser = format_, start, tool_parser
        self._ends = Markers(format_.end, *call_openings)
        self.in_reasoning = start is ReasoningStart.OPEN
        if tool_parser is not None:
            self.calls = tool_parser.calls

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        delta = super().feed(text, last=last)
        if self._tool_parser is None or not (last or delta.content):
            return delta
        parsed = self._tool_parser.feed(delta.content, last=last)
        parsed.reasoning = delta.reasoning
        return parsed

    def _parse(self) -> Steps[None]:
        closed = self._reasoning_start is ReasoningStart.CLOSED
        found = yield from self._drop(self._format.end if closed else self._format.begin)
        self.in_reasoning = self.in_reasoning or found == self._format.begin
        if self.in_reasoning:
            marker = yield from self._until(self._ends, self._add_reasoning)
            if not marker:
                return
            self.in_reasoning = False
            if marker == self._format.end:
                yield from self._drop(marker)
            else:
                self._unread(marker)
        yield from self._pass_rest()

    def _drop(self, marker: str) -> Steps[str]:
        """Drop a marker and the blanks before it, if it comes next; it is returned."""
        while True:
            at, end = self._at, min(len(self._text), self._at + MAX_BLANKS)
            while at < end and self._text[at] in BLANK:
                at += 1
            rest = self._text[at : at + len(marker)]
            if rest == marker:
                self._at = at + len(marker)
                return marker
            if self._last or not marker.startswith(rest):
                return ""
            yield
