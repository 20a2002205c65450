"""Tool calls are found in text however it is cut, and what is no call stays words."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eyas.serve.tool_parser import ToolCallParser
from eyas.serve.tools import TOOL_CALL_FORMATS

BY_NAME = {format_.name: format_ for format_ in TOOL_CALL_FORMATS}


def read(name: str, pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, put together from what came of each piece."""
    parser: ToolCallParser = BY_NAME[name].new_parser(max_calls=max_calls)
    content, calls = "", dict[int, list[str]]()
    for number, piece in enumerate(pieces):
        delta = parser.feed(piece, last=number == len(pieces) - 1)
        content += delta.content
        for one in delta.calls:
            if one.started is not None:
                calls[one.index] = [one.started.name, ""]
            calls[one.index][1] += one.arguments
    assert content == parser.content
    assert list(calls.values()) == [[call.name, call.arguments] for call in parser.calls]
    assert len({call.id for call in parser.calls}) == len(parser.calls)
    return content, [(call.name, call.arguments) for call in parser.calls]


CASES: list[tuple[str, str, str, list[tuple[str, str]], dict[str, Any]]] = [
    (
        "hermes",
        'Sure. <b>\n<tool_call>\n{"name": "f", "arguments": {"x": "a } \\" ]b", "y": [1, {"z": null}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        "Sure. <b>",
        [("f", '{"x": "a } \\" ]b", "y": [1, {"z": null}]}'), ("g", "{}")],
        {},
    ),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", [], {}),
    ("hermes", '<tool_call>{"nom": 1}</tool_call> rest', '<tool_call>{"nom": 1}</tool_call> rest', [], {}),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')], {}),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', [], {}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')], {}),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")], {}),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"a',
        "",
        [("f", "{}")],
        {"max_calls": 1},
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
        {},
    ),
    ("llama3_json", '{"answer": 3} is it', '{"answer": 3} is it', [], {}),
    ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', [], {}),
    ("llama3_json", " \n hello ", " \n hello ", [], {}),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
        {},
    ),
    ("mistral", "no [TOOL] calls", "no [TOOL] calls", [], {}),
]


@pytest.mark.parametrize(("name", "text", "content", "calls", "options"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, str]], options: dict[str, Any]
) -> None:
    assert read(name, [text], **options) == (content, calls)
    assert read(name, list(text), **options) == (content, calls)
    chance = random.Random(0)
    for _ in range(100):
        cuts = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, chance.randrange(12))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, pieces, **options) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    parser = BY_NAME["hermes"].new_parser(max_calls=None)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a":').calls[0].arguments == '{"a":'
    assert parser.feed(' "long').calls[0].arguments == ' "long'
    assert parser.feed(' text"').calls[0].arguments == ' text"'


def test_ids_have_the_form_that_templates_take() -> None:
    parser = BY_NAME["mistral"].new_parser(max_calls=None)
    parser.feed('[TOOL_CALLS][{"name": "f", "arguments": {}}]', last=True)
    assert len(parser.calls[0].id) == 9
    assert parser.calls[0].id.isalnum()
