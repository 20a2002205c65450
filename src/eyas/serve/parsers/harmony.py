"""Harmony, the format of gpt-oss: messages in channels. Reasoning, content and calls cannot be told apart without it.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>
"""

import re
from collections.abc import Callable, Mapping, Sequence

from eyas.serve.parsers.base import AnswerParser, Markers, Steps, is_name
from eyas.serve.parsers.formats import (
    AnswerFormat,
    ReasoningEnd,
    ReasoningFormat,
    ToolCallFormat,
    free_text,
    json_rule,
    literal,
    parameters_of,
)
from eyas.serve.protocol.completions import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_HEADER_ENDS = Markers(MESSAGE)
_BODY_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_ALL = Markers(*MARKERS)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(AnswerParser):
    """Parses one answer, from behind `<|start|>assistant`. Without `calls_allowed` calls are shown as content."""

    def __init__(self, *, max_calls: int | None, calls_allowed: bool) -> None:
        super().__init__(max_calls=max_calls)
        self._calls_allowed = calls_allowed
        self._seen: set[str] = set()
        """Kinds of messages that came already: a newline separates two of one kind."""

    def _parse(self) -> Steps[None]:
        while True:
            self.in_reasoning = announced = False
            while (yield from self._take(START)):
                announced = True
            header, marker = yield from self._header(_HEADER_ENDS)
            if not marker:
                if self._last and (announced or self._text.startswith(CHANNEL, self._at)):
                    return  # the answer ended within a header
                while (yield from self._until(_ALL, self._add_content)):  # text without a header: drop its markers
                    pass
                return
            marker = yield from self._message(header)
            if not marker:
                return
            if marker in (START, CHANNEL):  # the end of the message is missing
                self._unread(marker)

    def _message(self, header: str) -> Steps[str]:
        """The message behind a header, up to the marker that ends it; "" at the end of the answer."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to_function = recipient is not None and recipient.group(1).startswith(FUNCTIONS)
        if recipient is not None and to_function and self._calls_allowed:
            name = recipient.group(1).removeprefix(FUNCTIONS)
            if is_name(name):
                self._start_call(name)
                return (yield from self._pass_arguments(_BODY_ENDS))
        self.in_reasoning = bool(channel and channel.group(1) == "analysis") or bool(recipient and not to_function)
        emit: Callable[[str], None] = self._add_reasoning if self.in_reasoning else self._add_content
        kind = "analysis" if self.in_reasoning else "final"
        if kind in self._seen:
            emit("\n")
        self._seen.add(kind)
        return (yield from self._until(_BODY_ENDS, emit))


class _Harmony(AnswerFormat):
    template_markers = (CHANNEL, "analysis", MESSAGE)
    markers = MARKERS


class HarmonyFormat(_Harmony, ToolCallFormat):
    """Tool calls in Harmony."""

    name = "openai"
    aliases = ("harmony", "gpt_oss")
    partner = "openai_gptoss"
    grammar_has_reasoning = True

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> HarmonyParser:
        return HarmonyParser(max_calls=max_calls, calls_allowed=bool(tools))

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        """Reasoning may come first. Calls come one by one, with `parallel` too: `<|call|>` ends the answer."""

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


class HarmonyReasoning(_Harmony, ReasoningFormat):
    """Reasoning in Harmony."""

    name = "openai_gptoss"
    aliases = ("gpt_oss", "harmony")
    partner = "openai"
    readable_as_content = False

    def new_parser(self, prompt_end: str, tool_parser: AnswerParser | None) -> AnswerParser:
        return tool_parser or HarmonyParser(max_calls=None, calls_allowed=False)

    def reasoning_end(self, prompt_end: str) -> ReasoningEnd:
        final = CHANNEL + "final"
        return ReasoningEnd((final + MESSAGE, f"{final} {CONSTRAIN}json{MESSAGE}"))
