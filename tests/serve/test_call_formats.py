"""Each format from end to end: required calls by the grammar, calls of the model's own will, nothing leaks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from chat_tokenizer import chat_tokenizer
from each import each
from eyas.grammar.llguidance import LlGuidance
from eyas.serve.api_error import ApiError
from eyas.serve.parsers import delimited, harmony
from eyas.serve.parsers.registry import TOOL_CALL_FORMATS, by_name
from eyas.serve.protocol.completions import Tool
from serve.conftest import serve
from serve.parser_cases import CASES, TOOLS, offered
from serve.scripted import joined, script, with_template
from serve.test_tools import TOOLS as WIND
from serve.test_tools import TURNS, check_call

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

# What marks the format in a template, its special tokens, and letters it needs beside the usual ones.
DIALECTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "qwen3_coder": ("<tool_call><function=", (), ""),
    "glm45": ("<tool_call><arg_key>", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"), ""),
    "deepseek_v3": ("<｜tool▁sep｜>```json", delimited.DEEPSEEK_MARKERS, "`"),
    "deepseek_v31": ("<｜tool▁sep｜>", delimited.DEEPSEEK_MARKERS, ""),
    "kimi_k2": ("<|tool_call_argument_begin|>", delimited.KIMI_MARKERS, ""),
    "pythonic": ("", (), ""),
    "openai": ("<|channel|>analysis<|message|>", harmony.MARKERS, ""),
}


@pytest.fixture(scope="module", params=list(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tooled(target: Target, tiny_drafter: Drafter, dialect: str) -> Any:
    sign, special, letters = DIALECTS[dialect]
    speaking = with_template(target, TURNS.replace("SIGN", sign), special, letters)
    with serve(speaking, tiny_drafter, tool_parser="pythonic" if dialect == "pythonic" else None) as client:
        yield client


def test_a_required_call_keeps_to_the_schema(tooled: Any, dialect: str) -> None:
    fields = {"tools": WIND, "max_tokens": 160, "temperature": 1, "parallel_tool_calls": False}
    for seed, choice in enumerate(("required", {"type": "function", "function": {"name": "wind"}})):
        if dialect == "openai" and seed == 0:
            continue  # it may think first, and the tiny target would never stop
        told = []
        for speculative in ({"mode": "off"}, {"mode": "fixed", "depth": 3}):
            asked = fields | {"tool_choice": choice, "seed": seed, "speculative": speculative}
            (answer,) = tooled.chat(**asked).json["choices"]
            if dialect == "openai" and answer["finish_reason"] == "length":
                continue
            assert answer["finish_reason"] == "tool_calls", answer
            assert answer["message"]["content"] is None
            (call,) = answer["message"]["tool_calls"]
            check_call(call, {"wind", "now"})
            told.append(call["function"])
        assert told[1:] == told[:1] * (len(told) - 1)
    tooled.all_back()


def test_voluntary_calls_are_parsed_and_no_marker_leaks(tooled: Any, dialect: str) -> None:
    cases = [case for case in CASES if case.format == dialect and case.max_calls is None and case.text]
    generate = tooled.application.context.engine_client.generate
    try:
        for case in cases:
            script(tooled, case.text)
            (choice,) = tooled.chat(tools=offered()).json["choices"]
            message = choice["message"]
            assert (message["content"] or "") == case.content
            functions = [call["function"] for call in message.get("tool_calls", ())]
            calls = [[function["name"], function["arguments"]] for function in functions]
            assert calls == [list(call) for call in case.calls]
            assert (message.get("reasoning") or "") == case.reasoning
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            streamed = joined(tooled.chat(tools=offered(), stream=True))
            assert streamed.get("content", "") == case.content
            assert streamed.get("tool_calls", []) == calls
            assert streamed.get("reasoning", "") == case.reasoning
    finally:
        tooled.application.context.engine_client.generate = generate


@pytest.fixture(scope="module")
def guidance() -> Any:
    tokenizer = chat_tokenizer("")
    guidance = LlGuidance(tokenizer, len(tokenizer))

    def accepts(grammar: str, text: str) -> bool:
        matcher = guidance.lark(grammar).matcher(prompt_length=0, stop_ids=[1])
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher._matcher.is_accepting())

    return accepts


@each("name", [format_.name for format_ in TOOL_CALL_FORMATS])
def test_what_a_grammar_allows_is_what_the_parser_finds(guidance: Any, name: str) -> None:
    """In formats that write JSON and in those that write text, for one call and for two."""
    format_ = by_name(TOOL_CALL_FORMATS, name, "parser")
    where, note = '{"a": [1, {"b": "}"}]}', 'two\nlines </b> and "quotes"'
    escaped = json.dumps(note)
    both = {
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n"
        f"3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=where>\n{where}\n</parameter>\n<parameter=note>\n"
        f"{note}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>where</arg_key>\n"
        f"<arg_value>{where}</arg_value>\n<arg_key>note</arg_key>\n<arg_value>{note}</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        "pythonic": f'[get_weather(city="Rome", days=3, unit="C", where={where}, note={escaped}), now()]',
    }
    arguments = f'{{"city": "Rome", "days": 3, "unit": "C", "where": {where}, "note": {escaped}}}'
    wrapped = {
        "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>',
        "mistral": '{"name": "NAME", "arguments": ARGS}',
        "llama3_json": '{"name": "NAME", "parameters": ARGS}',
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
        "deepseek_v31": "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
        "kimi_k2": "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
        "openai": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
    }
    around = {
        "hermes": ("", "\n", ""),
        "mistral": ("[TOOL_CALLS][", ", ", "]"),
        "llama3_json": ("", "; ", ""),
        "deepseek_v3": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    }
    expected = [("get_weather", json.loads(arguments)), ("now", {})]
    if name in wrapped:
        calls = [
            wrapped[name].replace("NAME", called).replace("ARGS", given)
            for called, given in (("get_weather", arguments), ("now", "{}"))
        ]
        before, between, behind = around.get(name, ("", "", ""))
        text = before + between.join(calls[: 1 if name == "openai" else 2]) + behind
        expected = expected[: 1 if name == "openai" else 2]
    else:
        text = both[name]
    grammar = format_.lark_grammar(TOOLS, parallel=True, special_tokens={})
    assert guidance(grammar, text)
    assert not guidance(grammar, text.replace("Rome", "", 1).replace("days", "Days", 1))
    assert not guidance(grammar, "")
    if len(expected) == 2:
        assert not guidance(format_.lark_grammar(TOOLS, parallel=False, special_tokens={}), text)
    parser = format_.new_parser(TOOLS, max_calls=None)
    assert parser.feed(text, last=True).content == ""
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == expected
    if name == "openai":
        thought = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant" + text
        assert guidance(grammar, thought)


def test_a_schema_without_properties_is_refused_where_arguments_are_written_one_by_one() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"anyOf": [{"type": "object"}]}}}
    tool = Tool.model_validate(odd)
    for name in ("qwen3_coder", "glm45", "pythonic"):
        format_ = by_name(TOOL_CALL_FORMATS, name, "parser")
        with pytest.raises(ApiError, match=r"'odd' use anyOf.*tool_choice auto"):
            format_.lark_grammar([tool], parallel=True, special_tokens={})
