"""Harmony, the format of gpt-oss: messages in channels. Reasoning, content and calls cannot be told apart without it.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>
"""

import re
from collections.abc import Mapping, Sequence

from eyas.serve.parsers.base import BLANK, MAX_BLANKS, Markers, ParsedDelta, ToolParser, is_name
from eyas.serve.parsers.formats import ToolCallFormat, free_text, json_rule, literal, parameters_of
from eyas.serve.protocol.completions import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
TEMPLATE_MARKERS = (CHANNEL, "analysis", MESSAGE)
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_HEADER_ENDS = Markers(MESSAGE)
_BODY_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_STRAY = Markers(*MARKERS)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(ToolParser):
    """Parses one answer, from behind `<|start|>assistant`. Without `calls_allowed` calls are shown as content."""

    def __init__(self, *, max_calls: int | None, calls_allowed: bool) -> None:
        super().__init__(max_calls=max_calls)
        self._calls_allowed = calls_allowed
        self._reasoning: list[str] = []
        self._has_arguments = False
        self._tail = ""
        self._announced = False
        """Whether `<|start|>` came, so that a header follows."""
        self._spoken: set[str] = set()
        """Kinds of messages that came already: two of one kind are set apart by a newline."""

    def feed(self, text: str, *, last: bool = False) -> ParsedDelta:
        """See `ToolParser`."""
        self._reasoning = []
        delta = super().feed(text, last=last)
        delta.reasoning = "".join(self._reasoning)
        return delta

    def _start(self) -> bool:
        """A header."""
        self.in_reasoning = False
        if self._text.startswith(START, self._at):
            self._at += len(START)
            self._announced = True
        taken = self._take_header(_HEADER_ENDS)
        if taken is None:
            return False
        header, marker = taken
        if not marker:
            if self._last and (self._announced or self._text.startswith(CHANNEL, self._at)):
                self._at = len(self._text)  # the answer ended within a header
            self._state = self._without_header
            return True
        self._announced = False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        kind = channel.group(1) if channel is not None else "final"
        name = recipient.group(1).removeprefix(FUNCTIONS) if recipient is not None else ""
        if recipient is not None and recipient.group(1).startswith(FUNCTIONS) and self._calls_allowed and is_name(name):
            self._start_call(name)
            self._has_arguments, self._tail, self._state = False, "", self._in_call
        elif kind == "analysis" or (recipient is not None and not recipient.group(1).startswith(FUNCTIONS)):
            self._begin("analysis", self._reasoning)
            self.in_reasoning, self._state = True, self._in_analysis
        else:
            self._begin("final", self._content)
            self._state = self._in_final
        return True

    def _begin(self, kind: str, output: list[str]) -> None:
        if kind in self._spoken:
            output.append("\n")
        self._spoken.add(kind)

    def _in_analysis(self) -> bool:
        return self._in_body(self._reasoning)

    def _in_final(self) -> bool:
        return self._in_body(self._content)

    def _in_body(self, output: list[str]) -> bool:
        before, marker = self._take_until(_BODY_ENDS)
        output.append(before)
        self._end_body(marker)
        return marker is not None

    def _in_call(self) -> bool:
        before, marker = self._take_until(_BODY_ENDS)
        text = self._tail + (before if self._has_arguments else before.lstrip(BLANK))
        end = max(len(text.rstrip(BLANK)), len(text) - MAX_BLANKS)
        self._tail = text[end:]
        self._has_arguments = self._has_arguments or bool(text)
        self._add_arguments(text[:end])
        if marker is not None and not self._has_arguments:
            self._add_arguments("{}")
        self._end_body(marker)
        return marker is not None

    def _end_body(self, marker: str | None) -> None:
        if marker is None:
            return
        self._state = self._start
        if marker in (START, CHANNEL):  # the end of the message is missing
            self._at -= len(marker)

    def _without_header(self) -> bool:
        """Text that no header came before: what there is to say is said, without markers."""
        before, marker = self._take_until(_STRAY)
        self._content.append(before)
        return marker is not None


class HarmonyFormat(ToolCallFormat):
    """See the module."""

    name = "openai"
    aliases = ("harmony", "gpt_oss")
    template_markers = TEMPLATE_MARKERS
    markers = MARKERS

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> HarmonyParser:
        """See `ToolCallFormat`."""
        return HarmonyParser(max_calls=max_calls, calls_allowed=bool(tools))

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """See `ToolCallFormat`. Reasoning may come first. Calls come one by one: `<|call|>` ends the answer."""

        def mark(text: str) -> str:
            return literal(text, special_tokens)

        rules = [
            "start: analysis? call",
            f"analysis: {mark(CHANNEL + 'analysis' + MESSAGE)} thought {mark(START + 'assistant')}",
            *free_text("thought", END, special_tokens),
        ]
        rules.append("call: " + " | ".join(f"f{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            header = f"{CHANNEL}commentary to={FUNCTIONS}{tool.function.name} {CONSTRAIN}json{MESSAGE}"
            rules.append(f"f{number}: {mark(header)} {json_rule(parameters_of(tool))}")
        return "\n".join(rules)


class HarmonyReasoning:
    """Harmony as a reasoning parser."""

    name = "openai_gptoss"
    aliases = ("gpt_oss", "harmony")
    template_markers = TEMPLATE_MARKERS
    markers = MARKERS
