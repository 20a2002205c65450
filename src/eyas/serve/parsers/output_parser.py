"""What a server does with a parser: feed it an answer's tokens, keep what it found, and count reasoning."""

from collections.abc import Iterable

from eyas.serve.parsers.base import AnswerParser, ParsedDelta, ParsedToolCall, ToolCallDelta


class OutputParser:
    """Parses the tokens of one answer."""

    def __init__(self, parser: AnswerParser, *, markers: Iterable[str]) -> None:
        self._parser = parser
        self.markers = frozenset(markers)
        """Special tokens that the parser must see. All others stay hidden."""
        self.reasoning_tokens = 0
        """Without the markers around the reasoning."""
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

    @property
    def calls(self) -> list[ParsedToolCall]:
        """All calls so far."""
        return self._parser.calls

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
            calls=_joined(call for delta in deltas for call in delta.calls),
        )
        self._content.append(joined.content)
        self._reasoning.append(joined.reasoning)
        return joined


def _joined(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Deltas of calls, one for each call."""
    joined: list[ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            joined[-1].arguments += delta.arguments
        else:
            joined.append(delta)
    return joined
