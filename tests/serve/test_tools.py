"""Tools: told to templates that know them, called by the model, enforced where required, read by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest

from chat_tokenizer import SPECIAL, letter_tokenizer
from each import each
from eyas.errors import UserError
from serve.conftest import serve
from serve.scripted import script
from serve.test_sockets import running

if TYPE_CHECKING:
    from eyas.drafter.model import Drafter
    from eyas.target.model import Target

TURNS = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}:{% if m.tool_calls %}{% for c in m.tool_calls %}SIGN{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
)
TEMPLATES = {
    "hermes": TURNS.replace("SIGN", "<tool_call>"),
    "llama3_json": TURNS.replace("SIGN", "") + '{# "parameters" ipython #}',
    "mistral": TURNS.replace("SIGN", "[TOOL_CALLS]"),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wind",
            "description": "How strong the wind is.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"$ref": "#/$defs/place"},
                    "hour": {"type": "integer", "maximum": 23, "minimum": 0},
                },
                "required": ["place", "hour"],
                "additionalProperties": False,
                "$defs": {"place": {"enum": ["sea", "hill"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = {
    "hermes": 'Well.\n<tool_call>\n{"name": "wind", "arguments": {"place": "sea"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "wind", "parameters": {"place": "sea"}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "wind", "arguments": {"place": "sea"}}, {"name": "now", "arguments": {}}]',
}


def speaking(target: Target, dialect: str) -> Target:
    """The target with a template of that dialect; Mistral's mark is a special token."""
    special = ("[TOOL_CALLS]", *SPECIAL[1:]) if dialect == "mistral" else SPECIAL
    return replace(target, tokenizer=letter_tokenizer(TEMPLATES[dialect], special))


@pytest.fixture(scope="module", params=list(TEMPLATES))
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tooled(target: Target, tiny_drafter: Drafter, dialect: str) -> Iterator[Any]:
    with serve(speaking(target, dialect), tiny_drafter) as client:
        yield client


def check_call(call: Any, names: set[str]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    assert call["type"] == "function"
    assert call["function"]["name"] in names
    if call["function"]["name"] == "wind":
        assert arguments["place"] in ("sea", "hill")
        assert 0 <= arguments["hour"] <= 23
    else:
        assert arguments == {}


def ask(client: Any, **fields: Any) -> Any:
    return client.chat(tools=TOOLS, max_tokens=150, seed=3, **{"temperature": 1, **fields})


def test_a_required_call_comes_in_every_way_of_drafting(tooled: Any) -> None:
    told = []
    for speculative in ({"mode": "off"}, {"mode": "fixed", "depth": 3}, {"mode": "auto"}):
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "speculative": speculative}
        (choice,) = ask(tooled, **fields).json["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        check_call(call, {"wind", "now"})
        told.append(call["function"])
    assert told[0] == told[1] == told[2]
    tooled.all_back()


def test_a_named_function_is_called_once(tooled: Any) -> None:
    for name in ("wind", "now"):
        choice = {"type": "function", "function": {"name": name}}
        message = ask(tooled, tool_choice=choice, n=2).json["choices"][1]["message"]
        (call,) = message["tool_calls"]
        check_call(call, {name})


def test_a_stream_of_a_call_joins_to_the_whole(tooled: Any) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(tooled, **fields).json["choices"][0]["message"]["tool_calls"][0]["function"]
    parts = [event["choices"][0] for event in ask(tooled, **fields, stream=True).events]
    deltas = [one for part in parts for one in part["delta"].get("tool_calls", ())]
    assert deltas[0]["id"]
    assert deltas[0]["function"]["name"] == whole["name"]
    assert not any("id" in delta or "name" in delta["function"] for delta in deltas[1:])
    assert {delta["index"] for delta in deltas} == {0}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == whole["arguments"]
    assert not any(part["delta"].get("content") for part in parts)
    assert parts[-1]["finish_reason"] == "tool_calls"


def test_voluntary_calls_are_found_by_the_openai_client(target: Target, tiny_drafter: Drafter, dialect: str) -> None:
    with serve(speaking(target, dialect), tiny_drafter) as client, running(client) as server:
        script(client, CALLS[dialect])
        asking = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
        choice = asking.chat.completions.create(**ask).choices[0]
        expected = [("wind", '{"place": "sea"}'), ("now", "{}")]
        assert choice.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == expected
        assert choice.message.content == ("Well." if dialect == "hermes" else None)
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for chunk in asking.chat.completions.create(**ask, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
        assert [(names[index], arguments[index]) for index in names] == expected
        one = asking.chat.completions.create(**ask, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls) == 1
        script(client, CALLS[dialect], marks={})
        silent = asking.chat.completions.create(**ask, tool_choice="none").choices[0]
        assert silent.finish_reason == "stop"
        assert silent.message.tool_calls is None
        assert silent.message.content == CALLS[dialect]


def test_a_conversation_with_calls_and_results_reaches_the_template(tooled: Any, dialect: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "wind", "arguments": '{"place":"sea"}'}}
    messages = [
        {"role": "user", "content": "Wind?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "9"},
    ]
    seen: list[Any] = []
    tokenizer = tooled.application.context.engine_client.target.tokenizer
    apply = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *arguments, **named: seen.append(apply(*arguments, **named)) or seen[-1]
    try:
        assert ask(tooled, messages=messages, tool_choice="auto").status == 200
        assert ask(tooled, messages=messages, tool_choice="none").status == 200
    finally:
        del tokenizer.apply_chat_template
    with_tools, without = seen
    sign = {"hermes": "<tool_call>", "llama3_json": "", "mistral": "[TOOL_CALLS]"}[dialect]
    assert with_tools.startswith("[wind][now]")
    assert f'assistant:{sign}wind{{"place": "sea"}}' in with_tools
    assert "tool:9" in with_tools
    assert without == with_tools.removeprefix("[wind][now]")


@each(
    ("fields", "parts"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, ["rain", "wind, now"]),
        ({"tools": [], "tool_choice": "required"}, ["tool_choice", "no tools"]),
        ({"tools": [TOOLS[1], TOOLS[1]]}, ["two functions called 'now'"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ["tools.0.function.name", "a b"]),
        ({"tools": [{"type": "browser"}]}, ["tools.0.type", "browser"]),
        ({"guided_regex": "a"}, ["guided_regex", "tool_choice none"]),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, ["response_format", "tools"]),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}],
                "tool_choice": "required",
            },
            ["tools", "odd"],
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            ["messages.0.tool_calls", "'f'", "no JSON object"],
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(tooled: Any, fields: Any, parts: list[str]) -> None:
    tooled.chat(**{"tools": TOOLS} | fields).assert_refused(400, *parts)


def test_a_template_that_knows_no_tools_is_named(client: Any, target: Target, tiny_drafter: Drafter) -> None:
    client.chat(tools=TOOLS).assert_refused(400, "tools", "chat template of tiny does not mention tools")
    ignored, plain = client.chat(tools=TOOLS, tool_choice="none"), client.chat()
    assert ignored.status == 200
    assert ignored.json["choices"] == plain.json["choices"]
    unknown = replace(target, tokenizer=letter_tokenizer(TURNS.replace("SIGN", "call:")))
    with serve(unknown, tiny_drafter) as other:
        other.chat(tools=TOOLS).assert_refused(400, "tools", "--tool-call-parser")
    with serve(unknown, tiny_drafter, tool_parser="llama3_json") as other:
        assert ask(other, tool_choice="required").json["choices"][0]["message"]["tool_calls"]
    with (
        pytest.raises(UserError, match=r"'odd'.*hermes, mistral, llama3_json, pythonic"),
        serve(unknown, None, tool_parser="odd"),
    ):
        pass
