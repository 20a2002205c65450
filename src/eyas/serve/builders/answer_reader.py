"""Answers read as a client of the server gets them and sends them back: content, reasoning and tool calls.

`eyas data answer` makes the prompts of later turns of it, so that they are what a server would have been asked.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from eyas.serve.builders.reasoning import ReasoningSupport
from eyas.serve.builders.request_builder import template_of
from eyas.serve.parsers.base import AnswerParser, ParsedDelta
from eyas.serve.parsers.harmony import HarmonyReasoning
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
        # Channels cannot be sent back as text; tags can, and templates that know no field for them look for tags.
        self._apart = isinstance(reasoning, HarmonyReasoning) or _has_field(template, target)

    @property
    def thinks(self) -> bool:
        """Whether answers of this target may begin with reasoning."""
        return self._reasoning.format is not None

    def read(self, prompt: Sequence[int], tools: Iterable[Mapping[str, Any]]) -> "ReadAnswer":
        """Begin to read the answer to a prompt, in which these tools were offered."""
        offered = _functions(tools)
        tool_parser = self._tools.new_parser(offered, max_calls=None) if self._tools is not None and offered else None
        parser = self._reasoning.new_parser(prompt, tool_parser)
        return ReadAnswer(parser, apart=self._apart)


class ReadAnswer:
    """One answer, as far as it was read. Special tokens belong to its text."""

    def __init__(self, parser: AnswerParser | None, *, apart: bool) -> None:
        self._parser, self._apart = parser, apart
        self._texts: list[str] = []
        self._deltas: list[ParsedDelta] = []
        self.tokens = 0
        self.thinking_tokens = 0
        """The first of them, up to the last that belongs to reasoning."""

    @property
    def in_reasoning(self) -> bool:
        """Whether what was read last is reasoning."""
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
        """All of it as the assistant's message; nothing can be read behind that."""
        text = "".join(self._texts)
        if self._parser is None:
            return {"role": "assistant", "content": text}
        self._deltas.append(self._parser.feed("", last=True))
        calls = self._parser.calls
        if not (calls or self._apart):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.content for delta in self._deltas)}
        if reasoning := "".join(delta.reasoning for delta in self._deltas):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


def _has_field(template: str, target: TargetText) -> bool:
    """Whether the template takes the reasoning of a message from a field."""
    if _REASONING_FIELD.search(template):
        return True
    try:
        text = target.tokenizer.apply_chat_template([template_message(one) for one in TRIAL], tokenize=False)
    except TEMPLATE_ERRORS:
        return False
    return TRIAL[1]["reasoning_content"] in str(text)


def _functions(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """The tools as parsers take them; what is no function as OpenAI has them is not looked for."""
    functions = []
    for tool in tools:
        try:
            functions.append(Tool.model_validate(dict(tool)))
        except ValidationError:
            continue
    return functions
