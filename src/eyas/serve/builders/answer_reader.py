"""Reads answers as a client of the server gets them: content, reasoning and tool calls.

`eyas data answer` makes the prompts of later turns of them, so that they are what a server would have been asked.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from eyas.serve.builders.answer_formats import ReasoningSupport, template_of
from eyas.serve.parsers.base import AnswerParser, ParsedDelta
from eyas.serve.parsers.registry import AUTO, choose_formats
from eyas.serve.protocol.completions import Tool
from eyas.target.chat_template import TEMPLATE_ERRORS, template_message
from eyas.target.text import TargetText

_REASONING_FIELD = re.compile(r"reasoning_content|\.reasoning\b|\[['\"]reasoning['\"]\]")
"""How templates read the reasoning of a message, also those that write it in some turns only."""
TRIAL = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "reasoning_content": "Greet."})
"""A conversation that shows whether a template has a field for reasoning."""


class AnswerReader:
    """Reads the answers of one target, by the formats that its chat template has."""

    def __init__(self, target: TargetText) -> None:
        template = template_of(target)
        self._tools, reasoning = choose_formats(template, AUTO, AUTO)
        self._reasoning = ReasoningSupport(tokenizer=target.tokenizer, format=reasoning)
        # Templates that know no field for reasoning look for its tags in the text.
        as_text = reasoning is None or reasoning.readable_as_content
        self._apart = not as_text or _has_reasoning_field(template, target)

    @property
    def thinks(self) -> bool:
        """Whether answers of this target may begin with reasoning."""
        return self._reasoning.format is not None

    def read(self, prompt: Sequence[int], tools: Iterable[Mapping[str, Any]]) -> "ReadAnswer":
        """Begin to read the answer to a prompt that offered these tools."""
        offered = _functions(tools)
        tool_parser = self._tools.new_parser(offered, max_calls=None) if self._tools is not None and offered else None
        return ReadAnswer(self._reasoning.new_parser(prompt, tool_parser), apart=self._apart)


class ReadAnswer:
    """One answer, as far as it was read. Special tokens belong to its text."""

    def __init__(self, parser: AnswerParser | None, *, apart: bool) -> None:
        """`apart`: reasoning is a field of the message, not part of its content."""
        self._parser, self._apart = parser, apart
        self._texts: list[str] = []
        self._deltas: list[ParsedDelta] = []
        self.tokens = 0
        self.thinking_tokens = 0
        """Tokens from the start up to the last one of the reasoning."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the newest text is reasoning."""
        return self._parser is not None and self._parser.in_reasoning

    def feed(self, text: str) -> None:
        """Read one more token's text."""
        self._texts.append(text)
        self.tokens += 1
        if self._parser is not None:
            before = self._parser.in_reasoning
            self._deltas.append(self._parser.feed(text))
            if before or self._parser.in_reasoning:
                self.thinking_tokens = self.tokens

    def message(self) -> dict[str, Any]:
        """The whole answer as the assistant's message. Nothing can be fed afterwards."""
        text = "".join(self._texts)
        if self._parser is None:
            return {"role": "assistant", "content": text}
        self._deltas.append(self._parser.feed("", last=True))
        calls = [call.message for call in self._parser.calls]
        if not (calls or self._apart):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.content for delta in self._deltas)}
        if reasoning := "".join(delta.reasoning for delta in self._deltas):
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})


def _has_reasoning_field(template: str, target: TargetText) -> bool:
    if _REASONING_FIELD.search(template):
        return True
    try:
        text = target.tokenizer.apply_chat_template([template_message(one) for one in TRIAL], tokenize=False)
    except TEMPLATE_ERRORS:
        return False
    return TRIAL[1]["reasoning_content"] in str(text)


def _functions(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """The tools that are functions as OpenAI defines them; no calls of others are looked for."""
    functions = []
    for tool in tools:
        with suppress(ValidationError):
            functions.append(Tool.model_validate(dict(tool)))
    return functions
