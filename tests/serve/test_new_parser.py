"""The seams for parsers: a new format is one module, such as this one, and one line in `parsers/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from eyas.serve.parsers import registry
from eyas.serve.parsers.base import AnswerParser, Markers, Steps
from eyas.serve.parsers.formats import (
    ReasoningEnd,
    ReasoningFormat,
    ToolCallFormat,
    calls_grammar,
    json_rule,
    literal,
    parameters_of,
)
from eyas.serve.protocol.completions import Tool
from serve.conftest import serve
from serve.scripted import joined, script, with_template
from serve.test_tools import TOOLS, TURNS, check_call

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

CALL, CALL_END, HMM, SO = "#call ", "#done", "hmm:", "so:"


class ToyCallParser(AnswerParser):
    """Calls such as `#call now {}#done`."""

    openings = (CALL,)

    def _parse(self) -> Steps[None]:
        while (yield from self._pass_text(Markers(CALL))):
            name, _ = yield from self._header(Markers(" "))
            self._start_call(name)
            yield from self._pass_arguments(Markers(CALL_END))


class ToyCalls(ToolCallFormat):
    name = "toy"
    template_markers = (CALL,)

    def new_parser(self, tools: Sequence[Tool], *, max_calls: int | None) -> AnswerParser:
        return ToyCallParser(max_calls=max_calls)

    def lark_grammar(self, tools: Sequence[Tool], *, parallel: bool, special_tokens: Mapping[str, int]) -> str:
        rules = [f"{literal(f'{tool.function.name} ', {})} {json_rule(parameters_of(tool))}" for tool in tools]
        return calls_grammar(rules, parallel=parallel, special_tokens=special_tokens, around_each=(CALL, CALL_END))


class ToyReasoningParser(AnswerParser):
    """Reasoning such as `hmm: ... so:`, then the answer."""

    def __init__(self, tool_parser: AnswerParser | None) -> None:
        super().__init__()
        self._tool_parser = tool_parser
        self.calls = tool_parser.calls if tool_parser is not None else []

    def feed(self, text: str, *, last: bool = False) -> Any:
        delta = super().feed(text, last=last)
        if self._tool_parser is None:
            return delta
        parsed = self._tool_parser.feed(delta.content, last=last)
        parsed.reasoning = delta.reasoning
        return parsed

    def _parse(self) -> Steps[None]:
        if (yield from self._take(HMM)):
            self.in_reasoning = True
            yield from self._until(Markers(SO), self._add_reasoning)
            self.in_reasoning = False
        yield from self._pass_rest()


class ToyReasoning(ReasoningFormat):
    name = "toy_reasoning"
    template_markers = (HMM,)

    def new_parser(self, prompt_end: str, tool_parser: AnswerParser | None) -> AnswerParser:
        return ToyReasoningParser(tool_parser)

    def reasoning_end(self, prompt_end: str) -> ReasoningEnd | None:
        return None  # grammars apply from the start: a required call comes without reasoning


@pytest.fixture
def toy_server(target: Target, tiny_drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "TOOL_CALL_FORMATS", (ToyCalls(), *registry.TOOL_CALL_FORMATS))
    monkeypatch.setattr(registry, "REASONING_FORMATS", (ToyReasoning(), *registry.REASONING_FORMATS))
    template = TURNS.replace("SIGN", CALL) + f"{{# {HMM} #}}"
    with serve(with_template(target, template), tiny_drafter, reasoning_parser="auto") as client:
        yield client


def test_a_new_format_serves_calls_and_reasoning(toy_server: Any) -> None:
    generate = toy_server.application.context.engine_client.generate
    script(toy_server, 'hmm:which?so:Look: #call wind {"place": "sea"}#done#call now {}#done')
    (choice,) = toy_server.chat(tools=TOOLS).json["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == ("Look:", "which?", "tool_calls")
    assert calls == [["wind", '{"place": "sea"}'], ["now", "{}"]]
    streamed = joined(toy_server.chat(tools=TOOLS, stream=True))
    assert streamed == {"content": "Look:", "reasoning": "which?", "tool_calls": calls}
    toy_server.application.context.engine_client.generate = generate
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 160, "temperature": 1, "seed": 1}
    (choice,) = toy_server.chat(tools=TOOLS, **fields).json["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    for call in choice["message"]["tool_calls"]:
        check_call(call, {"wind", "now"})
    toy_server.all_back()
