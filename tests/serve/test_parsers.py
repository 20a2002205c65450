"""Reasoning and tool calls are found in text however it is cut, and what is no call stays words."""

from __future__ import annotations

import json
import random
import time

import pytest

from each import each
from eyas.errors import UserError
from eyas.serve.parsers.base import MAX_BLANKS, AnswerParser, OutputParser
from eyas.serve.parsers.registry import REASONING_FORMATS, TOOL_CALL_FORMATS, by_name, by_template
from serve.parser_cases import CASES, THINKING, TOOLS, Case

FORMATS = [format_.name for format_ in TOOL_CALL_FORMATS]
Parsed = tuple[str, str, list[tuple[str, str]]]


def tool_parser(name: str, max_calls: int | None = None) -> AnswerParser:
    return by_name(TOOL_CALL_FORMATS, name, "parser").new_parser(TOOLS, max_calls=max_calls)


def think_parser(name: str, end_of_prompt: str, tool_format: str | None = None) -> AnswerParser:
    format_ = by_name(REASONING_FORMATS, name, "parser")
    inner = None
    if tool_format is not None:
        inner = by_name(TOOL_CALL_FORMATS, tool_format, "parser").new_parser(TOOLS, max_calls=None)
    return format_.new_parser(end_of_prompt, inner)


def parse(parser: AnswerParser, pieces: list[str]) -> Parsed:
    """Content, reasoning and calls, put together from what came of each piece."""
    output = OutputParser(parser, markers=())
    content = reasoning = ""
    calls = dict[int, list[str]]()
    for number, piece in enumerate(pieces):
        delta = output.feed([piece], last=number == len(pieces) - 1)
        content += delta.content
        reasoning += delta.reasoning
        for one in delta.calls:
            if one.started is not None:
                assert one.index == len(calls)
                calls[one.index] = [one.started.name, ""]
            calls[one.index][1] += one.arguments
    assert content == output.content
    assert reasoning == output.reasoning
    assert list(calls.values()) == [[call.name, call.arguments] for call in output.calls]
    return content, reasoning, [(call.name, call.arguments) for call in output.calls]


def cuts_of(text: str) -> list[list[str]]:
    """The text whole, in single characters, cut in two at every place, and in pieces by chance."""
    chance = random.Random(0)
    ways = [[text], list(text) or [""], *([text[:at], text[at:]] for at in range(1, len(text)))]
    for _ in range(20):
        cuts = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, 12))) if len(text) > 1 else []
        ways.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return ways


@each("case", CASES)
def test_calls_are_found_however_the_text_is_cut(case: Case) -> None:
    for pieces in cuts_of(case.text):
        parsed = parse(tool_parser(case.format, case.max_calls), pieces)
        assert parsed == (case.content, case.reasoning, case.calls), pieces


@each(("name", "prompt", "text", "reasoning", "content"), THINKING)
def test_reasoning_is_found_however_the_text_is_cut(
    name: str, prompt: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in cuts_of(text):
        assert parse(think_parser(name, prompt), pieces) == (content, reasoning, []), pieces


@each("case", [case for case in CASES if case.format in ("hermes", "qwen3_coder", "glm45")])
def test_calls_are_parsed_behind_reasoning(case: Case) -> None:
    if case.max_calls is not None:
        return
    for pieces in cuts_of(f"Hm.</think>{case.text}")[:30]:
        parsed = parse(think_parser("qwen3", "<think>", case.format), pieces)
        assert parsed == (case.content, "Hm.", case.calls), pieces


def test_a_call_ends_the_reasoning_of_models_that_forget_to() -> None:
    text = "Hm.\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for pieces in cuts_of(text):
        parser = think_parser("qwen3", "<think>", "qwen3_coder")
        assert parse(parser, pieces) == ("", "Hm.\n", [("now", "{}")])
    assert parse(think_parser("deepseek_r1", "<think>", "qwen3_coder"), [text]) == ("", text, [])


def test_arguments_of_well_formed_calls_are_json() -> None:
    whole = [case for case in CASES if case.format != "hermes" and case.text.rstrip()[-1:] in (">", "]")]
    assert len(whole) > 15
    for case in whole:
        for _, arguments in case.calls:
            assert isinstance(json.loads(arguments), dict)


@each(
    ("name", "pieces"),
    [
        ("hermes", ['<tool_call>{"name": "get_weather", "arguments": {"city":', ' "long', ' text"']),
        ("qwen3_coder", ["<tool_call><function=get_weather><parameter=city>", "long", " text"]),
        ("glm45", ["<tool_call>get_weather<arg_key>city</arg_key><arg_value>", "long", " text"]),
        ("deepseek_v31", ['<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":', ' "long', ' text"']),
        (
            "kimi_k2",
            ['<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city":', ' "long', ' text"'],
        ),
        ("openai", ['<|channel|>commentary to=functions.get_weather<|message|>{"city":', ' "long', ' text"']),
    ],
)
def test_a_call_begins_with_its_name_and_its_arguments_follow_as_they_are_written(name: str, pieces: list[str]) -> None:
    parser = tool_parser(name)
    first, *rest = (parser.feed(piece).calls for piece in pieces)
    assert first[0].started is not None
    assert first[0].started.name == "get_weather"
    assert first[0].arguments in ('{"city":', '{"city": "')
    assert [calls[0].arguments.strip(' "') for calls in rest] == ["long", "text"]


def test_ids_have_the_form_that_templates_take() -> None:
    parser = tool_parser("mistral")
    parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]', last=True)
    assert len(parser.calls[0].id) == 9
    assert parser.calls[0].id.isalnum()
    kimi = tool_parser("kimi_k2")
    kimi.feed("<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}", last=True)
    assert kimi.calls[0].id == "functions.f:3"
    assert len({call.id for name in ("f", "g") for call in kimi.calls}) == 1


def test_reasoning_tokens_are_counted_without_their_markers() -> None:
    output = OutputParser(think_parser("qwen3", "assistant\n"), markers=())
    output.feed(["<think>", "one", " two"])
    output.feed([" three", "</think>", "answer"], last=True)
    assert output.reasoning_tokens == 3
    harmony = OutputParser(tool_parser("openai"), markers=())
    harmony.feed(["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant"])
    harmony.feed(["<|channel|>", "final", "<|message|>", "c", "<|return|>"], last=True)
    assert harmony.reasoning_tokens == 2


@each("name", FORMATS)
def test_hostile_answers_take_linear_time_and_never_raise(name: str) -> None:
    format_ = by_name(TOOL_CALL_FORMATS, name, "parser")
    starts = {
        "hermes": '<tool_call>{"name": "f", "arguments": ',
        "llama3_json": '{"name": "f", "parameters": ',
        "qwen3_coder": "<tool_call><function=get_weather><parameter=where>",
        "glm45": "<tool_call>get_weather<arg_key>where</arg_key><arg_value>",
        "pythonic": "[f(a=",
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    }
    fillers = ["[", "{", '"', "\\", " ", "`", "<", "-", "9", "a=1,", "<function=", "[f(a=", *format_.markers[:1]]
    for start in ("", starts.get(name, "")):
        for filler in fillers:
            text = start + filler * (20_000 // len(filler))
            begun = time.process_time()
            parse(tool_parser(name), [text])
            parse(tool_parser(name), [text[at : at + 32] for at in range(0, len(text), 32)])
            assert time.process_time() - begun < 1, (start, filler)


@each("name", FORMATS)
def test_noise_is_parsed_the_same_however_it_is_cut(name: str) -> None:
    format_ = by_name(TOOL_CALL_FORMATS, name, "parser")
    words = [*format_.markers, "\n", " ", '"name": "f"', '"arguments": ', " " * (MAX_BLANKS + 1), "x" * 600]
    words += ["<function=", "</function>", "<parameter=", "</parameter>", ">", "f", "get_weather", "{", "}", '"', "'"]
    words += ["[", "]", "(", ")", ",", "=", "```", "json", "functions.f:0", "city", "days", "1", "to=functions.f"]
    words += ["analysis", "final", "commentary", "ö"]
    chance = random.Random(1)
    for _ in range(40):
        text = "".join(chance.choices(words, k=chance.randrange(1, 14)))
        whole = parse(tool_parser(name), [text])
        assert parse(tool_parser(name), list(text)) == whole, text
        for _ in range(2):
            at = chance.randrange(len(text) + 1)
            assert parse(tool_parser(name), [text[:at], text[at:]]) == whole, text


def test_formats_are_found_by_name_by_alias_and_by_template() -> None:
    names = [name for format_ in TOOL_CALL_FORMATS for name in (format_.name, *format_.aliases)]
    assert len(set(names)) == len(names)
    assert by_name(REASONING_FORMATS, "harmony", "reasoning parser").name == "openai_gptoss"
    with pytest.raises(UserError, match=r"reasoning parser 'odd'.*openai_gptoss, glm45, deepseek_r1, qwen3"):
        by_name(REASONING_FORMATS, "odd", "reasoning parser")
    shown = {
        "<tool_call>": "hermes",
        "<tool_call>\n<function=": "qwen3_coder",
        "<tool_call>{name}<arg_key>": "glm45",
        "<｜tool▁sep｜>\n```json": "deepseek_v3",
        "<｜tool▁sep｜>": "deepseek_v31",
        "<|tool_call_argument_begin|>": "kimi_k2",
        "<|channel|>analysis<|message|>": "openai",
    }
    for template, name in shown.items():
        found = by_template(TOOL_CALL_FORMATS, template)
        assert found is not None
        assert found.name == name
    assert by_template(TOOL_CALL_FORMATS, "nothing of the kind") is None
